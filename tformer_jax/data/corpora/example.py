"""Examples of corpora, and the error of those that cannot be read."""

from collections.abc import Mapping

from tformer_jax.base.errors import UserError

Example = Mapping[str, str]
"""{"source", "target"} for translation, with many languages {"source", "target", "direction"}; {"text"} for language
models; {"text", "label"} for classification; {"messages"}, a `Chat` in JSON, for tuning on conversations."""

NO_TEXT = ("label", "direction", "answers", "links")
"""Keys whose values are no texts: names, links of words, and which tokens of a conversation are the assistant's."""


class DataError(UserError):
    """A corpus cannot be read; the message names the file and line, and the fix."""
