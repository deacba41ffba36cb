"""A lane: rows and pages for the requests of one kind."""

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from tformer_jax.config import kinds
from tformer_jax.inference.batching import MIN_LENGTH, pad_rows, power_of_two, powers_of_two
from tformer_jax.inference.beam import Hypotheses
from tformer_jax.inference.engine import compiled
from tformer_jax.inference.engine.compiled import MAX_STEPS
from tformer_jax.inference.engine.page_table import RESERVED_PAGE, PageTable
from tformer_jax.inference.engine.rows import NewTokens, RequestRow
from tformer_jax.inference.engine.scheduler import Vacancy
from tformer_jax.inference.engine.state import NewRows, Plan, Size, State, phrase_arrays
from tformer_jax.inference.forced import FirstTokens, ForcedTokens, forced_width
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.nn.attention_ops import paged
from tformer_jax.special_tokens import PAD

PROMPT_CHUNK = 256
"""Maximum number of prompt tokens per call, so that long prompts do not delay other requests for long."""

SEPARATE_PROMPTS = 4
"""Maximum number of prompts that are read one at a time if few shapes are compiled, instead of padded to all rows.

The encoder of the benchmarks takes 2.4 ms for one sentence on two Intel cores, and 12 ms for 8 rows.
"""
SLOTS_PER_BEAM = 8
"""Number of slots per beam that a dense cache of beam search has at first, beside a slot per token of the outputs.

Attention reads all slots. Most of 1,000 outputs of Multi30k, of up to 64 tokens, use at most 96 slots with 5 beams.
"""
SPARE = 4 / 3
"""Slots that beam search keeps for each slot in use, so that a cache that was cut does not grow again at once."""
SHRINK_FACTOR = 8
"""Minimum ratio of an array's length to the needed length at which the array is cut.

Each step reads the arrays whole, but each length is compiled: with 4, the first 1,000 texts of Multi30k take 28 s more
on two Intel cores, and later ones 1 s less.
"""


class Lane:
    """Rows of one `Plan`, and their state on the device."""

    def __init__(self, plan: Plan, params: Any, *, few_shapes: bool = False, grows: bool = False):
        self.plan, self._params, self._few_shapes, self._grows = plan, params, few_shapes, grows
        self.table = PageTable(plan.pages, plan.page_size)
        self.running: dict[int, RequestRow] = {}
        self._reserved = 0
        source = min(MIN_LENGTH, plan.longest_input)
        self._size = self._smallest = Size(source, MIN_LENGTH, MIN_LENGTH, forced=0)
        self._hypotheses: Hypotheses | None = None
        self._ended = np.zeros(plan.rows, bool)
        self._seconds_per_step = math.inf
        """Measured in the last call."""

    @functools.cached_property
    def state(self) -> State:
        """State on the device, allocated at its first use, when the lengths of the first requests are known."""
        return compiled.empty_state(self.plan, self._size)

    @property
    def vacancy(self) -> Vacancy:
        """Free rows and pages, and the number of rows in use."""
        taken = len(self.running) + self._reserved
        return Vacancy(self.plan.rows - taken, self.table.free_pages, taken)

    @property
    def _beam(self) -> bool:
        return self.plan.decode.strategy == "beam"

    @property
    def _free(self) -> list[int]:
        return [row for row in range(self.plan.rows) if row not in self.running]

    def pages_needed(self, rows: Sequence[RequestRow]) -> int:
        """Returns the number of free pages that the rows of a request need; shared prompt pages are not counted."""
        leader = rows[0]
        pages = self.table.pages_for(leader.slots)
        shared = self.table.shared_pages_in_use(leader.prompt) if self._shares else 0
        return len(rows) * pages - shared - (len(rows) - 1) * self.table.full_pages(len(leader.prompt) - 1)

    def reserve(self, rows: Sequence[RequestRow]) -> None:
        """Reserves pages for the rows of one request.

        The first row shares prompt pages that are already cached and reads the rest; its siblings share the prompt.

        Raises:
            OutOfPages: fewer than `pages_needed` pages are free.
        """
        leader, *siblings = rows
        if self._shares:
            leader.allocation = self.table.match(leader.prompt)
        self.table.grow(leader.allocation, leader.slots)
        read = dataclasses.replace(leader.allocation, filled=len(leader.prompt) - 1)
        for row in siblings:
            row.allocation, row.copies = self.table.fork(read)
            self.table.grow(row.allocation, row.slots)
        self._reserved += len(rows)

    @property
    def _shares(self) -> bool:
        """Whether prompts share the pages of a common prefix: no layer reads later tokens or has a state per row."""
        model, cfg = self.plan.model, self.plan.model.cfg
        return not (model.reads_source or cfg.prefix_lm or any(map(kinds.is_recurrent, cfg.attentions)))

    def start(self, requests: Sequence[Sequence[RequestRow]]) -> None:
        """Starts reserved requests: encodes their sources and reads their prompts."""
        self._reserved = 0
        separate = self._few_shapes and len(requests) <= SEPARATE_PROMPTS
        for group in [[request] for request in requests] if separate else [requests]:
            self._start(group)

    def _start(self, requests: Sequence[Sequence[RequestRow]]) -> None:
        free = iter(self._free)
        assigned = [[(next(free), row) for row in request] for request in requests]
        leaders = [request[0][1] for request in assigned]
        indices = self._padding_indices(len(leaders))
        indices[: len(leaders)] = [request[0][0] for request in assigned]
        self._fit([*self.running.values(), *leaders])
        self.state = compiled.admit(self.plan, self._params, self.state, self._new_rows(leaders, indices))
        self._read_prompts(leaders, indices)
        for (index, _), *siblings in assigned:
            for to, row in siblings:
                self._fork(index, to, row)
        for index, row in (pair for request in assigned for pair in request):
            self.running[index] = row
            self._ended[index] = False

    def advance(self, seconds: float, wanted: int | None) -> dict[int, NewTokens]:
        """Generates at least one token in every running row, and returns the new tokens by row.

        One device call takes several steps. It ends after `seconds`, estimated from the last call, or when `wanted`
        rows are free (None: when all are done), or before an array must grow; beam search finds out itself when its
        slots must.
        """
        self._hypotheses = None
        self._fit(self.running.values())
        longest = max(running.generated for running in self.running.values())
        slots = max(running.slots_after(1) for running in self.running.values())
        pages = self._pages_with(slots)
        steps = min(self._steps_within(seconds), self._size.output - longest)
        if not self._beam:
            capacity = self._size.slots if pages is None else pages * self.plan.page_size
            steps = min(steps, 1 + (capacity - slots) // self.plan.decode.tokens_per_step)
        if self._grows:
            self._take_pages(steps)
        free = self.plan.rows - len(self.running)
        min_done = self.plan.rows if wanted is None else max(wanted, free + 1)
        started = time.perf_counter()
        results, taken, filled = self._take_steps(steps, min_done, pages)
        self._seconds_per_step = (time.perf_counter() - started) / taken
        for row, running in self.running.items():
            running.allocation.filled = int(filled[row])
        return {row: self._new_tokens(*(column[:taken, row] for column in results)) for row in self.running}

    def _take_pages(self, steps: int) -> None:
        """Allocates the pages that the running rows may fill in `steps` steps.

        A row that lacks pages gets enough to double its output. Enlarges the pool if it has too few pages.
        """
        size, missing = self.table.size, {}
        for row, running in self.running.items():
            needed, taken = running.slots_after(steps), len(running.allocation.pages)
            if needed > taken * size:
                missing[row] = max(needed, running.slots_after(max(running.generated, steps)))
        if not missing:
            return
        taken = sum(len(self.running[row].allocation.pages) for row in missing)
        pages = sum(map(self.table.pages_for, missing.values())) - taken
        if pages > self.table.free_pages:
            self.table.enlarge(max(self.table.pages, pages))
            self.plan = dataclasses.replace(self.plan, pages=self.table.pages)
            self.state = compiled.enlarge(self.plan, self.state)
        indices = self._padding_indices(len(missing))
        tables = np.zeros((len(indices), self.plan.pages_per_row), np.int32)
        for place, (row, slots) in enumerate(missing.items()):
            allocation = self.running[row].allocation
            self.table.grow(allocation, slots)
            indices[place] = row
            tables[place, : len(allocation.pages)] = allocation.pages
        self.state = compiled.set_tables(self.plan, self.state, indices, tables)

    @property
    def _page_counts(self) -> Sequence[int]:
        """Numbers of pages per row that attention is compiled for: fewer than a group of pages take as long."""
        return powers_of_two(self.table.pages_for(paged.GROUP), self.plan.pages_per_row)

    def _pages_with(self, slots: int) -> int | None:
        """Returns the number of pages per row to read for `slots` slots; None for a dense cache."""
        needed = self.table.pages_for(slots)
        return next(count for count in self._page_counts if count >= needed) if self.plan.paged else None

    def _take_steps(self, steps: int, min_done: int, pages: int | None) -> Any:
        """Calls `compiled.advance` and returns its `Steps` as NumPy arrays."""
        numbers = np.int32(steps), np.int32(min_done)
        self.state, taken = compiled.advance(self.plan, self._params, self.state, self._ended, *numbers, pages=pages)
        return jax.device_get(taken)

    @property
    def _chunk(self) -> int:
        """Maximum number of prompt tokens per call; the tokens of a prefix LM's prompt attend to each other."""
        longest = self.plan.longest_input
        return longest if self.plan.model.cfg.prefix_lm else min(PROMPT_CHUNK, longest)

    def _steps_within(self, seconds: float) -> int:
        """Returns the number of steps that fit into `seconds`, at least 1 and at most `MAX_STEPS`."""
        return MAX_STEPS if seconds == math.inf else min(max(int(seconds / self._seconds_per_step), 1), MAX_STEPS)

    @staticmethod
    def _new_tokens(tokens: np.ndarray, scores: np.ndarray, done: np.ndarray) -> NewTokens:
        """Returns the new tokens of a row from its results, one entry per step."""
        steps = int(done.argmax()) + 1 if done.any() else len(done)
        is_new = tokens[:steps] != PAD
        return NewTokens(tokens[:steps][is_new].tolist(), scores[:steps][is_new].tolist(), bool(done[-1]))

    def hypotheses(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the beam search outputs of a row: tokens int32 [k, length], scores float32 [k]."""
        if self._hypotheses is None:
            self._hypotheses = jax.device_get(compiled.finished_hypotheses(self.state.rows))
        return np.asarray(self._hypotheses.tokens[row]), np.asarray(self._hypotheses.scores[row])

    def warm_up(self, new_tokens: int, forced: int) -> None:
        """Compiles the functions for outputs of up to `new_tokens` tokens, and allocates arrays of that length.

        The first `forced` tokens of outputs may be given. The arrays keep this length: only the dense cache of beam
        search grows, if its beams have few common ancestors; steps are also compiled for the next number of slots.
        """
        translates = self.plan.model.reads_source
        self._resize(self._fitted(self.plan.longest_input if translates else 1, new_tokens, 1, forced))
        self._smallest = self._size
        lengths = powers_of_two(MIN_LENGTH, self._size.source if translates else self._chunk)
        for indices in map(self._padding_indices, sorted({1, self.plan.rows})):
            for length in lengths if translates else lengths[:1]:
                self.state = compiled.admit(self.plan, self._params, self.state, self._new_rows([], indices, length))
            for length in [] if translates else lengths:
                tokens = np.full((len(indices), length), PAD, np.int32)
                self.state = compiled.read_prompts(self.plan, self._params, self.state, indices, tokens)
        for pages in self._page_counts if self.plan.paged else [None]:
            self._take_steps(1, 1, pages)
        if self._beam and not self.plan.paged:
            self._resize(self._fitted(1, 1, self._smallest.slots + 1, 0))
            self._take_steps(1, 1, None)
            self._resize(self._smallest)
        if self._beam:
            jax.block_until_ready(compiled.finished_hypotheses(self.state.rows))

    def release(self, row: int) -> None:
        """Releases a row and its pages."""
        self.table.release(self.running.pop(row).allocation)
        self._ended[row] = True

    def _fit(self, rows: Iterable[RequestRow]) -> None:
        """Fits the lengths of the arrays to the rows: each step reads the arrays whole."""
        source, output, slots, forced = 1, 1, 1, 0
        for row in rows:
            read = len(row.source or [])
            expected = min(row.expected, read or row.expected)  # most translations are as long as their source
            source, forced = max(source, read), max(forced, len(row.first.ids))
            output, slots = max(output, expected, row.generated + 1), max(slots, row.slots_after(1))
        self._resize(self._fitted(source, output, slots, forced))

    def _fitted(self, source: int, output: int, slots: int, forced: int) -> Size:
        """Returns lengths of at least these; the present ones, unless they are too small or much larger."""

        def fitted(length: int, wanted: int) -> int:
            return length if wanted <= length < SHRINK_FACTOR * wanted else wanted

        now, least, plan = self._size, self._smallest, self.plan
        source = fitted(now.source, max(min(power_of_two(source), plan.longest_input), least.source))
        output = fitted(now.output, max(min(power_of_two(output), plan.length), least.output))
        enough = ample = self._slots(output, slots)
        if self._beam:
            ample = self._slots(output, int(SPARE * slots))
        fitting = max(enough, min(now.slots, ample), least.slots)
        return Size(source, output, fitting, max(now.forced, forced_width(forced)))

    def _slots(self, output: int, needed: int) -> int:
        """Returns the number of slots of a dense cache for outputs of a length, at least `needed`."""
        width = self.plan.decode.width
        least = min(output + SLOTS_PER_BEAM * width, output * width)
        return min(least * power_of_two(-(-needed // least)), self.plan.length * width)

    def _resize(self, size: Size) -> None:
        before, self._size = self._size, size
        if self._allocated(size) != self._allocated(before) and "state" in vars(self):
            self.state = compiled.resize(self.plan, self.state, size)

    def _allocated(self, size: Size) -> Size:
        """Returns the lengths of the arrays: outputs are stored by beam search only, slots by dense caches only."""
        return size._replace(output=size.output if self._beam else 0, slots=0 if self.plan.paged else size.slots)

    def _fork(self, source: int, to: int, row: RequestRow) -> None:
        table = np.zeros(self.plan.pages_per_row, np.int32)
        table[: len(row.allocation.pages)] = row.allocation.pages
        seeds = np.array(row.seeds, np.uint32)
        copies = np.array(row.copies or [(RESERVED_PAGE, RESERVED_PAGE)], np.int32)
        self.state = compiled.fork(self.plan, self.state, source, to, seeds, table, copies)

    def _padding_indices(self, count: int) -> np.ndarray:
        """Returns indices of padding rows, outside the lane, int32 [P], for at least `count` rows."""
        size = power_of_two(count) if not self._few_shapes else 1 if count == 1 else self.plan.rows
        return np.full(size, self.plan.rows, np.int32)

    def _new_rows(self, rows: Sequence[RequestRow], indices: np.ndarray, source: int = MIN_LENGTH) -> NewRows:
        """Returns the inputs of new rows, padded to one row per index; sources have at least `source` columns."""
        count, plan = len(indices), self.plan
        filler = count - len(rows)
        tables = np.zeros((count, plan.pages_per_row), np.int32)
        for table, row in zip(tables, rows, strict=False):
            table[: len(row.allocation.pages)] = row.allocation.pages
        sources: Any = None
        if plan.model.reads_source:
            texts = [row.source or [] for row in rows]
            longest = max([source, *map(len, texts)])
            sources = pad_rows(texts, count, min(power_of_two(longest), self._size.source))
        history = pad_rows([row.prompt for row in rows] if plan.history else [], count, plan.history)
        host: dict[str, Any] = {
            "indices": indices,
            "last": np.array([row.prompt[-1] for row in rows] + [PAD] * filler, np.int32),
            "counts": np.array([len(row.prompt) for row in rows] + [0] * filler, np.int32),
            "history": history,
            "max_new_tokens": np.array([row.max_new_tokens for row in rows] + [0] * filler, np.int32),
            "seeds": np.array([row.seeds for row in rows] + [(0, 0)] * filler, np.uint32),
            "scored": np.array([row.scored for row in rows] + [False] * filler, bool),
            "tables": tables,
            "filled": np.array([row.allocation.filled for row in rows] + [0] * filler, np.int32),
            "forced": ForcedTokens.from_rows([row.first for row in rows] + [FirstTokens()] * filler, self._size.forced),
            "settings": RowSettings.from_configs(
                [row.decode for row in rows] + [plan.decode] * filler, [row.masked.allowed for row in rows]
            ),
            "phrases": phrase_arrays(plan, [row.phrases for row in rows] + [()] * filler),
            "sources": sources,
        }
        return NewRows(**host)

    def _read_prompts(self, rows: Sequence[RequestRow], indices: np.ndarray) -> None:
        """Reads the prompts, except tokens that are already in the row's pages; see `prefill`."""
        prefix_lm = self.plan.model.cfg.prefix_lm
        prompts = [row.prompt if prefix_lm else row.prompt[:-1] for row in rows]
        unread = [prompt[row.allocation.filled :] for prompt, row in zip(prompts, rows, strict=True)]
        longest = max(map(len, unread))
        for row in rows:
            row.allocation.filled = len(row.prompt) - 1
        if longest == 0:
            return
        chunk = self._chunk
        length = min(power_of_two(max(longest, MIN_LENGTH)), -(-longest // chunk) * chunk)
        tokens = pad_rows(unread, len(indices), length, pad_left=True)
        for start in range(0, length, chunk):
            part = tokens[:, start : start + chunk]
            self.state = compiled.read_prompts(self.plan, self._params, self.state, indices, part)
        if self._shares:
            for row, prompt in zip(rows, prompts, strict=True):
                self.table.share_prefix(row.allocation, prompt)
