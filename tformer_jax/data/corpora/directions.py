"""The directions of a corpus of many languages: which examples of a split have them, and in which order."""

import array
import collections
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from tformer_jax.config import DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.data.corpora.corpus import Joined, Part
from tformer_jax.data.corpora.example import DataError, Example, cleaned
from tformer_jax.data.corpora.filters import DUPLICATES, digest_of
from tformer_jax.data.languages import read_language

OTHERS = "examples of other directions"
COLUMNS = {f"{side}{word}" for side in ("source", "target", "src", "tgt", "trg") for word in ("", "_language", "_lang")}
"""Names of the columns of languages in headers."""


class DirectionFilter:
    """Yields the examples of a split that `data.directions` names.

    With `data.both_directions`, each pair is also read the other way round. Without it, a pair whose row names its
    languages is also read the other way round, unless both of its directions are listed.

    Args:
        training: whether the examples are for training, which has no direction of `data.zero_shot`.
        dropped: counts the examples of other directions, and of reversed pairs the duplicates.
    """

    def __init__(self, cfg: DataConfig, *, training: bool, dropped: collections.Counter[str]):
        self._cfg = cfg
        zero_shot = tuple(map(Direction.parse, cfg.zero_shot))
        self._excluded = {*zero_shot} if training else set()
        self._wanted = {*cfg.wanted_directions, *(() if training else zero_shot)} if cfg.directions else None
        self._listed, self._by_name = {*cfg.wanted_directions}, bool(cfg.language_fields)
        self._always, self._once = cfg.both_directions, training and cfg.filters.duplicates
        self._dropped, self._split = dropped, "data.train" if training else "held-out data"
        self.others: set[Direction] = set()
        """Directions of the examples that were left out."""

    def __call__(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yields examples with a direction; an example without a direction is yielded as it is.

        Raises:
            DataError: a direction that is not read writes a language with another code than a direction that is read.
        """
        seen: set[bytes] = set()
        for example in examples:
            if "direction" not in example:
                yield example
                continue
            direction = Direction.parse(example["direction"])
            chosen = [each for each in self._candidates(direction) if each not in self._excluded]
            if not chosen:
                if direction not in self.others:
                    _check_codes(map(str, (*(self._wanted or ()), direction)), self._split)
                self.others.add(direction)
                self._dropped[OTHERS] += 1
            for each in chosen:
                directed = example if each == direction else reversed_example(example)
                if self._once and (digest := digest_of(cleaned(self._cfg, directed))) in seen:
                    self._dropped[DUPLICATES] += 1
                    continue
                if self._once:
                    seen.add(digest)
                yield directed

    def _candidates(self, direction: Direction) -> list[Direction]:
        turned = self._by_name and self._wanted and not {direction, direction.reverse} <= self._listed
        both = [direction, direction.reverse] if self._always or turned else [direction]
        return both if self._wanted is None else [each for each in both if each in self._wanted]


def reversed_example(example: Example) -> Example:
    """Returns a pair the other way round."""
    reverse = str(Direction.parse(example["direction"]).reverse)
    return {"source": example["target"], "target": example["source"], "direction": reverse}


def direction_of(source: str, target: str) -> str:
    """Returns the direction of an example between two codes of data.

    Raises:
        DataError: a code is empty, is none or is the name of a column, or they are equal.
    """
    if named := [name for name in (source, target) if name.casefold() in COLUMNS]:
        raise DataError(f"the language {named[0]!r} looks like the name of a column: set data.header=True")
    try:
        return str(Direction.parse(str(Direction.of_codes(*map(clean_whitespace, (source, target))))))
    except ValueError as error:
        shown = " and ".join(repr(name[:40]) for name in (source, target))
        problem = "must be two different codes, such as 'en' and 'pt_BR', in the columns of data.language_fields"
        raise DataError(f"the languages {shown} are no direction: {problem}") from error


def group_by_direction(
    cfg: DataConfig, examples: Sequence[Example], others: Iterable[Direction] = ()
) -> tuple[Joined, dict[str, int]]:
    """Returns the training examples by direction, and the number in each.

    Directions are in the order of `data.directions`, or if it is (), in alphabetic order.

    Args:
        others: directions of the examples that were left out.

    Raises:
        DataError: a direction has no example, or one language has two codes.
    """
    groups = {str(direction): array.array("q") for direction in cfg.wanted_directions}
    for index, example in enumerate(examples):
        groups.setdefault(example["direction"], array.array("q")).append(index)
    if missing := [name for name, group in groups.items() if not group]:
        actual = sorted({example["direction"] for example in examples} | {*map(str, others)})
        only = f", only {', '.join(actual)}" if actual else ""
        turn = "" if cfg.both_directions else ", or set data.both_directions=True to read pairs the other way round"
        raise DataError(
            f"data.train has no example of direction {missing[0]}{only}: correct it in data.directions, or leave it "
            f"out{turn}"
        )
    if not groups:
        raise DataError("split train has no valid example")
    _check_codes(groups, "data.train")
    order = list(groups) if cfg.directions else sorted(groups)
    return Joined([Part(examples, groups[name]) for name in order]), {name: len(groups[name]) for name in order}


def check_held_out(cfg: DataConfig, train: Collection[str], split: str, examples: Iterable[Example]) -> None:
    """Checks the languages of a held-out split.

    Args:
        train: the directions of the training examples.

    Raises:
        DataError: the split has another code of a language of `train`, or a language of no training example, unless
            a tokenizer that is loaded may know it.
    """
    counts = collections.Counter(example["direction"] for example in examples)
    _check_codes((*train, *counts), split)
    known = {*itertools.chain.from_iterable(map(Direction.parse, train))}
    for name, count in () if "file" in cfg.tokenizer_kinds else counts.items():
        if unknown := [code for code in Direction.parse(name) if code not in known]:
            raise DataError(
                f"{split} has {count:,} example{'s' * (count > 1)} of direction {name}, but no training example has "
                f"the language {unknown[0]!r}: add some, or list the directions to read in data.directions"
            )


@functools.lru_cache(maxsize=4096)
def _language_of(code: str) -> str:
    language = read_language(code)
    return language.written if language else code.casefold()


def _check_codes(directions: Iterable[str], where: str) -> None:
    codes: dict[str, str] = {}
    for code in dict.fromkeys(itertools.chain.from_iterable(map(Direction.parse, directions))):
        other = codes.setdefault(_language_of(code), code)
        if other != code:
            raise DataError(
                f"{where} has the language {code!r}, which is {other!r} in another place: write one code everywhere"
            )


def fill(name: str, direction: Direction, side: str | None = None) -> str:
    """Returns an entry with the languages of a direction in place of `{src}`, `{tgt}` and, given a side, `{lang}`."""
    filled = name.replace("{src}", direction.source).replace("{tgt}", direction.target)
    return filled if side is None else filled.replace("{lang}", side)
