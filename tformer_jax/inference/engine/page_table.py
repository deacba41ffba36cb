"""Which pages of a paged cache belong to whom: counts of references, prefixes that are shared, copies on write."""

import collections
import dataclasses
from collections.abc import Sequence

NOBODY = 0
"""A page that is never handed out: what is padding may be written there."""


@dataclasses.dataclass
class Holding:
    """The pages of one row, in order."""

    pages: list[int] = dataclasses.field(default_factory=list)
    filled: int = 0
    """Slots written so far."""


class OutOfPages(Exception):
    """There are fewer free pages than asked for; nothing has changed."""


class PageTable:
    """Hands out the pages of a pool.

    Full pages of a prompt may be shared: `match` finds those that hold the same tokens after the same beginning, also
    when nobody uses them any more, until they are handed out again (the longest unused ones first).
    """

    def __init__(self, pages: int, size: int):
        self.pages, self.size = pages, size
        self._references = [0] * pages
        self._free = collections.OrderedDict.fromkeys(range(1, pages))
        """Pages without a reference, the longest unused first."""
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        """(page before, tokens) -> the page that holds them."""
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        """The inverse of `_known`."""
        self._followers: dict[int, set[int]] = collections.defaultdict(set)
        """Known pages by the page before."""

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - 1 - len(self._free)

    @property
    def free(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def needed(self, slots: int) -> int:
        """The pages that so many slots take."""
        return -(-slots // self.size)

    def full(self, slots: int) -> int:
        """The pages that the first `slots` slots fill completely."""
        return slots // self.size

    def held(self, tokens: Sequence[int]) -> int:
        """The pages that `match` would share with rows that run, so that no free page is taken for them."""
        return sum(self._references[page] > 0 for page in self._matching(tokens))

    def match(self, tokens: Sequence[int]) -> Holding:
        """Takes the known full pages with which `tokens` begins; at least one token is left to be read."""
        pages = self._matching(tokens)
        for page in pages:
            self._take(page)
        return Holding(pages, len(pages) * self.size)

    def _matching(self, tokens: Sequence[int]) -> list[int]:
        """The known full pages with which `tokens` begins, without its last token."""
        pages: list[int] = []
        for start in range(0, self.full(len(tokens) - 1) * self.size, self.size):
            before = pages[-1] if pages else NOBODY
            page = self._known.get((before, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            pages.append(page)
        return pages

    def grow(self, holding: Holding, slots: int) -> None:
        """Makes room for `slots` slots in all.

        Raises:
            OutOfPages: there are not enough free pages.
        """
        missing = self.needed(slots) - len(holding.pages)
        if missing > self.free:
            raise OutOfPages(f"{missing} pages are needed, {self.free} are free")
        for _ in range(missing):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._references[page] = 1
            holding.pages.append(page)

    def fork(self, holding: Holding) -> tuple[Holding, list[tuple[int, int]]]:
        """A row that goes on from the slots of another: full pages are shared, one that is not full is copied.

        Returns:
            Its holding, and the copies (from, to) to make before either is written.

        Raises:
            OutOfPages: there is no page to copy to.
        """
        full = holding.filled // self.size
        rest = holding.pages[full : self.needed(holding.filled)]
        if len(rest) > self.free:
            raise OutOfPages("1 page is needed, 0 are free")
        child = Holding(list(holding.pages[:full]), holding.filled)
        for page in child.pages:
            self._take(page)
        self.grow(child, holding.filled)
        return child, list(zip(rest, child.pages[full:], strict=True))

    def remember(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Lets others share the pages that `tokens`, the first of this row, fill; they have been written."""
        before = NOBODY
        for number in range(len(tokens) // self.size):
            key = before, tuple(tokens[number * self.size : (number + 1) * self.size])
            page = holding.pages[number]
            if key not in self._known and page not in self._keys:
                self._known[key], self._keys[page] = page, key
                self._followers[before].add(page)
            before = self._known.get(key, NOBODY)
            if before != page:
                break

    def release(self, holding: Holding) -> None:
        """Gives all pages of a row back."""
        for page in reversed(holding.pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._free[page] = None
        holding.pages, holding.filled = [], 0

    def _take(self, page: int) -> None:
        self._references[page] += 1
        self._free.pop(page, None)

    def _forget(self, page: int) -> None:
        """The page is written anew: neither it nor what follows it can be shared any more."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._known[key]
            self._followers[key[0]].discard(page)
        for follower in list(self._followers.pop(page, ())):
            self._forget(follower)
