"""The rows and pages of a lane, and when its requests read their prompts."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.batching import SHORTEST, pad_rows, power_of_two, powers_of_two
from tformer_jax.inference.beam import Hypotheses
from tformer_jax.inference.engine import compiled
from tformer_jax.inference.engine.compiled import MOST
from tformer_jax.inference.engine.page_table import NOBODY, Holding, PageTable
from tformer_jax.inference.engine.scheduler import Vacancy
from tformer_jax.inference.engine.state import Newcomers, Plan, Size
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.inference.stopping import TextStream, WholeText
from tformer_jax.special_tokens import PAD

CHUNK = 256
"""Prompt tokens that are read at once: longer prompts do not hold up the others for long."""

SMALLEST = Size(SHORTEST, SHORTEST)
MUCH = 4


@dataclasses.dataclass
class Running:
    """One row of a request."""

    request: int
    sample: int
    decode: DecodeConfig
    prompt: list[int]
    source: list[int] | None
    """What an encoder reads."""
    room: int
    """The most tokens that are chosen."""
    seeds: tuple[int, int]
    stream: TextStream | WholeText
    outputs: int
    scored: bool
    made: int = 0
    holding: Holding = dataclasses.field(default_factory=Holding)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Pages to copy, from and to, once the first row of the request has read the prompt; at most one."""

    @property
    def slots(self) -> int:
        """The most slots of a cache that the row fills."""
        return len(self.prompt) + self.room * self.decode.width


class Chosen(NamedTuple):
    """What a row chose in one call, which may have taken several steps."""

    tokens: list[int]
    """Of beams, those of the best one in each step."""
    scores: list[float]
    """The row's score so far, at each token."""
    done: bool


class Lane:
    """The rows of one `Plan`."""

    def __init__(self, plan: Plan, params: Any, *, few_shapes: bool = False):
        self.plan, self._params, self._few_shapes = plan, params, few_shapes
        self.table = PageTable(plan.pages, plan.page_size)
        self.running: dict[int, Running] = {}
        self._reserved = 0
        self._size = self._needed = self._smallest = SMALLEST
        self.state = compiled.empty(plan, self._size)
        self._hypotheses: Hypotheses | None = None
        self._ended = np.zeros(plan.rows, bool)
        self._pace = math.inf
        """Seconds of a step, by the last call."""

    @property
    def vacancy(self) -> Vacancy:
        """What newcomers may take."""
        taken = len(self.running) + self._reserved
        return Vacancy(self.plan.rows - taken, self.table.free, taken)

    @property
    def _free(self) -> list[int]:
        return [row for row in range(self.plan.rows) if row not in self.running]

    def pages_needed(self, rows: Sequence[Running]) -> int:
        """Free pages that the rows of one request take now; prompts that others have read are shared."""
        leader = rows[0]
        pages = self.table.needed(leader.slots)
        held = self.table.held(leader.prompt) if self._shares else 0
        return len(rows) * pages - held - (len(rows) - 1) * self.table.full(len(leader.prompt) - 1)

    def reserve(self, rows: Sequence[Running]) -> None:
        """Sets pages aside for the rows of one request.

        The first row holds what others have read of the same prompt, and reads the rest; its siblings share that.

        Raises:
            OutOfPages: fewer than `pages_needed` are free.
        """
        leader, *siblings = rows
        if self._shares:
            leader.holding = self.table.match(leader.prompt)
        self.table.grow(leader.holding, leader.slots)
        read = dataclasses.replace(leader.holding, filled=len(leader.prompt) - 1)
        for row in siblings:
            row.holding, row.copies = self.table.fork(read)
            self.table.grow(row.holding, row.slots)
        self._reserved += len(rows)

    @property
    def _shares(self) -> bool:
        """Whether prompts with a common beginning share its pages: its keys do not depend on what follows."""
        cfg = self.plan.model.cfg
        return cfg.family == "decoder_lm" and not cfg.prefix_lm

    def begin(self, requests: Sequence[Sequence[Running]]) -> None:
        """Lets those that were reserved begin: sources and prompts are read."""
        self._reserved = 0
        free = iter(self._free)
        placed = [[(next(free), row) for row in request] for request in requests]
        leaders = [request[0][1] for request in placed]
        places = self._nowhere(len(leaders))
        places[: len(leaders)] = [request[0][0] for request in placed]
        if not self.running:
            self._shrink()
        self._widen(max((len(row.source) for row in leaders if row.source), default=0), 0)
        self.state = compiled.admit(self.plan, self._params, self.state, self._newcomers(leaders, places))
        self._read_prompts(leaders, places)
        for (place, _), *siblings in placed:
            for to, row in siblings:
                self._fork(place, to, row)
        for place, row in (pair for request in placed for pair in request):
            self.running[place] = row
            self._ended[place] = False

    def advance(self, seconds: float, wanted: int | None) -> dict[int, Chosen]:
        """Generates more tokens in every row, at least one; returns what each row chose.

        One call to the device takes several steps: as many as fit into `seconds` by the pace of the last call, until
        `wanted` rows are free (None: until all have ended), or until an array has to be longer.
        """
        self._hypotheses = None
        width = self.plan.decode.width
        longest = max(running.made for running in self.running.values())
        slots = max(running.holding.filled + (width if running.made else 1) for running in self.running.values())
        self._widen(0, longest + 1)
        steps = min(self._affordable(seconds), self._size.output - longest)
        pages = None
        if self.plan.paged:
            pages = min(power_of_two(self.table.needed(slots)), self.plan.pages_a_row)
            steps = min(steps, 1 + (pages * self.plan.page_size - slots) // width)
        free = self.plan.rows - len(self.running)
        enough = self.plan.rows if wanted is None else max(wanted, free + 1)
        begun = time.perf_counter()
        reports, taken = self._take_steps(steps, enough, pages)
        self._pace = (time.perf_counter() - begun) / taken
        return {row: self._chosen(row, *(column[:taken, row] for column in reports)) for row in self.running}

    def _take_steps(self, steps: int, enough: int, pages: int | None) -> tuple[Any, Any]:
        """`compiled.advance`, its result on the host."""
        numbers = np.int32(steps), np.int32(enough)
        self.state, done = compiled.advance(self.plan, self._params, self.state, self._ended, *numbers, pages=pages)
        reports, taken = jax.device_get(done)
        return reports, taken

    def _affordable(self, seconds: float) -> int:
        """The number of steps that fit into `seconds`."""
        return MOST if seconds == math.inf else min(max(int(seconds / self._pace), 1), MOST)

    def _chosen(self, row: int, tokens: np.ndarray, scores: np.ndarray, done: np.ndarray) -> Chosen:
        """What a row chose in the steps of one call, by the columns of their reports."""
        count = int(done.argmax()) + 1 if done.any() else len(done)
        running = self.running[row]
        width = running.decode.width
        running.holding.filled += count * width - (0 if running.made else width - 1)
        return Chosen(tokens[:count].tolist(), scores[:count].tolist(), bool(done[-1]))

    def hypotheses(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """What beam search has found for a row: tokens int32 [k, length], scores float32 [k]."""
        if self._hypotheses is None:
            self._hypotheses = jax.device_get(compiled.finished(self.state))
        return np.asarray(self._hypotheses.tokens[row]), np.asarray(self._hypotheses.scores[row])

    def warm_up(self, new_tokens: int) -> None:
        """Compiles what requests for up to `new_tokens` tokens need, for arrays that need not grow for them.

        Memory for rows of that length is allocated now and kept.
        """
        translates = self.plan.model.cfg.family == "seq2seq"
        self._widen(self.plan.length if translates else 0, new_tokens)
        self._smallest = self._size
        lengths = powers_of_two(
            SHORTEST, self._size.source if translates else min(CHUNK, power_of_two(self.plan.length - 1))
        )
        for places in map(self._nowhere, sorted({1, self.plan.rows})):
            for length in lengths if translates else lengths[:1]:
                self.state = compiled.admit(self.plan, self._params, self.state, self._newcomers([], places, length))
            for length in [] if translates else lengths:
                tokens = np.full((len(places), length), PAD, np.int32)
                self.state = compiled.read(self.plan, self._params, self.state, places, tokens)
        for pages in powers_of_two(1, self.plan.pages_a_row) if self.plan.paged else [None]:
            self._take_steps(1, 1, pages)
        if self.plan.decode.strategy == "beam":
            jax.block_until_ready(compiled.finished(self.state))

    def leave(self, row: int) -> None:
        """Takes a row back, with its pages."""
        self.table.release(self.running.pop(row).holding)
        self._ended[row] = True

    def _shrink(self) -> None:
        """Between two works: arrays that have become much longer than the last one needed are made anew."""
        if any(length >= MUCH * needed for length, needed in zip(self._size, self._needed, strict=True)):
            self._size, self.state = self._needed, compiled.empty(self.plan, self._needed)
        self._needed = self._smallest

    def _widen(self, source: int, output: int) -> None:
        """Makes room for sources and outputs of such lengths."""
        wanted = Size(*(min(power_of_two(length), self.plan.length) for length in (source, output)))
        self._needed = Size(*map(max, wanted, self._needed))
        size = Size(*map(max, wanted, self._size))
        if size != self._size:
            self._size, self.state = size, compiled.widen(self.plan, self.state, size)

    def _fork(self, source: int, to: int, row: Running) -> None:
        table = np.zeros(self.plan.pages_a_row, np.int32)
        table[: len(row.holding.pages)] = row.holding.pages
        seeds = np.array(row.seeds, np.uint32)
        copies = np.array(row.copies or [(NOBODY, NOBODY)], np.int32)
        self.state = compiled.fork(self.plan, self.state, source, to, seeds, table, copies)

    def _nowhere(self, count: int) -> np.ndarray:
        """Places outside the lane for at least `count` rows that are read together: int32 [P]."""
        size = power_of_two(count) if not self._few_shapes else 1 if count == 1 else self.plan.rows
        return np.full(size, self.plan.rows, np.int32)

    def _newcomers(self, rows: Sequence[Running], places: np.ndarray, source: int = SHORTEST) -> Newcomers:
        """Rows that begin, padded to one per place; sources have at least `source` tokens."""
        count, plan = len(places), self.plan
        filler = count - len(rows)
        tables = np.zeros((count, plan.pages_a_row), np.int32)
        for table, row in zip(tables, rows, strict=False):
            table[: len(row.holding.pages)] = row.holding.pages
        sources: Any = None
        if plan.model.cfg.family == "seq2seq":
            texts = [row.source or [] for row in rows]
            longest = max([source, *map(len, texts)])
            sources = pad_rows(texts, count, min(power_of_two(longest), self._size.source))
        history = pad_rows([row.prompt for row in rows] if plan.history else [], count, plan.history)
        host: dict[str, Any] = {
            "places": places,
            "last": np.array([row.prompt[-1] for row in rows] + [PAD] * filler, np.int32),
            "counts": np.array([len(row.prompt) for row in rows] + [0] * filler, np.int32),
            "history": history,
            "room": np.array([row.room for row in rows] + [0] * filler, np.int32),
            "seeds": np.array([row.seeds for row in rows] + [(0, 0)] * filler, np.uint32),
            "scored": np.array([row.scored for row in rows] + [False] * filler, bool),
            "tables": tables,
            "filled": np.array([row.holding.filled for row in rows] + [0] * filler, np.int32),
            "settings": RowSettings.of_each([row.decode for row in rows] + [plan.decode] * filler),
            "sources": sources,
        }
        return Newcomers(**host)

    def _read_prompts(self, rows: Sequence[Running], places: np.ndarray) -> None:
        """All but the last token of each prompt, without what the row's pages hold already."""
        whole = self.plan.model.cfg.prefix_lm
        prompts = [row.prompt if whole else row.prompt[:-1] for row in rows]
        unread = [prompt[row.holding.filled :] for prompt, row in zip(prompts, rows, strict=True)]
        longest = max(map(len, unread))
        for row in rows:
            row.holding.filled = len(row.prompt) - 1
        if longest == 0:
            return
        chunk = self.plan.length if whole else CHUNK
        length = min(power_of_two(max(longest, SHORTEST)), -(-longest // chunk) * chunk)
        tokens = pad_rows(unread, len(places), length, pad_left=True)
        for start in range(0, length, chunk):
            part = tokens[:, start : start + chunk]
            self.state = compiled.read(self.plan, self._params, self.state, places, part)
        if self._shares:
            for row, prompt in zip(rows, prompts, strict=True):
                self.table.remember(row.holding, prompt)
