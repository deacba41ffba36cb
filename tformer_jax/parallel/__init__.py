"""The device mesh, and the shardings of parameters and batches on it."""
