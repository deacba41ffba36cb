"""Normalization of texts before tokenization; symbols, which are one token each wherever they stand, stay."""

import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType

from tformer_jax.base.checks import import_extra
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.data import characters
from tformer_jax.data.corpora.example import is_cleaned

PROTECTED = "\ufffe"
"""A noncharacter of Unicode, which stands for a symbol in a text while the text is normalized."""


@functools.cache
def symbol_pattern(symbols: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern with one group that matches the longest symbol at a place of a text."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(symbols, key=len, reverse=True)))})")


@functools.cache
def ids_of_symbols(symbols: tuple[str, ...], first: int) -> Mapping[str, int]:
    """Returns consecutive ids from `first` on by symbol."""
    return MappingProxyType({symbol: i for i, symbol in enumerate(symbols, first)})


def texts_between(text: str, symbols: tuple[str, ...]) -> Sequence[str]:
    """Returns the texts between the symbols of a text."""
    return symbol_pattern(symbols).split(text)[::2] if symbols else [text]


def change_around(text: str, symbols: tuple[str, ...], change: Callable[[str], str]) -> str:
    """Returns a changed text in which symbols are as before.

    Args:
        change: neither adds nor removes `PROTECTED`, which stands for each symbol.
    """
    parts = symbol_pattern((*symbols, PROTECTED)).split(text)
    first, *others = change(PROTECTED.join(parts[::2])).split(PROTECTED)
    return first + "".join(symbol + part for symbol, part in zip(parts[1::2], others, strict=True))


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
"""The step of `data.clean_whitespace`; `data.normalize` names the others."""
MOSES = "moses"
"""The step that outputs can be freed of."""
BY_LANGUAGE = {"punctuation", MOSES}
"""Steps whose rules depend on the language."""


def normalizer(steps: Sequence[str], language: str, symbols: tuple[str, ...] = ()) -> Step:
    """Returns a function that applies steps to a text, in order.

    Args:
        steps: names in `STEPS`.
        language: ISO 639-1 code, for Moses' rules.
        symbols: texts that steps after `WHITESPACE` leave as they are.

    Raises:
        UserError: the library of a step is not installed.
    """
    functions = [STEPS[step](language) for step in steps]
    if symbols:
        cleaning = steps[:1] == (WHITESPACE,)
        changes = functions[cleaning:]
        functions = [*functions[:cleaning], lambda text: change_around(text, symbols, _composed(changes))]
    return _composed(functions)


def _composed(functions: Sequence[Step]) -> Step:
    return lambda text: functools.reduce(lambda result, function: function(result), functions, text)


def detokenizer(steps: Sequence[str], language: str) -> Step:
    """Returns Moses' detokenizer.perl, which undoes the step `moses` in outputs.

    Raises:
        UserError: `moses` is not among the steps, or sacremoses is not installed.
    """
    if MOSES not in steps:
        raise UserError(
            "decode.detokenize=True: outputs are not tokens of Moses (data.normalize has no 'moses'); write False"
        )
    moses = import_extra("decode.detokenize=True", "sacremoses", "tokenizers").MosesDetokenizer(_moses_code(language))
    return lambda text: moses.detokenize(text.split())


def steps_of(cfg: DataConfig, keys: Collection[str]) -> tuple[str, ...]:
    """Returns the steps that normalize the texts of examples with these keys, in order."""
    return (WHITESPACE, *cfg.normalize) if is_cleaned(cfg, keys) else cfg.normalize


def signature(steps: Sequence[str]) -> str:
    """Returns the steps and the versions of their libraries, for records of results; "raw" without steps."""
    libraries = {step: f":{LIBRARIES[step]}-{metadata.version(LIBRARIES[step])}" for step in steps if step in LIBRARIES}
    return "|".join(step + libraries.get(step, "") for step in steps) or "raw"


def _moses(language: str) -> Step:
    """Moses' tokenizer.perl, which writes some characters as entities; entities of the input are resolved first."""
    moses = import_extra("data.normalize='moses'", "sacremoses", "tokenizers").MosesTokenizer(_moses_code(language))
    return lambda text: moses.tokenize(ENTITY.sub(lambda match: ENTITIES[match[0]], text), return_str=True)


def _punctuation(language: str) -> Step:
    """Moses' normalize-punctuation.perl."""
    moses = import_extra("data.normalize='punctuation'", "sacremoses", "tokenizers")
    return moses.MosesPunctNormalizer(_moses_code(language)).normalize


def _moses_code(name: str) -> str:
    """Returns the code by which sacremoses chooses its rules; it applies English rules to languages that it lacks.

    A name of no language gives "en", with a warning.
    """
    from tformer_jax.data.languages import read_language

    language = read_language(name)
    if language is None:
        logging.getLogger(__name__).warning("%r is not a language: Moses' rules for English are used", name)
        return "en"
    return language.code


def _simplified(language: str) -> Step:
    """OpenCC's conversion of traditional Chinese characters; texts in other scripts stay as they are."""
    return import_extra("data.normalize='simplified'", "opencc", "tokenizers").OpenCC("t2s").convert


STEPS: dict[str, Callable[[str], Step]] = {
    WHITESPACE: lambda language: characters.clean_whitespace,
    "nfkc": lambda language: functools.partial(unicodedata.normalize, "NFKC"),
    "lowercase": lambda language: str.lower,
    "punctuation": _punctuation,
    MOSES: _moses,
    "simplified": _simplified,
}
"""Functions that build a step for a language, by the step's name."""
LIBRARIES = {"punctuation": "sacremoses", MOSES: "sacremoses", "simplified": "opencc"}
