"""Programs compiled ahead of time for TPU slices that this machine does not have."""
