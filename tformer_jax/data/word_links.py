"""Links between the words of a source and the words of its target."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tformer_jax.base.errors import UserError
from tformer_jax.data.corpora.example import DataError, Example
from tformer_jax.data.corpora.lines import BadLines, numbered_lines
from tformer_jax.data.placeholders import mask, mask_target
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.tokens import token_ranges
from tformer_jax.special_tokens import IGNORED

Links = tuple[tuple[int, int], ...]
"""Pairs (source word, target word), from 0, in order."""
WORD = re.compile(r"\S+")
LINK = re.compile(r"(\d+)([-p?])(\d+)")


class Reference(NamedTuple):
    """The links of a pair by a person, or by another program."""

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]
    """Includes the sure links."""


def word_spans(text: str) -> list[tuple[int, int]]:
    """Returns start and end of each word, which spaces separate, as aligners of corpora expect."""
    return [match.span() for match in WORD.finditer(text)]


def format_links(links: Links) -> str:
    """Returns links in Pharaoh's format, such as "0-0 1-2"."""
    return " ".join(f"{source}-{target}" for source, target in links)


def read_links(line: str) -> Reference:
    """Reads a line of Pharaoh's format, as fast_align, eflomal and awesome-align write it; 0p1 and 0?1 are possible.

    Raises:
        UserError: a part of the line is no link.
    """
    sure: set[tuple[int, int]] = set()
    possible: set[tuple[int, int]] = set()
    for part in line.split():
        if (match := LINK.fullmatch(part)) is None:
            raise UserError(f"{part!r} is no link: write the number of a word of each side, from 0, such as 0-1")
        (sure if match[2] == "-" else possible).add((int(match[1]), int(match[3])))
    return Reference(frozenset(sure), frozenset(sure | possible))


def read_references(path: Path) -> list[Reference]:
    """Reads a file of links; raises `DataError` for the first line that has something else."""
    references = []
    for number, line in numbered_lines(path, BadLines()):
        try:
            references.append(read_links(line or ""))
        except UserError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return references


def error_rate(predicted: Iterable[Iterable[tuple[int, int]]], references: Iterable[Reference]) -> float:
    """Returns the alignment error rate, `1 - (|A & S| + |A & P|) / (|A| + |S|)` (Och and Ney, 2003), of all pairs.

    A are the links of `predicted`, S the sure links and P the possible ones; 0 without any link.
    """
    agreed = total = 0
    for links, (sure, possible) in zip(map(frozenset, predicted), references, strict=True):
        agreed += len(links & sure) + len(links & possible)
        total += len(links) + len(sure)
    return 1 - agreed / total if total else 0.0


def word_ranges(tokenizers: Tokenizers, source: str, target: str) -> tuple[list[range], list[range]]:
    """Returns the places of the tokens of each word of a source, and of each word of its target."""
    placeholders = tokenizers.placeholders
    originals = mask(placeholders, source).originals
    return (
        token_ranges(tokenizers.source, source, word_spans(source), lambda text: mask(placeholders, text).text),
        token_ranges(
            tokenizers.target, target, word_spans(target), lambda text: mask_target(placeholders, text, originals)
        ),
    )


def check_words(links: Iterable[tuple[int, int]], source: str, target: str) -> None:
    """Raises `DataError` if a link names a word that the source or the target lacks."""
    words = len(word_spans(source)), len(word_spans(target))
    for link in sorted(links):
        if link[0] >= words[0] or link[1] >= words[1]:
            raise DataError(f"link {link[0]}-{link[1]}: {source!r} and its target have {words[0]} and {words[1]} words")


def linked_places(tokenizers: Tokenizers, pair: Example, count: int) -> list[int]:
    """Returns for each of the `count` tokens of a target the place of a token of the source; IGNORED without a link.

    Each token of a target word is linked to one token of its source words, in order, starting over when they run out.
    The pair must have all words that its links name (`check_words`).
    """
    sources, targets = word_ranges(tokenizers, pair["source"], pair["target"])
    tokens: dict[int, list[int]] = {}
    for source, target in sorted(read_links(pair["links"]).sure):
        tokens.setdefault(target, []).extend(sources[source])
    places = [IGNORED] * count
    for target, linked in tokens.items():
        for place, token in zip(targets[target], itertools.cycle(linked), strict=False):
            places[place] = token
    return places
