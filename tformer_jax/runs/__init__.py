"""Runs: folders, checkpoints, weights, metrics, provenance, resuming, and the loop that writes them."""
