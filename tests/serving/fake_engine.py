"""A small engine with the real one's interface: each output is the text backwards, one letter per step.

python -m tests.serving.fake_engine --port 0 --family seq2seq serves it.
"""

import argparse
import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.cli import serve
from tformer_jax.config import DecodeConfig
from tformer_jax.data.chat.template import PLAIN
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.chats import with_chat
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.inference.engine import Event, Request
from tformer_jax.inference.risk import Utility
from tformer_jax.inference.scores import Row as ScoredRow
from tformer_jax.inference.scores import Scored
from tformer_jax.serving import server
from tformer_jax.serving.model import ServedModel
from tformer_jax.special_tokens import IGNORED

LONGEST = 2000
BYTES = ByteTokenizer()
LABELS = "short", "long", "other"


def expected(request: Request, sample: int = 0) -> tuple[str, str]:
    """Returns an output and its finish reason; samples after the first, and seeds, change its first characters."""
    mark = str((request.seed + request.index) % 7) if request.decode.strategy == "sample" else ""
    text = mark + (str(sample) if sample else "") + BYTES.decode(request.ids)[::-1]
    ends = [text.find(stop) for stop in request.decode.stop if stop in text]
    text = text[: min(ends)] if ends else text
    room = request.decode.max_new_tokens or LONGEST
    return (text[:room], "length") if len(text) > room else (text, "stop")


class Row:
    """An output in progress."""

    def __init__(self, number: int, sample: int, request: Request) -> None:
        self.number, self.sample, self.tokens = number, sample, 0
        self.text, self.finish = expected(request, sample)
        words = range(len(self.text.split()))
        self.alignment = tuple(zip(words, reversed(words), strict=True)) if request.decode.alignments else None

    def step(self) -> Event:
        """Returns the next letter; the finish reason comes with the last one."""
        new = self.text[self.tokens : self.tokens + 1]
        self.tokens += 1
        done = self.tokens >= len(self.text)
        finish = self.finish if done else None
        event = Event(self.number, self.sample, new, finish, None, self.tokens, tuple(BYTES.encode(new)))
        return event._replace(alignment=self.alignment) if done else event


class FakeEngine:
    """Slots are rows, and each row holds one page. Only one thread may call it.

    The text `explode` makes a step fail, `odd` a submission.
    """

    def __init__(self, *, max_rows: int = 4, delay: float = 0.0, decode: DecodeConfig | None = None) -> None:
        self.max_rows, self.pages, self.delay = max_rows, max_rows, delay
        self.decode = decode or DecodeConfig()
        self.score: float | None = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.canceled: list[int] = []
        self.seen: list[Request] = []
        self._queue: collections.deque[tuple[int, Request]] = collections.deque()
        self._rows: list[Row] = []
        self._owner: int | None = None

    @property
    def idle(self) -> bool:
        self._own()
        return not self._queue and not self._rows

    @property
    def pending(self) -> int:
        self._own()
        return len(self._queue)

    @property
    def running(self) -> int:
        self._own()
        return len({row.number for row in self._rows})

    @property
    def pages_used(self) -> int:
        self._own()
        return len(self._rows)

    def check(self, request: Request) -> None:
        if request.num_outputs > self.max_rows:
            raise UserError(f"{request.num_outputs} outputs need more than {self.max_rows} rows")

    def submit(self, request: Request) -> int:
        self._own()
        self.check(request)
        if BYTES.decode(request.ids) == "odd":
            raise ZeroDivisionError
        self.seen.append(request)
        self._queue.append((len(self.seen), request))
        return len(self.seen)

    def cancel(self, request: int) -> None:
        self._own()
        if any(row.number == request for row in self._rows) or any(number == request for number, _ in self._queue):
            self.canceled.append(request)
        self._rows = [row for row in self._rows if row.number != request]
        self._queue = collections.deque(each for each in self._queue if each[0] != request)

    def step(self) -> list[Event]:
        self._own()
        self.gate.wait()
        time.sleep(self.delay)
        while self._queue and len(self._rows) + self._queue[0][1].num_outputs <= self.max_rows:
            number, request = self._queue.popleft()
            if BYTES.decode(request.ids) == "explode":
                raise RuntimeError("out of memory\nand a stack")
            self._rows += [Row(number, sample, request) for sample in range(request.num_outputs)]
        events = [self._scored(row.step()) for row in self._rows]
        self._rows = [row for row, event in zip(self._rows, events, strict=True) if event.finish is None]
        return events

    def _scored(self, event: Event) -> Event:
        if event.finish is None or self.score is None:
            return event
        return event._replace(score=self.score - 0.25 * event.sample)

    def _own(self) -> None:
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), "two threads call the engine"


def served(engine: FakeEngine, family: str) -> ServedModel:
    """Returns the fake model: a log-probability of -1 for each token, and -2 for the next id; lengths as embeddings."""

    def score(rows: Sequence[ScoredRow], top: int) -> list[Scored]:
        labels = [[label for label in row.labels if label != IGNORED] for row in rows]
        best = [[{i: -1.0, i + 1: -2.0} if top > 1 else {i: -1.0} for i in row] for row in labels]
        return [Scored(row, [-1.0] * len(row), actual) for row, actual in zip(labels, best, strict=True)]

    def embed(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.array([len(row), 0.5], np.float32) for row in rows]

    def classify(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.array([1, len(row), 1], np.float32) / (len(row) + 2) for row in rows]

    def attention(text: str, output: str) -> str:
        if not text:
            raise UserError("the text is empty: write at least one character")
        return f"<!doctype html><title>Attention</title><p>{text} to {output}</p>"

    parts = "fake", family, engine.decode, Tokenizers(BYTES, BYTES), LONGEST + 1, False
    options = {"labels": LABELS if family == "classifier" else (), "attention": attention, "about": about(family)}
    return ServedModel(
        *parts, score=score, embed=embed, classify=classify, utility=Utility(engine.decode.utility), **options
    )


def about(family: str) -> dict[str, Any]:
    """Returns what `cli.run_description.describe_run` does for a trained run."""
    reference = "short" if family == "classifier" else "cba"
    return {
        "languages": ("en", "zh_Hant") if family == "seq2seq" else None,
        "labels": LABELS if family == "classifier" else None,
        "facts": ["1.05 M parameters", "2 layers"],
        "split": "test",
        "metrics": [{"title": "BLEU", "value": "31.42", "signature": "nrefs:1"}],
        "examples": [{"text": "abc", "reference": reference}, {"text": "a longer text\n" * 9, "reference": "cba"}],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Builds the server of scripts/serve.py around a fake engine."""
    parser = argparse.ArgumentParser(parents=[serve.parser()], add_help=False, conflict_handler="resolve")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--family", default="decoder_lm")
    parser.add_argument("--delay", type=float, default=0.001)
    parser.add_argument("--no-attention", metavar="REASON")
    parser.add_argument("--chat", action="store_true")
    options = parser.parse_args(argv)
    engine = FakeEngine(max_rows=options.max_rows or serve.ROWS, delay=options.delay)
    with server.listen(options.host, options.port) as bound:
        model = served(engine, options.family)
        if options.no_attention:
            model = dataclasses.replace(model, attention=options.no_attention)
        if options.chat:
            model = dataclasses.replace(model, tokenizers=Tokenizers(*[with_chat(BYTES, PLAIN)] * 2))
        serve.serve_model(engine, model, bound, options)


if __name__ == "__main__":
    from tformer_jax.cli.common import run_main

    run_main(main)
