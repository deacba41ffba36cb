"""Decodes rows of token ids with a continuous-batching engine."""

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.batching import power_of_two
from tformer_jax.inference.engine import Engine, Request


class Output(NamedTuple):
    """A generated text and its score."""

    text: str
    score: float | None
    """Beam score, or the sum of token log-probabilities if requested; None if not requested, or for a blank text."""


class RowDecoder:
    """Decodes rows of sources (`Seq2Seq`) or prompts (`DecoderLM`) with the settings `cfg.decode`."""

    def __init__(self, cfg: Config, model: nn.Module, params: Any, tokenizers: Tokenizers):
        self._cfg, self._parts = cfg, (model, params, tokenizers)
        self._engine: Engine | None = None

    def __call__(
        self, rows: Sequence[Sequence[int]], place: int, *, seed: int = 0, outputs: int = 1, scores: bool = False
    ) -> list[list[Output]]:
        """Returns `outputs` outputs of each row, best first for beam search; those of an empty row are empty.

        `place` is the index of the first row among all inputs: samples depend on it, but not on batching. Longer rows
        are submitted first, so that rows of similar length are read together and short rows fill the last free slots.
        """
        order = sorted((number for number, row in enumerate(rows) if row), key=lambda n: len(rows[n]), reverse=True)
        engine = self._fitting(len(order), outputs, math.inf)
        requests = {}
        for n in order:
            at = (place + n) * outputs
            request = Request(tuple(rows[n]), self._cfg.decode, seed, at, outputs, pieces=False, scored=scores)
            requests[engine.submit(request)] = n
        texts: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
        found: list[list[Output]] = [[Output("", None)] * outputs for _ in rows]
        while not engine.idle:
            for event in engine.step():
                key = requests[event.request], event.sample
                texts[key].append(event.text)
                if event.finish:
                    found[key[0]][key[1]] = Output("".join(texts.pop(key)), event.score)
        return found

    def pieces(self, row: Sequence[int], *, seed: int = 0) -> Iterator[str]:
        """Yields the output of one row in pieces; decodes only as far as the pieces are consumed."""
        engine = self._fitting(1, 1)
        number = engine.submit(Request(tuple(row), self._cfg.decode, seed))
        try:
            while not engine.idle:
                yield from (event.text for event in engine.step() if event.text)
        finally:
            engine.cancel(number)

    def _fitting(self, rows: int, outputs: int, seconds: float = 0.0) -> Engine:
        """Returns the engine; the first call creates it, with at most `eval.batch_size` or `outputs` slots."""
        if self._engine is None:
            needed = rows if self._cfg.decode.strategy == "beam" else rows * outputs
            slots = max(min(self._cfg.eval.batch_size, power_of_two(needed)), outputs)
            self._engine = Engine(self._cfg, *self._parts, slots=slots, seconds=seconds)
        return self._engine
