"""Rows read their own tokens after any allocations, forks and releases, and no page is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_jax.inference.engine.page_table import RESERVED_PAGE, Allocation, OutOfPages, PageTable

SIZE, PAGES = 2, 9


class Memory:
    """The contents of the pages, and what each row should read."""

    def __init__(self):
        self.table = PageTable(PAGES, SIZE)
        self.slots = [[None] * SIZE for _ in range(PAGES)]
        self.rows: list[tuple[Allocation, list[int]]] = []

    def write(self, allocation: Allocation, tokens: list[int]) -> None:
        for token in tokens:
            self.slots[allocation.pages[allocation.filled // SIZE]][allocation.filled % SIZE] = token
            allocation.filled += 1

    def start(self, prompt: list[int]) -> None:
        allocation = self.table.match(prompt)
        assert allocation.filled < len(prompt)
        try:
            self.table.grow(allocation, len(prompt) + 1)
        except OutOfPages:
            self.table.release(allocation)
            return
        self.write(allocation, prompt[allocation.filled :])
        self.table.share_prefix(allocation, prompt)
        self.rows.append((allocation, list(prompt)))

    def extend(self, row: int, token: int) -> None:
        allocation, tokens = self.rows[row]
        try:
            self.table.grow(allocation, allocation.filled + 1)
        except OutOfPages:
            return
        self.write(allocation, [token])
        tokens.append(token)

    def fork(self, row: int) -> None:
        allocation, tokens = self.rows[row]
        try:
            child, copies = self.table.fork(allocation)
        except OutOfPages:
            return
        for source, to in copies:
            self.slots[to] = list(self.slots[source])
        self.rows.append((child, list(tokens)))

    def stop(self, row: int) -> None:
        self.table.release(self.rows.pop(row)[0])

    def check(self) -> None:
        for allocation, tokens in self.rows:
            read = [self.slots[allocation.pages[n // SIZE]][n % SIZE] for n in range(allocation.filled)]
            assert read == tokens
            assert RESERVED_PAGE not in allocation.pages
        held = {page for allocation, _ in self.rows for page in allocation.pages}
        assert self.table.used_pages == len(held)
        assert self.table.used_pages + self.table.free_pages == PAGES - 1


@pytest.mark.long
@settings(max_examples=200)
@given(data=st.data())
def test_rows_read_their_tokens_and_no_page_leaks(data):
    memory = Memory()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["start", "extend", "extend", "fork", "stop"]))
        if action == "start":
            memory.start(data.draw(st.lists(st.integers(4, 5), min_size=1, max_size=7)))
        elif memory.rows:
            row = data.draw(st.integers(0, len(memory.rows) - 1))
            arguments = (data.draw(st.integers(4, 5)),) if action == "extend" else ()
            getattr(memory, action)(row, *arguments)
        memory.check()
    while memory.rows:
        memory.stop(0)
        memory.check()
    assert memory.table.used_pages == 0


def test_prompts_share_the_pages_of_a_common_prefix():
    table = PageTable(8, 2)
    first = table.match([5, 6, 7, 8, 9])
    table.grow(first, 6)
    table.share_prefix(first, [5, 6, 7, 8, 9])
    second = table.match([5, 6, 7, 8, 4, 4])
    assert (second.pages, second.filled) == (first.pages[:2], 4)
    assert table.match([4, 6, 7, 8]).pages == []
    assert table.match([5, 6, 7, 8]).pages == first.pages[:1], "one token is left to be read"


def test_released_pages_are_shared_until_reallocated():
    table = PageTable(5, 2)
    row = table.match([5, 6, 7, 8, 9])
    table.grow(row, 5)
    table.share_prefix(row, [5, 6, 7, 8, 9])
    first, second, _ = row.pages
    table.release(row)
    assert table.used_pages == 0
    again = table.match([5, 6, 7, 8, 9])
    assert again.pages == [first, second]
    table.release(again)
    other = Allocation()
    table.grow(other, 6)  # takes the page that was never known, the third, and the second
    assert table.match([5, 6, 7, 8, 9]).pages == [first]


def test_a_fork_copies_the_partly_filled_page():
    table = PageTable(8, 2)
    row = Allocation()
    table.grow(row, 6)
    row.filled = 3
    child, copies = table.fork(row)
    assert child.pages[0] == row.pages[0] and child.pages[1] != row.pages[1]
    assert copies == [(row.pages[1], child.pages[1])]
    assert len(child.pages) == 2 and child.filled == 3


def test_a_failed_allocation_changes_nothing():
    table = PageTable(4, 2)
    row = Allocation()
    with pytest.raises(OutOfPages, match="4 pages are needed, 3 are free"):
        table.grow(row, 7)
    assert (row.pages, table.used_pages, table.free_pages) == ([], 0, 3)
    table.grow(row, 6)
    row.filled = 5
    with pytest.raises(OutOfPages):
        table.fork(row)
    assert table.used_pages == 3
