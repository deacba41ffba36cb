"""The three model families, assembled from the modules of `nn`."""
