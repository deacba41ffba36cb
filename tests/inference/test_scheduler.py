"""Admission is fair: no request waits while a row is free, or is overtaken by a later one of its kind."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_jax.inference.engine.scheduler import PendingRequest, Vacancy, admit

EMPTY = dict.fromkeys("abcde", Vacancy(4, 8, 0))


def chosen(pending: str, lanes=None, *, rows: int = 1, most_lanes: int = 4, group: int = 1) -> list[int]:
    requests = [PendingRequest(kind, rows, 1) for kind in pending]
    return admit(requests, lanes or {}, empty=EMPTY, most_lanes=most_lanes, group=group)


def test_a_free_row_is_taken_at_once():
    assert chosen("aaa", {"a": Vacancy(1, 8, 3)}) == [0]
    assert chosen("aaaaa") == [0, 1, 2, 3]


def test_a_full_lane_does_not_block_other_lanes():
    assert chosen("aab", {"a": Vacancy(0, 8, 4)}) == [2]
    assert chosen("ab", {"a": Vacancy(4, 0, 0), "b": Vacancy(4, 8, 0)}) == [1]


def test_small_requests_do_not_overtake_a_large_one_of_their_kind():
    requests = [PendingRequest("a", 3, 1), PendingRequest("a", 1, 1), PendingRequest("b", 1, 1)]
    assert admit(requests, {"a": Vacancy(2, 8, 2)}, empty=EMPTY, most_lanes=4) == [2]


def test_only_running_lanes_wait_for_a_group():
    assert chosen("aaa", {"a": Vacancy(1, 8, 3)}, group=2) == []
    assert chosen("aaa", {"a": Vacancy(2, 8, 2)}, group=2) == [0, 1]
    assert chosen("a", {"a": Vacancy(1, 8, 3)}, group=2) == [0]
    assert chosen("a", {"a": Vacancy(4, 8, 0)}, group=2) == [0]


def test_an_unused_lane_is_replaced_or_else_the_smallest_one_drains():
    running = {"a": Vacancy(1, 8, 3), "b": Vacancy(3, 8, 1)}
    assert chosen("cab", running, most_lanes=2) == [1]
    assert chosen("cab", running | {"b": Vacancy(4, 8, 0)}, most_lanes=2) == [0, 1]
    assert chosen("c", {}, most_lanes=1) == [0]


def test_newly_admitted_rows_count_in_the_choice_of_the_draining_lane():
    running = {"a": Vacancy(2, 8, 2), "b": Vacancy(3, 8, 1)}
    assert chosen("bbcab", running, most_lanes=2) == [0, 1, 4]


def test_without_groups_one_free_row_is_enough():
    requests = [PendingRequest("a", 1, 1)] * 2
    assert admit(requests, {"a": Vacancy(1, 8, 3)}, empty=EMPTY, most_lanes=4) == [0]


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_request_starts_in_the_order_of_its_kind(data):
    """Simulates steps in which requests arrive, are admitted and finish; then no more arrive until all are done."""
    most_lanes, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes, left = st.tuples(st.sampled_from("abcde"), st.integers(1, 4), st.integers(1, 8)), collections.deque()
    queue: list[tuple[int, PendingRequest]] = []
    running: dict[str, list[list[int]]] = {}
    started = collections.defaultdict(list)
    arrivals = [PendingRequest(*each) for each in data.draw(st.lists(sizes, max_size=12))]
    left.extend(enumerate(arrivals))
    for step in range(100):
        if left and (step % 2 == 0):
            queue.append(left.popleft())
        vacancies = {
            kind: Vacancy(4 - sum(r for r, _, _ in rows), 8 - sum(p for _, p, _ in rows), sum(r for r, _, _ in rows))
            for kind, rows in running.items()
        }
        indices = admit([each for _, each in queue], vacancies, empty=EMPTY, most_lanes=most_lanes, group=group)
        for number, each in [queue[index] for index in indices]:
            if each.kind not in running and len(running) == most_lanes:
                del running[next(kind for kind, rows in running.items() if not rows)]
            running.setdefault(each.kind, []).append([each.rows, each.pages, data.draw(st.integers(1, 4))])
            started[each.kind].append(number)
        queue = [each for index, each in enumerate(queue) if index not in indices]
        for kind, rows in running.items():
            assert sum(r for r, _, _ in rows) <= 4 and sum(p for _, p, _ in rows) <= 8
            running[kind] = [[r, p, time - 1] for r, p, time in rows if time > 1]
    assert not queue and not left
    assert all(numbers == sorted(numbers) for numbers in started.values())
