"""Scaled dot-product attention: one meaning (`core`), one file a backend."""

from tformer_jax.nn.attention_ops.core import Backend, Bias, Needs, Operands, Scoring, attend, usable

__all__ = ["Backend", "Bias", "Needs", "Operands", "Scoring", "attend", "usable"]
