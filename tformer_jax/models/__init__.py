"""The three model families, put together from the parts in `nn`."""
