"""Symbols: texts that are one token each wherever they stand."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

PROTECTED = "\ufffe"
"""A noncharacter of Unicode, which stands for a symbol in a text while the text is normalized."""


@functools.cache
def symbol_pattern(symbols: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern with one group that matches the longest symbol at a place of a text."""
    longest_first = sorted(symbols, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


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
