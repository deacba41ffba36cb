"""Which texts may be symbols of a vocabulary, and which patterns placeholders."""

from typing import Any

from tformer_jax.special_tokens import SPECIAL_TOKENS

PLACEHOLDERS = ("percent", "braces", "tags", "urls")
"""Values of `data.placeholders`."""


def check_symbols(data: Any) -> None:
    """Raises `ConfigError` if `symbols` or `placeholders` of a `DataConfig` cannot be used."""
    for name in ("symbols", "placeholders"):
        values = getattr(data, name)
        if values and "file" in data.tokenizer_kinds:
            raise data.error(name, "is not used by data.tokenizer='file', whose tokenizers have their own; write ()")
        if len(set(values)) < len(values):
            raise data.error(name, "has a value twice")
    for symbol in data.symbols:
        if not symbol or " ".join(symbol.split()) != symbol or not symbol.isprintable():
            raise data.error("symbols", f"{symbol!r} must have visible characters, and single spaces only within")
        if symbol in SPECIAL_TOKENS:
            raise data.error("symbols", f"{symbol!r} is the name of a special token; choose another text")
