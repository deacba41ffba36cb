"""Filters of examples, which count what they drop."""

import collections
import hashlib
from collections.abc import Callable, Iterable, Iterator

from tformer_jax.config import DataConfig
from tformer_jax.data.characters import is_blank
from tformer_jax.data.corpora.example import NO_TEXT, Example, cleaned, is_blank_side, length_ratio

BLANK_LINE = "blank lines"
HEADER = "header lines"
DUPLICATES = "duplicates"


class Filters:
    """Drops examples as `data.filters` says; texts are compared as models read them.

    Args:
        training: whether the examples are for training; held-out examples are only dropped for blank texts.
        once: whether to drop duplicates, which `DirectionFilter` does for pairs with directions.
    """

    def __init__(self, data: DataConfig, *, training: bool, once: bool = True):
        self.data, self.training = data, training
        cfg = data.filters
        self.dropped: collections.Counter[str] = collections.Counter()
        """Number of examples by the reason for which the last pass dropped them."""
        rules: dict[str, Callable[[Example], bool]] = {}
        if cfg.blank_sides:
            rules["blank texts"] = _has_blank_text
            rules["blank labels"] = lambda example: "label" in example and is_blank(example["label"])
        if training and cfg.identical_sides:
            rules["identical sides"] = lambda example: "source" in example and example["source"] == example["target"]
        if training and cfg.max_length_ratio is not None:
            largest = cfg.max_length_ratio
            rules["length ratio"] = lambda example: "source" in example and length_ratio(example) > largest
        self._rules, self._once = rules, training and once and cfg.duplicates
        self.only_blank = not (self._once or rules.keys() - {"blank texts", "blank labels"})
        """Whether only examples with a blank text or label are dropped, if any."""

    def __call__(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yields the examples that no filter drops; a new pass counts from zero."""
        self.dropped.clear()
        yield from self.select(examples)

    def select(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yields the examples that no filter drops, of a part of a pass; duplicates are those within the part."""
        for example, reason in self._with_reasons(examples):
            if reason is None:
                yield example
            else:
                self.dropped[reason] += 1

    def indices(self, examples: Iterable[Example]) -> dict[str, list[int]]:
        """Returns the indices of the examples to drop, by reason; does not count them."""
        indices: dict[str, list[int]] = {}
        if self._rules or self._once:
            for index, (_, reason) in enumerate(self._with_reasons(examples)):
                if reason is not None:
                    indices.setdefault(reason, []).append(index)
        return indices

    def explanation(self) -> str:
        """Returns what the last pass dropped, for the message about a split without examples."""
        return "".join(f"; dropped: {count:,} {reason}" for reason, count in self.dropped.items())

    def _with_reasons(self, examples: Iterable[Example]) -> Iterator[tuple[Example, str | None]]:
        seen: set[bytes] = set()
        for example in examples:
            read = example if self.only_blank else cleaned(self.data, example)
            reason = None
            for name, drops in self._rules.items():
                if drops(read):
                    reason = name
                    break
            if reason is None and self._once:
                digest = digest_of(read)
                reason = DUPLICATES if digest in seen else None
                seen.add(digest)
            yield example, reason


def digest_of(example: Example) -> bytes:
    """Returns a hash of the texts of an example, for finding equal ones in little memory."""
    texts = "\0".join(f"{key}\0{text}" for key, text in sorted(example.items()) if key != "links")
    return hashlib.blake2b(texts.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _has_blank_text(example: Example) -> bool:
    for key, text in example.items():  # noqa: SIM110 (`any` takes twice the time)
        if key not in NO_TEXT and is_blank_side(key, text):
            return True
    return False
