"""Takes markup out of a text, and puts it back into the text's translation by an alignment.

Markup is what `data.placeholders` names besides URLs: tags such as `<b>`, and placeholders such as `{0}` and `%s`.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tformer_jax.data.characters import SIGNS
from tformer_jax.data.placeholders import PATTERNS, pattern_outside
from tformer_jax.data.tokenizers import NO_PLACEHOLDERS, Placeholders

HAN = r"\u3041-\u30ff\u3400-\u9fff"
PUNCTUATION = r"!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u205e\u3000-\u303f\uff01-\uff0f"
UNIT = re.compile(rf"\d+(?:[.,]\d+)+|[{HAN}]|[{PUNCTUATION}]|[^\s{HAN}{PUNCTUATION}]+")
"""What is aligned: words, numbers, punctuation marks, and single characters of Chinese and Japanese."""
TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)")
URL, ENCODED = re.compile(PATTERNS["urls"]), re.compile(r"%[0-9A-Fa-f]{2}")
LETTER = re.compile(rf"[^\W_]|[{SIGNS}]")
CLOSING_PUNCTUATION = ".,;:!?)]}»”"


@dataclasses.dataclass
class Mark:
    """A pair of tags, or a single tag or placeholder."""

    opening: str
    start: int
    """Number of characters of the plain text before it."""
    stop: int
    """As `start`, before the closing tag."""
    before: str
    """The character of the source before it; "" at the start."""
    after: str = ""
    closing: str = ""
    children: list["Mark"] = dataclasses.field(default_factory=list)
    """The marks between its tags."""


class Segment(NamedTuple):
    """A text without its markup."""

    plain: str
    marks: Sequence[Mark]


@functools.cache
def pattern_of(known: Placeholders) -> re.Pattern[str]:
    """Returns the pattern of markup, except the placeholders and symbols `known` to a model."""
    return re.compile(pattern_outside({"tags", "braces", "percent"}.difference(known.names), known.symbols))


def find_marks(text: str, known: Placeholders = NO_PLACEHOLDERS) -> Iterator[re.Match[str]]:
    """Yields the matches of `pattern_of`, except for encoded characters of URLs such as `%20F`."""
    urls = [match.span() for match in URL.finditer(text)] if "%" in text else []
    for match in pattern_of(known).finditer(text):
        place = match.start()
        if not (ENCODED.match(text, place) and any(start < place < stop for start, stop in urls)):
            yield match


def take_out(text: str, known: Placeholders = NO_PLACEHOLDERS) -> Segment:
    """Removes the markup of a text.

    A tag without its counterpart is single. Where markup stood between spaces, one space is left, and where several
    marks, or a single one, stood between two words, a space is put.

    Args:
        known: placeholders and symbols that stay, since the model reads them.
    """
    plain, space, end, run = "", "", 0, 0
    marks: list[Mark] = []
    opened: list[Mark] = []
    stack = [marks]

    def add_text(part: str) -> None:
        nonlocal plain, space, run
        word = part.lstrip() if run else part
        if run and word != part:
            space = space or " "
        if word:
            joins = run > 1 and LETTER.match(plain[-1:]) is not None and LETTER.match(word) is not None
            before = space if plain and word[0] not in CLOSING_PUNCTUATION else ""
            text = plain + (before or " " * joins) + word
            plain = text.rstrip()
            space, run = text[len(plain) :], 0

    for match in find_marks(text, known):
        between = text[end : match.start()]
        add_text(between)
        end = match.end()
        tag = TAG.match(match[0])
        names = [TAG.match(mark.opening)[2] for mark in opened]  # type: ignore[index]
        run += 1 if tag and not match[0].endswith("/>") else 2
        if tag and tag[1] and tag[2] in names:
            while names[-1] != tag[2]:  # tags without a counterpart are single, and what is in them is beside them
                names.pop()
                opened.pop()
                inside = stack.pop()
                stack[-1] += inside
                inside.clear()
            mark = opened.pop()
            stack.pop()
            mark.stop, mark.after = len(plain), text[end : end + 1]
            if mark.children or between or mark.stop > mark.start:
                mark.closing = match[0]
            else:  # around nothing: a single mark
                mark.opening += match[0]
            continue
        mark = Mark(match[0], len(plain), len(plain), text[: match.start()][-1:], text[end : end + 1])
        stack[-1].append(mark)
        if tag and not tag[1] and not match[0].endswith("/>"):
            opened.append(mark)
            stack.append(mark.children)
    while opened:
        opened.pop()
        inside = stack.pop()
        stack[-1] += inside
        inside.clear()
    add_text(text[end:])
    return Segment(plain if run else plain + space, marks)


def leave_out(text: str, known: Placeholders = NO_PLACEHOLDERS) -> tuple[str, int]:
    """Returns a text without markup, and the number of marks that it had; `known` is as for `take_out`."""
    total = 0
    while marks := [match.span() for match in find_marks(text, known)]:  # what stood around a mark may be another one
        for start, stop in reversed(marks):
            text = text[:start] + text[stop:]
        total += len(marks)
    return text, total


def unit_spans(text: str) -> list[tuple[int, int]]:
    """Returns start and end of each unit that is aligned."""
    return [match.span() for match in UNIT.finditer(text)]


def put_back(segment: Segment, output: str, links: Sequence[tuple[int, int]]) -> str:
    """Returns the translation of a segment with its markup, each mark once and pairs of tags well nested.

    A pair of tags encloses all units that are aligned with the source units between its tags, and the units in between.
    If more than half of these are not so aligned, or the range of another pair overlaps, it encloses only the longest
    run of aligned units. A single mark goes next to the unit that is aligned with its neighbor.

    Args:
        links: pairs of a unit of the plain text and a unit of the output.
    """
    spans, units = unit_spans(segment.plain), unit_spans(output)
    aligned: dict[int, set[int]] = {}
    for source, target in links:
        aligned.setdefault(source, set()).add(target)
    return _written([*_arranged(segment.marks, _Places(spans, aligned), 0, len(units))], output, units)


class _Places(NamedTuple):
    """Where units of a source are in an output."""

    spans: Sequence[tuple[int, int]]
    aligned: Mapping[int, set[int]]

    def inside(self, mark: Mark, low: int, high: int) -> set[int]:
        """Returns the units of the output in [low, high) that are aligned with source units between two tags."""
        units = (n for n, (start, stop) in enumerate(self.spans) if start < mark.stop and mark.start < stop)
        return {t for n in units for t in self.aligned.get(n, ()) if low <= t < high}

    def beside(self, mark: Mark, low: int, high: int) -> int:
        """Returns the number of units of the output before a mark that is around none, from low to high."""
        first = sum(start < mark.start for start, _ in self.spans)
        ahead, behind = range(first, len(self.spans)), range(first - 1, -1, -1)
        attached = mark.before and not mark.before.isspace()
        sides = ((behind, True), (ahead, False)) if attached else ((ahead, False), (behind, True))
        for step in itertools.zip_longest(*(zip(side, itertools.repeat(after)) for side, after in sides)):
            for unit, after in filter(None, step):
                if targets := [t for t in self.aligned.get(unit, ()) if low <= t < high]:
                    return max(targets) + 1 if after else min(targets)
        return high


Item = int | tuple[str, Mark]
"""A unit of the output, or "open", "close" or "single" with its mark."""


def _arranged(marks: Sequence[Mark], places: _Places, low: int, high: int) -> Iterator[Item]:
    """Yields the units of the output from low to high with marks before, between and after them."""
    ranges = _ranges(marks, places, low, high)
    done = low
    for (start, stop), number in sorted((span, number) for number, span in enumerate(ranges)):
        yield from range(done, start)
        mark, done = marks[number], stop
        if not mark.closing:
            yield "single", mark
            continue
        yield "open", mark
        yield from _arranged(mark.children, places, start, stop)
        yield "close", mark
    yield from range(done, high)


def _ranges(marks: Sequence[Mark], places: _Places, low: int, high: int) -> list[tuple[int, int]]:
    """Returns the range of units of the output for each mark; ranges do not overlap."""
    units = [places.inside(mark, low, high) if mark.closing else set() for mark in marks]
    hulls = [(min(own), max(own) + 1) if own else None for own in units]
    taken: set[int] = set()
    spans: list[tuple[int, int] | None] = []
    for number, own in enumerate(units):
        hull, others = hulls[number], [hull for n, hull in enumerate(hulls) if hull and n != number]
        if hull and (2 * len(own) < hull[1] - hull[0] or any(a < hull[1] and hull[0] < b for a, b in others)):
            hull = _longest_run(own - taken)
        taken |= {*range(*hull)} if hull else set()
        spans.append(hull)
    pairs = [span for span in spans if span]
    points = [places.beside(mark, low, high) for mark in marks]
    points = [next((b for a, b in pairs if a < point < b), point) for point in points]
    return [span or (point, point) for span, point in zip(spans, points, strict=True)]


def _longest_run(units: set[int]) -> tuple[int, int] | None:
    runs = [(unit, next(n for n in itertools.count(unit) if n not in units)) for unit in sorted(units)]
    return max(runs, key=lambda run: run[1] - run[0], default=None)


def _written(items: Sequence[Item], output: str, units: Sequence[tuple[int, int]]) -> str:
    """Writes units and marks; a mark between spaces in the source is between spaces, and spaces of the output stay."""
    text, gap = "", output[: units[0][0]] if units else output
    for place, item in enumerate(items):
        if isinstance(item, int):
            start, stop = units[item]
            text += gap + output[start:stop]
            gap = output[stop : units[item + 1][0]] if item + 1 < len(units) else ""
            continue
        kind, mark = item
        if kind == "close":
            text += mark.closing
            continue
        apart = kind == "single" and _is_apart(mark, mark.before, text[-1:])
        if kind == "open" or apart:
            text, gap = text + (gap or " " * (apart and text != "" and not text[-1].isspace())), ""
        text += mark.opening
        following = items[place + 1] if place + 1 < len(items) else None
        if kind == "single" and isinstance(following, int) and _is_apart(mark, mark.after, output[units[following][0]]):
            gap = gap or " "
    return text + (output[units[-1][1] :] if units else "")


def _is_apart(mark: Mark, in_source: str, in_output: str) -> bool:
    """Returns whether there is a space between a mark and its neighbor in the output, given the one in the source.

    It would otherwise join a placeholder to a letter.
    """
    if not in_source or in_source.isspace():
        return True
    return not mark.opening.startswith("<") and bool(LETTER.match(in_output)) and not LETTER.match(in_source)


def keeps_markup(source: str, output: str, known: Placeholders = NO_PLACEHOLDERS) -> bool:
    """Returns whether an output has each mark of its source as often, and no other."""
    marks = [sorted(match[0] for match in find_marks(text, known)) for text in (source, output)]
    return marks[0] == marks[1]
