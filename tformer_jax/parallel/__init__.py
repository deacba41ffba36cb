"""The mesh of devices, and where parameters and batches live on it."""
