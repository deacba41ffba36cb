"""Training in Python: configs, data, optimizers, metrics and callbacks of one's own; `tformer_jax` has the names."""
