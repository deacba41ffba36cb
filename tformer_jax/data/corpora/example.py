"""Examples of corpora, and the error of those that cannot be read."""

from collections.abc import Mapping

from tformer_jax.base.errors import UserError

Example = Mapping[str, str]
"""{"source", "target"} for translation, with many languages {"source", "target", "direction"}; {"text"} for language
models; {"text", "label"} for classification."""

NO_TEXT = ("label", "direction")
"""Keys of an example whose values are names, not texts."""


class DataError(UserError):
    """A corpus cannot be read; the message names the file and line, and the fix."""
