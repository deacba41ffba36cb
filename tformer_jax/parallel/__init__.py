"""The device mesh, shardings of parameters and batches, groups of processes, and XLA flags."""
