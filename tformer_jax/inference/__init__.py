"""Inference: sampling, beam search, cached decoding, and interfaces from strings to strings."""
