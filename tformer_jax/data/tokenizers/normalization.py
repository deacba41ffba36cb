"""Normalization of texts before tokenization."""

import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import metadata
from typing import Any

from tformer_jax.config import DataConfig
from tformer_jax.data import characters
from tformer_jax.data.languages import read_language
from tformer_jax.data.tokenizers.base import Tokenizer, import_library

Step = Callable[[str], str]

ENTITIES = {
    "&amp;": "&",
    "&#124;": "|",
    "&lt;": "<",
    "&gt;": ">",
    "&apos;": "'",
    "&quot;": '"',
    "&#91;": "[",
    "&#93;": "]",
}
"""The entities that Moses' tokenizer.perl writes; `&` alone and other entities are ordinary text."""
ENTITY = re.compile("|".join(map(re.escape, ENTITIES)))
WHITESPACE = "whitespace"
"""The step of `data.clean_whitespace`; the others are those of `data.normalize`."""
BY_LANGUAGE = {"punctuation", "moses"}
"""Steps whose rules depend on the language."""


def normalizer(steps: Sequence[str], language: str) -> Step:
    """Returns a function that applies steps to a text, in order.

    Args:
        steps: names in `STEPS`.
        language: ISO 639-1 code, for Moses' rules.

    Raises:
        UserError: the library of a step is not installed.
    """
    functions = [STEPS[step](language) for step in steps]
    return lambda text: functools.reduce(lambda result, function: function(result), functions, text)


class NormalizedTokenizer:
    """Normalizes each text by `steps`, in order, before `tokenizer` encodes it; decodes as `tokenizer` does."""

    kind = "normalized"

    def __init__(self, tokenizer: Tokenizer, steps: Sequence[str], language: str):
        """Arguments and exceptions are those of `normalizer`."""
        self.tokenizer, self.steps, self.language = tokenizer, tuple(steps), language
        self.vocab_size, self.fallback_bytes = tokenizer.vocab_size, tokenizer.fallback_bytes
        self.special = tokenizer.special
        self.normalize = normalizer(steps, language)
        """Applies the steps to a text."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NormalizedTokenizer, (self.tokenizer, self.steps, self.language)  # OpenCC's converters are not pickled

    def encode(self, text: str) -> list[int]:
        """Encodes the normalized text."""
        return self.tokenizer.encode(self.normalize(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does."""
        return self.tokenizer.encode_batch(list(map(self.normalize, texts)))

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Returns the normalized text of the ids."""
        return self.tokenizer.decode(ids, unknown=unknown)

    def to_json(self) -> dict[str, Any]:
        """Returns the kind, the steps, the language, and the JSON of the inner tokenizer."""
        return {
            "kind": self.kind,
            "steps": list(self.steps),
            "language": self.language,
            "tokenizer": self.tokenizer.to_json(),
        }


def steps_of(cfg: DataConfig, keys: Collection[str]) -> tuple[str, ...]:
    """Returns the steps that normalize the texts of examples with these keys, in order."""
    clean = {*keys} != {"text"} if cfg.clean_whitespace is None else cfg.clean_whitespace
    return (WHITESPACE, *cfg.normalize) if clean else cfg.normalize


def signature(steps: Sequence[str]) -> str:
    """Returns the steps and the versions of their libraries, for records of results; "raw" without steps."""
    libraries = {step: f":{LIBRARIES[step]}-{metadata.version(LIBRARIES[step])}" for step in steps if step in LIBRARIES}
    return "|".join(step + libraries.get(step, "") for step in steps) or "raw"


def _moses(language: str) -> Step:
    """Moses' tokenizer.perl, which writes some characters as entities; those of the input are resolved first."""
    moses = import_library("sacremoses", "data.normalize='moses'").MosesTokenizer(moses_code(language))
    return lambda text: moses.tokenize(ENTITY.sub(lambda match: ENTITIES[match[0]], text), return_str=True)


def _punctuation(language: str) -> Step:
    """Moses' normalize-punctuation.perl."""
    moses = import_library("sacremoses", "data.normalize='punctuation'")
    normalize: Step = moses.MosesPunctNormalizer(moses_code(language)).normalize
    return normalize


def moses_code(name: str) -> str:
    """Returns the code by which sacremoses chooses its rules, which are those of English for other languages."""
    language = read_language(name)
    if language is None:
        logging.getLogger(__name__).warning("%r is not a language: Moses' rules for English are used", name)
        return "en"
    return language.code


def _simplified(language: str) -> Step:
    """OpenCC's conversion of traditional Chinese characters; texts in other scripts stay as they are."""
    convert: Step = import_library("opencc", "data.normalize='simplified'").OpenCC("t2s").convert
    return convert


STEPS: dict[str, Callable[[str], Step]] = {
    WHITESPACE: lambda language: characters.clean_whitespace,
    "nfkc": lambda language: functools.partial(unicodedata.normalize, "NFKC"),
    "lowercase": lambda language: str.lower,
    "punctuation": _punctuation,
    "moses": _moses,
    "simplified": _simplified,
}
"""Functions that build a step for a language, by the step's name."""
LIBRARIES = {"punctuation": "sacremoses", "moses": "sacremoses", "simplified": "opencc"}
"""The distribution that implements a step."""
