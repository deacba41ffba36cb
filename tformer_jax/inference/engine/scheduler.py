"""Admission of pending requests: a pure function of the queue and the lanes."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple


class PendingRequest(NamedTuple):
    """Properties of a pending request that admission depends on."""

    kind: Hashable
    """Kind of the lane that can run it."""
    rows: int
    pages: int
    """Maximum number of free pages that it takes."""


class Vacancy(NamedTuple):
    """Free capacity of a lane."""

    rows: int
    pages: int
    running: int
    """Number of rows in use."""


def admit(
    pending: Sequence[PendingRequest],
    lanes: Mapping[Hashable, Vacancy],
    *,
    empty: Mapping[Hashable, Vacancy],
    most_lanes: int,
    group: int = 1,
) -> list[int]:
    """Returns the indices of the requests to start now, in order.

    Requests of one kind start in order of arrival: a request that does not fit blocks later requests of its kind, but
    no others. If a request needs another lane and `most_lanes` lanes are running, the lane with the fewest running
    rows admits no more requests, so that it drains and can be replaced.

    Args:
        pending: the queue, in order of arrival.
        lanes: existing lanes in order of creation; a new lane replaces the first one without running rows.
        empty: vacancy of a new lane, for each kind without a lane.
        most_lanes: maximum number of lanes.
        group: a running lane admits requests only if this many rows are free, or all its pending requests fit. Larger
            groups read prompts faster, but wait longer.
    """
    vacancies, blocked, chosen = dict(lanes), _waiting_for_group(pending, lanes, group), []
    for index, request in enumerate(pending):
        if request.kind in blocked:
            continue
        if request.kind not in vacancies and len(vacancies) == most_lanes:
            unused = [kind for kind, vacancy in vacancies.items() if not vacancy.running]
            if not unused:
                draining = min(vacancies.keys() - blocked or vacancies, key=lambda kind: vacancies[kind].running)
                blocked |= {request.kind, draining}
                continue
            del vacancies[unused[0]]
        rows, pages, running = vacancies.get(request.kind) or empty[request.kind]
        if request.rows > rows or request.pages > pages:
            blocked.add(request.kind)
            continue
        vacancies[request.kind] = Vacancy(rows - request.rows, pages - request.pages, running + request.rows)
        chosen.append(index)
    return chosen


def _waiting_for_group(
    pending: Sequence[PendingRequest], lanes: Mapping[Hashable, Vacancy], group: int
) -> set[Hashable]:
    """Returns the kinds of lanes that admit nothing until a group of rows is free."""
    wanted = {kind: sum(request.rows for request in pending if request.kind == kind) for kind in lanes}
    return {kind for kind, vacancy in lanes.items() if vacancy.running and vacancy.rows < min(group, wanted[kind])}
