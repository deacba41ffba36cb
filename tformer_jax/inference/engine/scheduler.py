"""Which waiting requests begin: a pure function of the queue and of the lanes."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple


class PendingRequest(NamedTuple):
    """A waiting request, as far as admission is concerned."""

    kind: Hashable
    """The lane that can run it."""
    rows: int
    pages: int
    """Upper bound of the free pages that it takes."""


class Vacancy(NamedTuple):
    """What a lane has left."""

    rows: int
    pages: int
    running: int
    """Rows that are in use."""


def admit(
    pending: Sequence[PendingRequest],
    lanes: Mapping[Hashable, Vacancy],
    *,
    empty: Mapping[Hashable, Vacancy],
    most_lanes: int,
    group: int = 1,
) -> list[int]:
    """The indices of the requests that begin now, in order.

    Requests of one kind begin in the order of arrival: one that does not fit holds back the later ones of its kind,
    and nobody else. Where a request needs another lane and `most_lanes` lanes run, the lane with the fewest running
    rows takes no later request, so that it ends and makes place.

    Args:
        pending: the queue, in order of arrival.
        lanes: the lanes that exist, in order of creation; the first one without running rows makes place for another.
        empty: a new lane of each kind that has none.
        most_lanes: maximum number of lanes.
        group: a lane in use admits requests only if this many rows are free, or all that wait for it fit: reading
            prompts together is faster, waiting for one another is slower.
    """
    left, held, chosen = dict(lanes), _held_for_a_group(pending, lanes, group), []
    for index, request in enumerate(pending):
        if request.kind in held:
            continue
        if request.kind not in left and len(left) == most_lanes:
            unused = [kind for kind, vacancy in left.items() if not vacancy.running]
            if not unused:
                held |= {request.kind, min(left.keys() - held or left, key=lambda kind: left[kind].running)}
                continue
            del left[unused[0]]
        rows, pages, running = left.get(request.kind) or empty[request.kind]
        if request.rows > rows or request.pages > pages:
            held.add(request.kind)
            continue
        left[request.kind] = Vacancy(rows - request.rows, pages - request.pages, running + request.rows)
        chosen.append(index)
    return chosen


def _held_for_a_group(
    pending: Sequence[PendingRequest], lanes: Mapping[Hashable, Vacancy], group: int
) -> set[Hashable]:
    """The lanes that wait until more rows are free."""
    wanted = {kind: sum(request.rows for request in pending if request.kind == kind) for kind in lanes}
    return {kind for kind, vacancy in lanes.items() if vacancy.running and vacancy.rows < min(group, wanted[kind])}
