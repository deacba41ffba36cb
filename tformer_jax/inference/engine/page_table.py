"""Page table of a paged cache: reference counts, shared prefixes and copy-on-write."""

import collections
import dataclasses
from collections.abc import Sequence

NOBODY = 0
"""Reserved page that is never allocated; padding may be written to it."""


@dataclasses.dataclass
class Holding:
    """The pages of one row, in order."""

    pages: list[int] = dataclasses.field(default_factory=list)
    filled: int = 0
    """Number of slots written so far."""


class OutOfPages(Exception):
    """There are not enough free pages; the page table is unchanged."""


class PageTable:
    """Allocates the pages of a pool.

    Full pages of a prompt may be shared: `match` finds pages with the same tokens after the same prefix, including
    unused pages until they are reallocated (least recently used pages first).
    """

    def __init__(self, pages: int, size: int):
        self.pages, self.size = pages, size
        self._references = [0] * pages
        self._free = collections.OrderedDict.fromkeys(range(1, pages))
        """Pages without references, least recently used first."""
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        """(previous page, tokens) -> page that holds the tokens."""
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        """The inverse of `_known`."""
        self._followers: dict[int, set[int]] = collections.defaultdict(set)
        """Known pages by their previous page."""

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return self.pages - 1 - len(self._free)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def needed(self, slots: int) -> int:
        """Returns the number of pages for `slots` slots."""
        return -(-slots // self.size)

    def full(self, slots: int) -> int:
        """Returns the number of pages that `slots` slots fill completely."""
        return slots // self.size

    def held(self, tokens: Sequence[int]) -> int:
        """Returns the number of pages in use by other rows that `match` would share, so that no free page is taken."""
        return sum(self._references[page] > 0 for page in self._matching(tokens))

    def match(self, tokens: Sequence[int]) -> Holding:
        """Takes the known full pages of the longest prefix of `tokens`; at least one token is left to be read."""
        pages = self._matching(tokens)
        for page in pages:
            self._take(page)
        return Holding(pages, len(pages) * self.size)

    def _matching(self, tokens: Sequence[int]) -> list[int]:
        """Returns the known full pages of the longest prefix of `tokens` without its last token."""
        pages: list[int] = []
        for start in range(0, self.full(len(tokens) - 1) * self.size, self.size):
            before = pages[-1] if pages else NOBODY
            page = self._known.get((before, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            pages.append(page)
        return pages

    def grow(self, holding: Holding, slots: int) -> None:
        """Allocates pages up to a total of `slots` slots.

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
        """Creates a row that continues from another: full pages are shared, a partly filled page is copied.

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
        """Makes the full pages of `tokens`, the first tokens of this row, available for sharing, once written."""
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
        """Releases all pages of a row."""
        for page in reversed(holding.pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._free[page] = None
        holding.pages, holding.filled = [], 0

    def _take(self, page: int) -> None:
        self._references[page] += 1
        self._free.pop(page, None)

    def _forget(self, page: int) -> None:
        """Stops sharing a page that is overwritten, and all known pages that follow it."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._known[key]
            self._followers[key[0]].discard(page)
        for follower in list(self._followers.pop(page, ())):
            self._forget(follower)
