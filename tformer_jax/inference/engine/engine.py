"""Requests come and go at any time, and every step serves all that run.

Rows of one compiled step are given to requests, and taken back when their output ends; pages of one pool hold their
keys and values. `Engine` is plain Python around `lane`, which is all that is compiled. One thread uses it.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tformer_jax.config import Config, ConfigError, DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.constraints import Rules
from tformer_jax.inference.encoding import encode_one
from tformer_jax.inference.engine.scheduler import Chosen, Lane, Running
from tformer_jax.inference.engine.state import Plan
from tformer_jax.inference.prepared import prepared
from tformer_jax.inference.stopping import TextStream, WholeText, cut
from tformer_jax.parallel.placement import everywhere, mesh_of
from tformer_jax.special_tokens import BOS, EOS, PAD

PAGE_SIZE = 16
"""Tokens of a page."""
LANES = 4
"""So many kinds of decoding (greedy and sampling are one) are kept ready at once."""
REMEMBERED = 256
"""So many settings of requests are looked up instead of worked out."""
SMOOTH = 0.05
"""Seconds of a step, for people who read along."""
BEAM_SETTINGS = ("strategy", "beams", "length_penalty", "length_alpha", "early_stopping", "cache_dtype")
Kind = tuple[DecodeConfig, Rules]


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to translate or to continue."""

    text: str | tuple[int, ...]
    """Or its token ids, as the model reads them: a source is ended by EOS."""
    decode: DecodeConfig
    seed: int = 0
    """Of sampling."""
    place: int = 0
    """Folded into the seed, and counted up from sample to sample: equal texts of a file get different samples."""
    samples: int = 1
    """Outputs wanted: samples, or the best ones of beam search."""
    pieces: bool = True
    """Somebody reads along; otherwise the text of an output comes with its last event, which costs less."""


class _Waiting(NamedTuple):
    """A request that has no row yet."""

    kind: Kind
    rows: list[Running]


class Event(NamedTuple):
    """Something new about one output of a request."""

    request: int
    """What `submit` returned."""
    sample: int
    """0, ..., samples - 1."""
    text: str
    """What follows the texts of earlier events of this output."""
    finish: str | None
    """None while it goes on; `stop`: EOS or a stop text; `length`: no room is left."""
    score: float | None
    """Known at the end: the sum of the chosen tokens' log-probabilities, or beam search's score."""
    tokens: int
    """Generated for this output so far."""


class Engine:
    """Translates or continues texts, many at once.

    Args:
        slots: rows of a step.
        pages: of `PAGE_SIZE` tokens, for each kind of decoding; None: as many as all rows can need. Then translations,
            whose beginnings nobody shares, have their tokens in one piece, which a CPU reads faster.
        seconds: about how long `step` may take: it makes as many tokens as fit, at least one for each output that
            runs. Outputs do not depend on it.
    """

    def __init__(
        self,
        cfg: Config,
        model: Any,
        params: Any,
        tokenizers: Tokenizers,
        *,
        slots: int,
        pages: int | None = None,
        seconds: float = 0.0,
    ):
        self._cfg, self._tokenizers, self._seconds = cfg, tokenizers, seconds
        self._mesh = mesh_of(params)
        with everywhere(self._mesh):
            self._model, self._params = prepared(model, params)
        self._slots, self._pages = slots, pages
        self._lanes: dict[Kind, Lane] = {}
        self._kinds: dict[DecodeConfig, Kind] = {}
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._next = 0

    @property
    def idle(self) -> bool:
        """Nothing waits or runs."""
        return not self._queue and not self.running

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len({running.request for lane in self._lanes.values() for running in lane.running.values()})

    @property
    def pages_used(self) -> int:
        """Pages that running requests hold."""
        return sum(lane.table.used for lane in self._lanes.values())

    @property
    def pages(self) -> int:
        """Pages there are, in all lanes that are ready."""
        return sum(lane.table.pages - 1 for lane in self._lanes.values())

    def check(self, request: Request) -> None:
        """Raises `ConfigError` for a request that can never be served."""
        self._waiting(0, request)

    def submit(self, request: Request) -> int:
        """Queues a request, and returns its number.

        Raises:
            ConfigError: see `check`.
        """
        number = self._next
        self._queue.append(self._waiting(number, request))
        self._next += 1
        return number

    def cancel(self, request: int) -> None:
        """Ends a request at once, wherever it is; no event follows."""
        self._queue = collections.deque(one for one in self._queue if one.rows[0].request != request)
        for lane in self._lanes.values():
            for row in [row for row, running in lane.running.items() if running.request == request]:
                lane.leave(row)

    def step(self) -> list[Event]:
        """Gives free rows to those that wait, then more tokens to all that run: an event for each that has some."""
        with everywhere(self._mesh):
            self._admit()
            lanes = [lane for lane in self._lanes.values() if lane.running]
            return [event for lane in lanes for event in self._advance(lane, self._seconds / len(lanes))]

    def _encode(self, request: Request) -> list[int]:
        """The tokens of a request's text."""
        cfg, most = self._cfg.model, self._cfg.model.max_length - 1
        beams = request.decode.strategy == "beam"
        if request.samples > (request.decode.beams if beams else self._slots):
            limit = f"decode.beams={request.decode.beams}" if beams else f"the engine's {self._slots} rows"
            raise ConfigError(f"{request.samples} outputs are more than {limit}")
        if not isinstance(request.text, str):
            return list(request.text)
        if cfg.family == "seq2seq":
            tokens = encode_one(self._tokenizers.source, request.text, most, "the source")
            if not request.text.strip():
                raise ConfigError("the source is empty: write at least one character")
            return [*tokens, EOS]
        tokens = encode_one(self._tokenizers.target, request.text, most, "the prompt")
        if not tokens:
            raise ConfigError("the prompt is empty: write at least one character")
        return tokens

    def _admit(self) -> None:
        """Requests are taken in order; one that finds no room lets none of its lane pass."""
        full = {kind for kind, lane in self._lanes.items() if not lane.worth_beginning(self.waiting)}
        beginning: dict[Kind, list[list[Running]]] = collections.defaultdict(list)
        left = []
        while self._queue and not full >= self._lanes.keys() > set():
            one = self._queue.popleft()
            if one.kind in full or not self._ready(one.kind) or not self._lanes[one.kind].reserve(one.rows):
                full.add(one.kind)
                left.append(one)
            else:
                beginning[one.kind].append(one.rows)
        self._queue.extendleft(reversed(left))
        for kind, requests in beginning.items():
            self._lanes[kind].begin(requests)

    def _waiting(self, number: int, request: Request) -> "_Waiting":
        """The rows that the request takes.

        Raises:
            ConfigError: it can never be served.
        """
        tokens, decode = self._encode(request), request.decode
        translates = self._cfg.model.family == "seq2seq"
        prompt, source = ([BOS], tokens) if translates else (tokens, None)
        room = min(decode.max_new_tokens, self._cfg.model.max_length - (0 if translates else len(prompt)))
        rows = [
            Running(
                request=number,
                sample=sample,
                decode=decode,
                prompt=prompt,
                source=source,
                room=room,
                seeds=(request.seed, request.place + sample),
                stream=self._stream(request),
                outputs=request.samples,
            )
            for sample in range(1 if decode.strategy == "beam" else request.samples)
        ]
        pages = len(rows) * -(-(len(prompt) + room * decode.width) // PAGE_SIZE)
        if self._pages is not None and pages > self._pages:
            raise ConfigError(
                f"the request may need {pages} pages of {PAGE_SIZE} tokens, and the engine has {self._pages}: "
                "ask for fewer new tokens, samples or beams"
            )
        return _Waiting(self._kind(decode), rows)

    def _stream(self, request: Request) -> TextStream | WholeText:
        """What makes text of the tokens of an output."""
        tokenizer, stop = self._tokenizers.target, request.decode.stop
        return TextStream(tokenizer, stop) if request.pieces or stop else WholeText(tokenizer)

    def _kind(self, decode: DecodeConfig) -> Kind:
        """What a lane is compiled for; greedy and sampling differ by settings of each row only."""
        if decode not in self._kinds:
            if len(self._kinds) == REMEMBERED:
                self._kinds.clear()
            rules = Rules.of(decode, self._tokenizers.target)
            names = BEAM_SETTINGS if decode.strategy == "beam" else ("cache_dtype",)
            given = {name: getattr(decode, name) for name in names}
            self._kinds[decode] = DecodeConfig(**given, min_new_tokens=min(decode.min_new_tokens, 1)), rules
        return self._kinds[decode]

    def _ready(self, kind: Kind) -> bool:
        """Makes a lane for a kind of decoding, in the place of one without rows; False while all have some."""
        if kind in self._lanes:
            return True
        if len(self._lanes) == LANES:
            unused = [other for other, lane in self._lanes.items() if lane.unused]
            if not unused:
                return False
            del self._lanes[unused[0]]
        paged = self._pages is not None or self._cfg.model.family == "decoder_lm"
        plan = Plan(self._model, *kind, rows=self._slots, pages=0, page_size=PAGE_SIZE, paged=paged)
        pages = self._pages or self._slots * plan.pages_a_row
        self._lanes[kind] = Lane(dataclasses.replace(plan, pages=pages + 1), self._params)
        return True

    def _advance(self, lane: Lane, seconds: float) -> list[Event]:
        events = []
        for row, chosen in lane.advance(seconds, self.waiting).items():
            running = lane.running[row]
            if lane.plan.decode.strategy != "beam":
                events.append(_chain_event(running, chosen))
            else:
                running.made += len(chosen.tokens)
                events += self._best(running, *lane.hypotheses(row)) if chosen.done else []
            if events and events[-1].request == running.request and events[-1].finish:
                lane.leave(row)
        return events

    def _best(self, running: Running, tokens: np.ndarray, scores: np.ndarray) -> list[Event]:
        """The outputs of a beam search that is done: int [k, length] and float [k]."""
        events = []
        for sample, (row, score) in enumerate(zip(tokens[: running.outputs], scores, strict=False)):
            ids = row[row != PAD].tolist()
            whole = self._tokenizers.target.decode(ids)
            text = cut(whole, running.decode.stop)
            finish = "stop" if EOS in ids or text != whole else "length"
            events.append(Event(running.request, sample, text, finish, float(score), len(ids)))
        return events


def _chain_event(running: Running, chosen: Chosen) -> Event:
    """The event of what a row chose; what comes after a stop text is dropped."""
    text, stream, before = "", running.stream, running.made
    for token in chosen.tokens:
        text += stream.feed(token)
        running.made += 1
        if stream.done:
            break
    finish = "stop" if stream.done else "length" if chosen.done else None
    if finish:
        text += stream.close()
    score = chosen.scores[running.made - before - 1] if finish else None
    return Event(running.request, running.sample, text, finish, score, running.made)
