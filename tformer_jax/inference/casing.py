"""Words of outputs in the case of the words of their source that they are aligned with."""

import re
from collections.abc import Iterator, Sequence

from tformer_jax.data.markup import unit_spans
from tformer_jax.data.placeholders import PATTERNS
from tformer_jax.data.word_links import Links

SENTENCE_ENDS = frozenset(".!?…。！？")
FIXED = re.compile("|".join(PATTERNS.values()))
"""Units whose case is neither copied nor changed: tags, placeholders and URLs."""
DOTTED = {language: {"i": "İ", "ı": "I"} for language in ("az", "crh", "gag", "tr")}
"""Capitals of i and ı, by the codes of languages that distinguish dotted and dotless i."""


def copy_casing(source: str, output: str, links: Links, titles: bool, language: str = "") -> tuple[str, int]:
    """Returns an output with the case of the words of its source, and the number of words that changed.

    A word is written in capitals if all source words that it is aligned with are in capitals. A lower-case word gets an
    initial capital if all of these begin with a capital. No letter is lowered. Initial capitals of sentences do not
    count, because spelling requires them; but the output's first word gets an initial capital if the source has one.
    Letters without a single-letter capital, such as ß, stay.

    Args:
        links: pairs of a unit of the source and a unit of the output (`unit_spans`).
        titles: whether first capitals count, or only words in capitals.
        language: code of the output's language, of ISO 639-1 if it has one.
    """
    casings = _casings(source)
    text, end, changed, first = "", 0, 0, True
    for number, (start, stop, fixed) in enumerate(_units(output)):
        word = output[start:stop]
        wanted = {casings[unit] for unit, target in links if target == number} - {None}
        if fixed:
            new = word
        elif wanted == {"capitals"}:
            new = "".join(_capital(letter, language) for letter in word)
        elif titles and word.islower() and (_begins(wanted) or (first and _starts_with_capital(source))):
            new = _capital(word[0], language) + word[1:]
        else:
            new = word
        text, end, changed = text + output[end:start] + new, stop, changed + (new != word)
        first = first and (fixed or not any(map(str.isalnum, word)))
    return text + output[end:], changed


def _units(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yields start and end of each unit of a text, and whether its case is fixed."""
    places = {place for match in FIXED.finditer(text) for place in range(*match.span())}
    return ((start, stop, start in places) for start, stop in unit_spans(text))


def _begins(wanted: set[str | None]) -> bool:
    return bool(wanted) and wanted <= {"capitals", "title"}


def _starts_with_capital(source: str) -> bool:
    words = (source[start:stop] for start, stop, fixed in _units(source) if not fixed)
    return next((word[0].isupper() for word in words if any(map(str.isalnum, word))), False)


def _casings(text: str) -> Sequence[str | None]:
    """Returns the case of each unit of a text, "capitals", "title" or ""; None: it has no letters with case.

    Single capitals, and the first capital of a sentence, are "".
    """
    cases: list[str | None] = []
    first = True
    for start, stop, fixed in _units(text):
        word = text[start:stop]
        if fixed:
            cases.append(None)
        elif word.isupper() and sum(map(str.isupper, word)) > 1:
            cases.append("capitals")
        elif not first and word[0].isupper() and word[1:].islower():
            cases.append("title")
        else:
            cases.append("" if word.upper() != word.lower() else None)
        first = word in SENTENCE_ENDS or (first and (fixed or not any(map(str.isalnum, word))))
    return cases


def _capital(letter: str, language: str) -> str:
    """Returns the capital of a letter; the letter itself if its capital is several letters or is another letter's."""
    if letter in DOTTED.get(language, ""):
        return DOTTED[language][letter]
    capital = letter.upper()
    return capital if len(capital) == 1 and capital.casefold() == letter.casefold() else letter
