"""The model families, assembled from the modules of `nn`."""
