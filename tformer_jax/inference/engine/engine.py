"""Continuous batching: requests are added at any time, and each step serves all running requests.

A request takes rows of a compiled step and releases them when its outputs end; keys and values are in pages of a
pool, or in a dense cache. `Engine` is plain Python; the compiled functions are in `compiled`. It is not thread-safe.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DecodeConfig
from tformer_jax.data.markup import take_out
from tformer_jax.data.placeholders import mask, mask_target, restore
from tformer_jax.data.tokenizers import NO_PLACEHOLDERS, Decoder, Tokenizers
from tformer_jax.inference.batching import power_of_two
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.detokenization import TextBuffer, TextStream, has_text, output_decoder
from tformer_jax.inference.engine.events import Event, Request, beam_events, check_outputs, token_event
from tformer_jax.inference.engine.lane import Lane
from tformer_jax.inference.engine.pool import PAGE_SIZE, expected_tokens, max_new_tokens
from tformer_jax.inference.engine.rows import NewTokens, RequestRow
from tformer_jax.inference.engine.scheduler import PendingRequest, Vacancy, admit
from tformer_jax.inference.engine.state import Plan
from tformer_jax.inference.final_texts import Finisher, Unfinished, is_withheld, needs_finishing
from tformer_jax.inference.forced import FirstTokens, first_tokens
from tformer_jax.inference.languages import Languages
from tformer_jax.inference.layout import decoding_layout
from tformer_jax.inference.requests import TokenConstraints
from tformer_jax.models.ensemble import first_member
from tformer_jax.parallel.placement import mesh_of, use_whole_mesh

MAX_LANES = 4
"""Maximum number of lanes, one per `Kind`."""
MAX_CACHED = 256
"""Maximum size of each cache by decoding settings: of kinds, and of first tokens."""
SMOOTH_SECONDS = 0.05
"""Step duration in seconds at which streamed text appears smoothly."""
BEAM_SETTINGS = "strategy", "beams", "length_penalty", "length_alpha", "early_stopping", "renormalize", "cache_dtype"
Kind = tuple[DecodeConfig, Constraints]
"""Static settings that a lane is compiled for; requests of greedy decoding and of sampling share a kind."""


class _QueuedRequest(NamedTuple):
    """A pending request, which has no rows yet."""

    kind: Kind
    rows: list[RequestRow]

    @property
    def number(self) -> int:
        """Request number that `submit` returned."""
        return self.rows[0].request


class Engine:
    """Translates or continues many texts concurrently.

    Args:
        max_rows: number of rows per step.
        pages: number of pages of `PAGE_SIZE` tokens, for each kind of decoding; None: enough for all rows at maximum
            length. Translations, which share no prefixes, then use a dense cache, which a CPU reads faster.
        grows: rows without `decode.max_new_tokens` first take pages for `EXPECTED_TOKENS` new tokens, and the pool is
            enlarged if they need more. Otherwise, rows reserve all pages that they may need, and outputs without
            `decode.max_new_tokens` end where an equal share of the pages does.
        seconds: target duration of `step`: it generates as many tokens as fit, at least one for each running output.
            If infinite, `step` maximizes throughput, and prompts are read in groups. Outputs do not depend on it.
        few_shapes: compile fewer shapes, for a server, where all requests wait during a compilation: beam widths are
            rounded up to the config's or a power of two, and prompts are read one at a time or padded to `max_rows`
            rows. Outputs do not depend on it.
    """

    def __init__(
        self,
        cfg: Config,
        model: Any,
        params: Any,
        tokenizers: Tokenizers,
        *,
        max_rows: int,
        pages: int | None = None,
        grows: bool = False,
        seconds: float = 0.0,
        few_shapes: bool = False,
    ):
        self._cfg, self._tokenizers, self._seconds, self._few_shapes = cfg, tokenizers, seconds, few_shapes
        self._decoders: dict[tuple[str, bool], Decoder] = {}
        self._group = -(-max_rows // 4) if seconds == math.inf else 1
        self._mesh = mesh_of(params)
        with use_whole_mesh(self._mesh):
            self._model, self._params = decoding_layout(model, params)
        shown = first_member(self._model, self._params)  # for attention
        self._languages = Languages(cfg.data, tokenizers)
        self._finish = Finisher(*shown, tokenizers, min(max_rows, cfg.eval.batch_size), cfg.data.transforms)
        self._unfinished: dict[tuple[int, int], Unfinished] = {}
        self.max_rows, self._pages, self._grows = max_rows, pages, grows
        self._lanes: dict[Kind, Lane] = {}
        self._kind_without_prefix = functools.lru_cache(MAX_CACHED)(self._make_kind)
        self._first_tokens = functools.lru_cache(MAX_CACHED)(self._make_first_tokens)
        self._queues: dict[Kind, collections.deque[_QueuedRequest]] = {}
        self._next = 0

    @property
    def idle(self) -> bool:
        """Whether no request is pending or running."""
        return not self._queues and not self.running

    @property
    def pending(self) -> int:
        """Number of pending requests, which have no rows yet."""
        return sum(map(len, self._queues.values()))

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len({running.request for lane in self._lanes.values() for running in lane.running.values()})

    @property
    def pages_used(self) -> int:
        """Number of pages in use."""
        return sum(lane.table.used_pages for lane in self._lanes.values())

    @property
    def pages(self) -> int:
        """Total number of pages of all current lanes."""
        return sum(lane.table.pages - 1 for lane in self._lanes.values())

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
            UserError: the request can never be served.
        """
        number = self._next
        queued = self._queue_request(number, request)
        self._queues.setdefault(queued.kind, collections.deque()).append(queued)
        self._next += 1
        return number

    def warm_up(self, decode: DecodeConfig, tags: tuple[int, ...] = ()) -> None:
        """Compiles the functions for requests with these settings and tags; others are compiled when first needed."""
        tags = self._tokenizers.target.special.start_target(tags)[1]
        first = self._first_tokens(decode, tags, None)
        with use_whole_mesh(self._mesh):
            self._lane(self._kind(decode)).warm_up(expected_tokens(self._cfg.model, decode, 1), len(first.ids))

    def cancel(self, request: int) -> None:
        """Ends a pending or running request; it has no further events."""
        remaining = {
            kind: collections.deque(queued for queued in queue if queued.number != request)
            for kind, queue in self._queues.items()
        }
        self._queues = {kind: queue for kind, queue in remaining.items() if queue}
        for lane in self._lanes.values():
            for row in [row for row, running in lane.running.items() if running.request == request]:
                lane.release(row)
        self._unfinished = {key: output for key, output in self._unfinished.items() if key[0] != request}

    def step(self, share: float = 1.0) -> list[Event]:
        """Admits pending requests, generates tokens in all running rows for a `share` of `seconds`; returns events."""
        with use_whole_mesh(self._mesh):
            self._admit()
            lanes = {kind: lane for kind, lane in self._lanes.items() if lane.running}
            seconds = share * self._seconds / max(len(lanes), 1)
            return self._finish_texts(
                [event for kind, lane in lanes.items() for event in self._advance(kind, lane, seconds)]
            )

    def _check(self, request: Request) -> None:
        """Raises `UserError` if the engine cannot give this number of outputs, or the model cannot read the ids."""
        check_outputs(request, self.max_rows)
        cfg = self._cfg.model
        most = cfg.max_length if cfg.model_class.reads_source else cfg.max_length - 1
        if not 0 < len(request.ids) <= most:
            raise UserError(f"the request has {len(request.ids)} tokens; the model takes 1 to {most}")
        vocab_size = cfg.size("source_vocab_size" if cfg.model_class.reads_source else "vocab_size")
        if unknown := [token for token in request.ids if not 0 <= token < vocab_size]:
            raise UserError(f"token id {unknown[0]} is not in 0, ..., {vocab_size - 1}")

    def _admit(self) -> None:
        """Starts the pending requests that `scheduler.admit` selects."""
        if not self._queues:
            return
        queued = (request for kind in self._queues for request in self._front(kind))
        front = sorted(queued, key=lambda request: request.number)
        plans = {kind: self._plan(kind) for kind in self._queues}
        chosen = admit(
            [PendingRequest(request.kind, len(request.rows), self._pages_needed(request)) for request in front],
            {kind: lane.vacancy for kind, lane in self._lanes.items()},
            empty={kind: Vacancy(plan.rows, plan.pages - 1, 0) for kind, plan in plans.items()},
            most_lanes=MAX_LANES,
            group=self._group,
        )
        started: dict[Kind, list[list[RequestRow]]] = collections.defaultdict(list)
        for request in [front[index] for index in chosen]:
            self._lane(request.kind).reserve(request.rows)
            started[request.kind].append(request.rows)
            self._queues[request.kind].popleft()
        self._queues = {kind: queue for kind, queue in self._queues.items() if queue}
        for kind, requests in started.items():
            self._lanes[kind].start(requests)

    def _front(self, kind: Kind) -> list[_QueuedRequest]:
        """Returns the first pending requests of a kind, at most as many as a lane has rows."""
        return list(itertools.islice(self._queues.get(kind, ()), self.max_rows))

    def _pages_needed(self, request: _QueuedRequest) -> int:
        """Returns the maximum number of free pages that a request takes."""
        lane = self._lanes.get(request.kind)
        return _max_pages(request.rows) if lane is None else lane.pages_needed(request.rows)

    def _queue_request(self, number: int, request: Request) -> "_QueuedRequest":
        """Builds the rows of a request.

        Raises:
            UserError: the request can never be served.
        """
        self._check(request)
        self._finish.check(request.decode)
        tokens, decode = list(request.ids), request.decode
        translates = self._cfg.model.model_class.reads_source
        known, text = self._tokenizers.placeholders, request.text
        segment = take_out(text, known) if decode.markup == "align" else None
        text = text if segment is None else segment.plain
        masked = mask(known if translates else NO_PLACEHOLDERS, text)
        start, tags = self._tokenizers.target.special.start_target(request.tags)
        prompt, source = ([start], tokens) if translates else (tokens, None)
        limit = self._limit(decode, len(prompt))
        expected = min(expected_tokens(self._cfg.model, decode, len(prompt)), limit)
        kind, first = self._kind(decode), self._first_tokens(decode, tags, masked.originals)
        phrases: TokenConstraints = ()
        if request.constraints:
            phrases, kind = self._constrain(kind, request, masked.originals, limit)
        if decode.prefix and len(first.ids) > limit:
            length = f"decode.prefix={decode.prefix!r} has {len(first.ids)} tokens"
            raise UserError(f"{length}, but only {limit} fit after the prompt: shorten one of them")
        if not isinstance(request.seed, int | np.integer) or not 0 <= request.seed < 2**32:
            raise UserError(f"seed={request.seed!r}: must be an integer from 0 to {2**32 - 1}")
        language = self._languages.of_output(tokens, request.tags) if decode.casing != "keep" else ""
        rows = [
            RequestRow(
                request=number,
                sample=sample,
                decode=decode,
                prompt=prompt,
                source=source,
                max_new_tokens=limit,
                expected=expected,
                reserved=expected if self._grows else limit,
                seeds=(request.seed, request.index + sample),
                stream=self._stream(request),
                first=first,
                num_outputs=request.num_outputs,
                scored=request.scored,
                phrases=phrases,
                masked=masked,
                unfinished=Unfinished(decode, tokens, prompt[0], text, masked.originals, segment, language)
                if needs_finishing(decode)
                else None,
            )
            for sample in range(1 if decode.strategy == "beam" else request.num_outputs)
        ]
        pages = _max_pages(rows)
        if self._pages is not None and pages > self._pages:
            raise UserError(
                f"the request may need {pages} pages of {PAGE_SIZE} tokens, and the engine has {self._pages}: "
                "request fewer new tokens, samples or beams"
            )
        return _QueuedRequest(kind, rows)

    def _constrain(
        self, kind: Kind, request: Request, originals: tuple[str, ...] | None, limit: int
    ) -> tuple[TokenConstraints, Kind]:
        """Returns the phrases of a request, and the kind of its lane, which only requests with phrases use."""
        from tformer_jax.inference.phrases import encode_constraints, with_phrases

        target = self._tokenizers.target
        names = NO_PLACEHOLDERS if originals is None else self._tokenizers.placeholders
        phrases = encode_constraints(request.decode, target, request.constraints, limit, names, originals)
        return phrases, (kind[0], with_phrases(kind[1], phrases, target))

    def _limit(self, decode: DecodeConfig, prompt: int) -> int:
        """Returns the maximum number of new tokens after a prompt of `prompt` tokens."""
        limit = max_new_tokens(self._cfg.model, decode, prompt)
        if decode.max_new_tokens is not None or self._pages is None or self._grows:
            return limit
        tokens = self._pages * PAGE_SIZE
        expected = expected_tokens(self._cfg.model, decode, prompt) * decode.width
        share = min(max(tokens // self.max_rows, prompt + expected), tokens)
        return min(limit, max((share - prompt) // decode.width, 1))

    def _stream(self, request: Request) -> TextStream | TextBuffer:
        """Returns the detokenizer of an output."""
        stop, decoder = request.decode.stop, self._decoder(request.decode, request.ids)
        streamed = request.streamed and not is_withheld(request.decode)
        return TextStream(decoder, stop) if streamed or stop else TextBuffer(decoder)

    def _decoder(self, decode: DecodeConfig, prompt: Sequence[int]) -> Decoder:
        """Returns the decoder of outputs of a prompt with these settings."""
        target = self._tokenizers.target
        key = decode.unknown, self._model.continues and has_text(target, prompt)
        if key not in self._decoders:
            self._decoders[key] = output_decoder(target, key[0], continues=key[1])
        return self._decoders[key]

    def _kind(self, decode: DecodeConfig) -> Kind:
        """Returns the kind of a request with these settings, whatever its prefix."""
        return self._kind_without_prefix(dataclasses.replace(decode, prefix="") if decode.prefix else decode)

    def _make_kind(self, decode: DecodeConfig) -> Kind:
        constraints = Constraints.from_config(decode, self._tokenizers.target)
        names = BEAM_SETTINGS if decode.strategy == "beam" else ("cache_dtype", "lookup_tokens")
        given = {name: getattr(decode, name) for name in names}
        if self._few_shapes and decode.strategy == "beam":
            widths = self._cfg.decode.beams, power_of_two(decode.beams)
            given["beams"] = min(width for width in widths if width >= decode.beams)
        if "lookup_tokens" in given:
            given["lookup_tokens"] = min(decode.lookup_tokens, self._cfg.model.max_length - 1)
        return DecodeConfig(**given, min_new_tokens=min(decode.min_new_tokens, 1)), constraints

    def _make_first_tokens(
        self, decode: DecodeConfig, tags: tuple[int, ...], originals: tuple[str, ...] | None
    ) -> FirstTokens:
        if decode.prefix and originals is not None:
            prefix = mask_target(self._tokenizers.placeholders, decode.prefix, originals)
            decode = dataclasses.replace(decode, prefix=prefix)
        return first_tokens(decode, self._tokenizers.target, continues=self._model.continues, tags=tags)

    def _lane(self, kind: Kind) -> Lane:
        """Returns the lane of a kind; with `MAX_LANES` lanes, a new one replaces the first one without running rows."""
        if kind not in self._lanes:
            if len(self._lanes) == MAX_LANES:
                del self._lanes[next(other for other, lane in self._lanes.items() if not lane.vacancy.running)]
            options = {"few_shapes": self._few_shapes, "grows": self._grows}
            self._lanes[kind] = Lane(self._plan(kind), self._params, **options)
        return self._lanes[kind]

    def _plan(self, kind: Kind) -> Plan:
        """Returns the plan of a lane of this kind."""
        paged = self._pages is not None or not self._cfg.model.model_class.reads_source
        plan = Plan(self._model, *kind, rows=self.max_rows, pages=0, page_size=PAGE_SIZE, paged=paged)
        pages = self._pages or self.max_rows * plan.pages_per_row
        return dataclasses.replace(plan, pages=pages + 1)

    def _advance(self, kind: Kind, lane: Lane, seconds: float) -> list[Event]:
        """Generates tokens in a lane and returns their events; releases rows whose outputs have ended."""
        pending_rows = sum(len(request.rows) for request in self._front(kind))
        wanted = min(self._group, pending_rows) if pending_rows else None
        events = []
        for row, new_tokens in lane.advance(seconds, wanted).items():
            row_events = self._events(lane, row, new_tokens)
            if row_events and row_events[-1].finish:
                lane.release(row)
            events += row_events
        return events

    def _events(self, lane: Lane, row: int, new: NewTokens) -> list[Event]:
        """Returns the events of the new tokens of a row; beam search has events only at its end."""
        running = lane.running[row]
        if lane.plan.decode.strategy != "beam":
            events = [token_event(running, new)]
        else:
            running.generated += len(new.tokens)
            decoder = self._decoder(running.decode, running.prompt)
            events = list(beam_events(running, decoder, *lane.hypotheses(row))) if new.done else []
        output = running.unfinished
        if output is not None:
            for event in events:
                self._collect(output, event)
        if output is not None and is_withheld(output.decode):
            return [event._replace(text="") for event in events]  # `_finish_texts` adds it to the last one
        if running.masked.originals is None:
            return events
        return [event._replace(text=restore(event.text, running.masked.originals)) for event in events]

    def _collect(self, empty: Unfinished, event: Event) -> None:
        output = self._unfinished.setdefault(event[:2], dataclasses.replace(empty, tokens=[]))
        output.text += event.text
        output.tokens += event.ids

    def _finish_texts(self, events: list[Event]) -> list[Event]:
        """Returns the events with the alignments of outputs that have ended, and the texts of withheld ones."""
        ended = [n for n, event in enumerate(events) if event.finish and event[:2] in self._unfinished]
        outputs = [self._unfinished.pop(events[n][:2]) for n in ended]
        for n, output, finished in zip(ended, outputs, self._finish(outputs), strict=True):
            text = finished.text if is_withheld(output.decode) else events[n].text
            events[n] = events[n]._replace(text=text, alignment=finished.alignment, recased=finished.recased)
        return events


def _max_pages(rows: list[RequestRow]) -> int:
    """Returns the number of pages that the rows of a request need if they share none."""
    return sum(-(-row.slots // PAGE_SIZE) for row in rows)
