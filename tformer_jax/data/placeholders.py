"""Placeholders, such as `%s`, `{name}` and `<b>`: models read and write numbered symbols in their place.

Equal placeholders of a source have the same number, by their first appearance. Outputs get the placeholders back from
their source. A symbol of the vocabulary, such as `<hint>`, is no placeholder, even if a pattern matches it.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from tformer_jax.config.data import PLACEHOLDERS
from tformer_jax.data.corpora.example import Example
from tformer_jax.data.tokenizers import Placeholders

NUMBERED = tuple(chr(0xF0000 + number) for number in range(32))
"""Symbols that stand for placeholders: private-use characters."""
PATTERNS = {
    "urls": r"(?:https?|ftp)://[A-Za-z0-9](?:[!#-;=?-~]*[A-Za-z0-9_/=&#%~+-])?",
    "tags": r"</?[A-Za-z][\w:.-]*(?:\s(?:\"[^\"]*\"|'[^']*'|[^<>\"'])*|/)?>",
    "braces": r"\{\{[^{}]*\}\}|\{[\w.\[\]]*(?:![rsa])?(?::[^{}\s]*)?\}",
    "percent": (r"%%|(?<!\d)%(?:\([^()]+\)|\d+\$)?[-+#0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh?|ll?|[Lzjt])?[A-Za-z]"),
}
"""Regular expressions of `data.placeholders`; where several match, the first one counts."""
assert {*PATTERNS} == {*PLACEHOLDERS}


class Masked(NamedTuple):
    """A source in which symbols stand for placeholders."""

    text: str
    originals: tuple[str, ...] | None
    """The placeholders by number; None: they are not replaced, or the source is empty."""

    @property
    def allowed(self) -> int:
        """The number of symbols that outputs may have: all, if it is not known what they stand for."""
        return len(NUMBERED) if self.originals is None else len(self.originals)


UNMASKED = Masked("", None)


def mask(placeholders: Placeholders, text: str) -> Masked:
    """Replaces the placeholders of a source by symbols, up to `len(NUMBERED)` different placeholders.

    A symbol in `NUMBERED` that the text has is also a placeholder; it is left out if it gets no number.
    """
    if not placeholders or not text:
        return Masked(text, None)
    symbols: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        if match[0] not in symbols and len(symbols) < len(NUMBERED):
            symbols[match[0]] = NUMBERED[len(symbols)]
        return symbols.get(match[0], _unnumbered(match))

    masked = _pattern(placeholders).sub(number, text)
    return Masked(masked, tuple(symbols))


def mask_target(placeholders: Placeholders, target: str, originals: tuple[str, ...] | None) -> str:
    """Replaces the placeholders of a source by symbols, wherever they stand; a symbol of the target is left out."""
    if not placeholders:
        return target
    symbols = dict(zip(originals or (), NUMBERED, strict=False))
    masked = _pattern(placeholders).sub(lambda match: symbols.get(match[0], _unnumbered(match)), target)
    for original in sorted(symbols.keys() - {*NUMBERED}, key=lambda text: (-len(text), text)):
        masked = masked.replace(original, symbols[original])  # beside letters or digits
    return masked


def mask_pair(placeholders: Placeholders, source: str, target: str) -> tuple[str, str]:
    """Returns a source and its target with symbols for their placeholders."""
    text, originals = mask(placeholders, source)
    return text, mask_target(placeholders, target, originals)


def mask_example(placeholders: Placeholders, example: Example) -> Example:
    """Returns an example with symbols for the placeholders of a pair; others are as before."""
    if not placeholders or "source" not in example:
        return example
    source, target = mask_pair(placeholders, example["source"], example["target"])
    return {**example, "source": source, "target": target}


def restore(output: str, originals: tuple[str, ...] | None) -> str:
    """Returns an output with the placeholders of its source; symbols whose number the source lacks are left out."""
    if originals is None:
        return output
    texts = itertools.chain(originals, itertools.repeat(""))
    return output.translate(dict(zip(map(ord, NUMBERED), texts, strict=False)))


def symbols_of(text: str) -> list[str]:
    """Returns the symbols of placeholders in a masked text or an output, in the order of their numbers."""
    return sorted(character for character in text if NUMBERED[0] <= character <= NUMBERED[-1])


def has_same_placeholders(placeholders: Placeholders, source: str, output: str) -> bool:
    """Returns whether an output has each placeholder as often as its source."""
    text, originals = mask(placeholders, source)
    masked = mask_target(placeholders, output, originals)
    all_of_source, own, others = (_pattern(placeholders).findall(each) for each in (source, text, masked))
    return sorted(own) == sorted(others) and len(own) == len(all_of_source)


def count_unmatched(placeholders: Placeholders, source: str, target: str) -> int:
    """Returns the number of placeholders of a target that have no number, because its source lacks them."""
    originals = mask(placeholders, source).originals or ()
    return sum(text not in originals for text in _pattern(placeholders).findall(target))


def pattern_outside(names: Iterable[str], symbols: Iterable[str]) -> str:
    """Returns the regular expression of some `PATTERNS`, which matches nothing that begins within a symbol."""
    chosen = "|".join(PATTERNS[name] for name in PATTERNS if name in names) or "(?!)"
    match = re.compile(chosen).match
    inside = [(symbol, place) for symbol in symbols for place in range(len(symbol)) if match(symbol, place)]
    within = (f"(?<={re.escape(symbol[:place])}){re.escape(symbol[place:])}" for symbol, place in inside)
    return f"(?!{'|'.join(within)})(?:{chosen})" if inside else chosen


@functools.cache
def _pattern(placeholders: Placeholders) -> re.Pattern[str]:
    return re.compile(f"{pattern_outside(placeholders.names, placeholders.symbols)}|[{NUMBERED[0]}-{NUMBERED[-1]}]")


def _unnumbered(match: re.Match[str]) -> str:
    return "" if match[0] in NUMBERED else match[0]
