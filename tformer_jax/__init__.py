"""Transformers in JAX and Flax: translation, language models and classification driven by configs."""

__version__ = "0.1.0"
