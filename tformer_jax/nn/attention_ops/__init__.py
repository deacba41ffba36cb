"""Scaled dot-product attention: the interface (`core`), and one module per backend."""

from tformer_jax.nn.attention_ops.core import Backend, Bias, Needs, Operands, Scoring, attend, get_backend
from tformer_jax.nn.attention_ops.reference import attention_weights

__all__ = ["Backend", "Bias", "Needs", "Operands", "Scoring", "attend", "attention_weights", "get_backend"]
