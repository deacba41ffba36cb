"""Examples of corpora, the types of their fields, and the error for examples that cannot be read."""

from collections.abc import Collection, Mapping

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.data.characters import clean_whitespace, is_blank

Example = Mapping[str, str]
"""{"source", "target"} for translation, with many languages {"source", "target", "direction"}; {"text"} for language
models; {"text", "label"} for classification; {"messages"}, a `Chat` in JSON, for tuning on conversations."""

NO_TEXT = ("label", "direction", "answers", "links")
"""Keys whose values are no texts: names, links of words, and which tokens of a conversation are the assistant's."""


class DataError(UserError):
    """A corpus cannot be read; the message names the file and line, and the fix."""


def type_name(value: object) -> str:
    """Returns the type of a field's value, in words of JSON where Python has others."""
    return "null" if value is None else "an object" if isinstance(value, Mapping) else type(value).__name__


def is_cleaned(cfg: DataConfig, keys: Collection[str]) -> bool:
    """Returns whether `data.clean_whitespace` holds for examples with these keys."""
    return not {*keys} <= {"text", "messages"} if cfg.clean_whitespace is None else cfg.clean_whitespace


def cleaned(cfg: DataConfig, example: Example) -> Example:
    """Returns an example whose white space is as models read it: texts that they cannot distinguish are equal."""
    return {key: clean_whitespace(text) for key, text in example.items()} if is_cleaned(cfg, example) else example


def length_ratio(pair: Example) -> float:
    """Returns the number of characters of a pair's longer side, divided by the number of the shorter side."""
    sizes = sorted(len(pair[side].strip()) for side in ("source", "target"))
    return sizes[1] / max(sizes[0], 1)


def is_blank_side(key: str, text: str) -> bool:
    """Returns whether a text of an example has no visible character; for a conversation, a text of one side."""
    if key != "messages":
        return is_blank(text)
    from tformer_jax.data.chat.messages import has_blank_side

    return has_blank_side(text)
