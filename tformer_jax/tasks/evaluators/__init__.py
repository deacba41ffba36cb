"""Metrics of a split, and what they are computed from."""
