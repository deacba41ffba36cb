"""From text to batches of token ids. Nothing here imports JAX: loader workers must not start a device runtime."""
