"""Page table of a paged cache: reference counts, shared prefixes and copy-on-write."""

import collections
import dataclasses
from collections.abc import Sequence

RESERVED_PAGE = 0
"""Page that is never allocated; padding may be written to it."""


@dataclasses.dataclass
class Allocation:
    """Pages allocated to one row, in order."""

    pages: list[int] = dataclasses.field(default_factory=list)
    filled: int = 0
    """Number of slots up to the last one in use."""


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
        self._shared: dict[tuple[int, tuple[int, ...]], int] = {}
        """Full prompt pages: (previous page, tokens) -> page that holds the tokens."""
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        """The inverse of `_shared`."""
        self._followers: dict[int, set[int]] = collections.defaultdict(set)
        """Shared pages by their previous page."""

    @property
    def used_pages(self) -> int:
        """Number of pages in use."""
        return self.pages - 1 - len(self._free)

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def pages_for(self, slots: int) -> int:
        """Returns the number of pages for `slots` slots."""
        return -(-slots // self.size)

    def full_pages(self, slots: int) -> int:
        """Returns the number of pages that `slots` slots fill completely."""
        return slots // self.size

    def shared_pages_in_use(self, tokens: Sequence[int]) -> int:
        """Returns the number of pages that `match` would share with other rows, so that no free page is taken."""
        return sum(self._references[page] > 0 for page in self._matching(tokens))

    def match(self, tokens: Sequence[int]) -> Allocation:
        """Allocates the shared pages of the longest prefix of `tokens`, which excludes at least the last token."""
        pages = self._matching(tokens)
        for page in pages:
            self._take(page)
        return Allocation(pages, len(pages) * self.size)

    def _matching(self, tokens: Sequence[int]) -> list[int]:
        """Returns the shared pages of the longest prefix of `tokens` without its last token."""
        pages: list[int] = []
        for start in range(0, self.full_pages(len(tokens) - 1) * self.size, self.size):
            before = pages[-1] if pages else RESERVED_PAGE
            page = self._shared.get((before, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            pages.append(page)
        return pages

    def grow(self, allocation: Allocation, slots: int) -> None:
        """Allocates pages up to a total of `slots` slots.

        Raises:
            OutOfPages: there are not enough free pages.
        """
        missing = self.pages_for(slots) - len(allocation.pages)
        if missing > self.free_pages:
            raise OutOfPages(f"{missing} pages are needed, {self.free_pages} are free")
        for _ in range(missing):
            page, _ = self._free.popitem(last=False)
            self._unshare(page)
            self._references[page] = 1
            allocation.pages.append(page)

    def enlarge(self, pages: int) -> None:
        """Adds `pages` free pages."""
        self._references += [0] * pages
        self._free.update(dict.fromkeys(range(self.pages, self.pages + pages)))
        self.pages += pages

    def fork(self, allocation: Allocation) -> tuple[Allocation, list[tuple[int, int]]]:
        """Allocates the pages of a row that continues another: shares full pages, and copies a partly filled one.

        Returns:
            Its allocation, and the copies (from, to) to make before either is written.

        Raises:
            OutOfPages: no page is free for the copy.
        """
        full = allocation.filled // self.size
        partly_filled = allocation.pages[full : self.pages_for(allocation.filled)]
        if len(partly_filled) > self.free_pages:
            raise OutOfPages("1 page is needed, 0 are free")
        child = Allocation(list(allocation.pages[:full]), allocation.filled)
        for page in child.pages:
            self._take(page)
        self.grow(child, allocation.filled)
        return child, list(zip(partly_filled, child.pages[full:], strict=True))

    def share_prefix(self, allocation: Allocation, tokens: Sequence[int]) -> None:
        """Makes the full pages of `tokens`, the first tokens of this row, available to other rows once written."""
        before = RESERVED_PAGE
        for number in range(len(tokens) // self.size):
            key = before, tuple(tokens[number * self.size : (number + 1) * self.size])
            page = allocation.pages[number]
            if key not in self._shared and page not in self._keys:
                self._shared[key], self._keys[page] = page, key
                self._followers[before].add(page)
            before = self._shared.get(key, RESERVED_PAGE)
            if before != page:
                break

    def release(self, allocation: Allocation) -> None:
        """Releases all pages of a row."""
        for page in reversed(allocation.pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._free[page] = None
        allocation.pages, allocation.filled = [], 0

    def _take(self, page: int) -> None:
        self._references[page] += 1
        self._free.pop(page, None)

    def _unshare(self, page: int) -> None:
        """Stops sharing a page, which will be overwritten, and all shared pages that follow it."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._shared[key]
            self._followers[key[0]].discard(page)
        for follower in list(self._followers.pop(page, ())):
            self._unshare(follower)
