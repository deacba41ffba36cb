"""Transformers in JAX and Flax: translation, language models and classification driven by configs."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Chat", "Request", "Run", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Imports the Python API when it is first used: commands read their flags before they import JAX."""
    if name in ("Chat", "Request", "Run", "load"):
        from tformer_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
