"""Ahead-of-time compilation for TPU slices that this machine does not have."""
