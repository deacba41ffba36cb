"""Inference: sampling, beam search, cached decoding, and interfaces that take texts."""
