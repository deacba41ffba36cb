"""Stages of training: which mixture each draw is from, and where one stage ends and the next begins."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer_jax.config import Config
from tformer_jax.config.stages import End, Stage, find_source, read_stages
from tformer_jax.data.columns import PendingExample
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.mixtures import COUNTED, MeanSizes, Shares, direction_shares, mean_sizes, window_tokens
from tformer_jax.data.order import Mixture, Shuffled, shuffled_numbers, shuffled_sources
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms.base import EPOCHS


class DrawSizes(NamedTuple):
    """What one draw from each source adds to batches on average, and how many the source has: float64 [sources]."""

    sizes: np.ndarray
    """Numbers of examples or windows, which temperatures weight."""
    epochs: np.ndarray
    """Number of draws that make an epoch."""
    batches: np.ndarray
    """Part of a batch that a draw fills."""
    tokens: np.ndarray
    by_tokens: bool
    """Whether weights are shares of tokens."""

    @classmethod
    def of_windows(cls, cfg: Config, tokens: Sequence[float] | np.ndarray, length: int) -> "DrawSizes":
        """Returns the sizes of windows with `length` tokens of streams with these numbers of tokens.

        Stages count the tokens of rows, `data.window` each: span corruption reads more in a window.
        """
        streams = np.array(tokens, float)
        ones = np.ones(len(streams))
        return cls(streams, streams / length, ones / cfg.data.batch_size, cfg.data.window * ones, by_tokens=False)


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """A stage with its weights by source."""

    begin: tuple[float, ...]
    end: tuple[float, ...]
    until: End | None
    """None: the last stage."""
    source: int = 0
    """The source of `until`, if it ends with epochs."""
    epoch: float = 1.0
    """Number of draws from that source that make an epoch."""

    def __post_init__(self) -> None:
        shares = [np.array(weights, float) / sum(weights) for weights in (self.begin, self.end)]
        object.__setattr__(self, "begin", tuple(shares[0].tolist()))
        object.__setattr__(self, "end", tuple(shares[1].tolist()))

    @property
    def is_linear(self) -> bool:
        """Whether weights change within the stage."""
        return self.begin != self.end

    @property
    def mean_shares(self) -> np.ndarray:
        """Share of each source in the draws of the stage: float64 [sources]."""
        return (np.array(self.begin) + np.array(self.end)) / 2

    @property
    def needed(self) -> int:
        """Number of draws from `source` with which it ends, if it ends with epochs."""
        assert self.until is not None
        return max(round(self.until.number * self.epoch), 1)

    def length(self, step: float, draw: DrawSizes) -> float:
        """Returns the number of draws of the stage if it begins after `step`, exact for epochs and windows."""
        if self.until is None:
            return np.inf
        if self.until.unit == "epochs":
            return self.needed / self.mean_shares[self.source]
        by_step = self.until.unit == "step"
        wanted, sizes = (self.until.number - step, draw.batches) if by_step else (self.until.number, draw.tokens)
        return max(wanted / (self.mean_shares @ sizes), 1.0)


class Begun(NamedTuple):
    """Where a stage began."""

    draw: int
    """Number of draws before."""
    step: int
    """Number of batches that were made before its first example was drawn."""
    tokens: int
    """Number of tokens in these batches."""


class StagedOrder:
    """The order of examples over stages, with the state of the one iterator that reads it.

    A stage that ends at a step, or after a number of tokens, ends with a block of examples: the last block drawn when
    the batch that reaches the end is made. A stage that ends with epochs ends with their last draw. Because the next
    stage begins only then, blocks beyond the end, which workers may read ahead of time, are read again.

    Args:
        stages: all stages.
        sources: the order of each source, which goes on from stage to stage.
        block_size: number of examples in a block.
        draw: sizes of draws.
        numbered: whether the epochs of stage n are numbered from n * `EPOCHS`.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        sources: Sequence[Shuffled],
        block_size: int,
        draw: DrawSizes,
        *,
        numbered: bool = False,
    ):
        self._stages, self._sources, self._block_size, self._draw = stages, sources, block_size, draw
        self._epochs = EPOCHS * sources[0].total if numbered else 0
        self._step = self._tokens = 0
        self.begun: list[Begun] = []
        """The stages that have begun."""
        self.set_state({"begun": [(0, 0, 0)], "step": 0, "tokens": 0})

    def count_batch(self, tokens: int) -> None:
        """Counts a batch and its tokens."""
        self._step += 1
        self._tokens += tokens

    def count_examples(self, examples: Iterable[PendingExample]) -> None:
        """Counts a global batch of examples."""
        lengths = (example.lengths for example in examples)
        self.count_batch(sum(sizes[key] for sizes in lengths for key in COUNTED if key in sizes))

    def count_and_return(self, tokens: int, batch: Any) -> Any:
        """Counts a batch and its tokens, and returns it."""
        self.count_batch(tokens)
        return batch

    def number_block(self, size: int, number: int) -> np.ndarray:
        """As `order.Order.number_block`."""
        ends = [begun.draw for begun in self.begun[1:]] + [(number + 1) * size]
        result = []
        parts = zip(self.begun, ends, self._mixtures, self._before, strict=True)
        for stage, (begun, end, mixture, before) in enumerate(parts):
            start, stop = max(number * size, begun.draw), min((number + 1) * size, end)
            if start < stop:
                sources, earlier = mixture.draws(start - begun.draw, stop - begun.draw)
                numbers = shuffled_numbers(self._sources, sources, before[sources] + earlier)
                result.append(numbers + stage * self._epochs)
        return np.concatenate(result)

    def advance(self, number: int) -> bool:
        """Begins the stages whose first example is in block `number`; returns whether there are any."""
        before = len(self.begun)
        while (draw := self._end_before(number)) is not None:
            self._begin(Begun(draw, self._step, self._tokens))
        return len(self.begun) > before

    def _end_before(self, number: int) -> int | None:
        """Returns the number of draws with which the stage ends; None if it goes on after block `number`."""
        stage, begun, mixture = self._stages[len(self.begun) - 1], self.begun[-1], self._mixtures[-1]
        start = max(number * self._block_size, begun.draw)
        if stage.until is None:
            return None
        if stage.until.unit == "epochs":
            draw = begun.draw + mixture.draws_until(stage.source, stage.needed)
            return draw if draw < (number + 1) * self._block_size else None
        done = self._step if stage.until.unit == "step" else self._tokens - begun.tokens
        return start if done >= stage.until.number else None

    def _begin(self, begun: Begun) -> None:
        stage = self._stages[len(self.begun)]
        if self.begun:
            drawn = self._mixtures[-1].counts(begun.draw - self.begun[-1].draw)
            self._before.append(self._before[-1] + drawn)
        self.begun.append(begun)
        linear = Mixture.linear(stage.begin, stage.end, stage.length(begun.step, self._draw))
        self._mixtures.append(linear if stage.is_linear else Mixture.constant(stage.begin))

    def get_state(self) -> dict[str, Any]:
        """Returns which stages have begun, and what the batches so far hold."""
        return {"begun": list(self.begun), "step": self._step, "tokens": self._tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after `get_state`."""
        self._step, self._tokens = state["step"], state["tokens"]
        self.begun = []
        self._mixtures: list[Mixture] = []
        self._before = [np.zeros(len(self._sources), np.int64)]
        for place in state["begun"]:
            self._begin(Begun(*place))


def stages_begun(state: Any) -> list[Begun]:
    """Returns the stages that have begun, given the state of an iterator of batches; [] if there are none."""
    while state and "stages" not in state:
        state = state.get("parent")
    return [Begun(*place) for place in state["stages"]["begun"]] if state else []


def example_stages(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, block: int) -> StagedOrder:
    """Returns the order of a corpus whose examples are assigned to batches whole.

    Args:
        block: number of examples that are read together.

    Raises:
        UserError: see `plan_stages`.
    """
    draw = _example_draws(cfg, corpus, mean_sizes(cfg, corpus, tokenizers))
    return staged_order(cfg, list(corpus.directions or cfg.data.train), corpus.sizes, draw, block)


def plan_stages(cfg: Config, names: Sequence[str], draw: DrawSizes) -> list[PlannedStage]:
    """Returns the stages of a config for sources with these names.

    Raises:
        UserError: a stage names an unknown source, ends with epochs of a source that it does not draw, or probably ends
            before it begins.
    """
    planned: list[PlannedStage] = []
    step = 0.0
    for number, stage in enumerate(read_stages(cfg.data)):
        try:
            planned.append(_plan(stage, names, draw, planned[-1].end if planned else ()))
            if not (planned[-1].mean_shares @ draw.batches):
                raise ValueError("all of its examples that were read are blank or too long for their row")
            if stage.end and stage.end.unit == "step" and stage.end.number <= step:
                raise ValueError(f"it ends before it begins, after about step {step:,.0f}")
        except ValueError as error:
            raise cfg.data.error("stages", f"stage {number + 1}, {stage.text!r}: {error}") from None
        step += planned[-1].length(step, draw) * float(planned[-1].mean_shares @ draw.batches)
    return planned


def _plan(stage: Stage, names: Sequence[str], draw: DrawSizes, previous: tuple[float, ...]) -> PlannedStage:
    begin, end = np.zeros(len(names)), np.zeros(len(names))
    for weight in stage.weights:
        if stage.by_temperature:
            begin, end = (direction_shares(draw.sizes.tolist(), temperature) for temperature in weight[1:])
        else:
            place = find_source(weight.name, names)
            begin[place], end[place] = weight.begin, weight.end
    if draw.by_tokens:
        for name, weight, tokens in zip(names, begin + end, draw.tokens, strict=True):
            if weight and not tokens:
                raise ValueError(f"all examples of {name!r} that were read are blank or too long for their row")
        tokens_of_drawn = np.where(draw.tokens > 0, draw.tokens, 1)
        begin, end = begin / tokens_of_drawn, end / tokens_of_drawn
    first = previous if stage.from_previous else tuple(begin.tolist())
    source = find_source(stage.end.source, names) if stage.end and stage.end.source else 0
    planned = PlannedStage(first, tuple(end.tolist()), stage.end, source, float(draw.epochs[source]))
    if stage.end and stage.end.source and not planned.mean_shares[source]:
        raise ValueError(f"it draws nothing from {stage.end.source!r}; write one of its sources")
    return planned


def staged_order(cfg: Config, names: Sequence[str], sizes: Sequence[int], draw: DrawSizes, block: int) -> StagedOrder:
    """Returns the order of the stages of a config.

    Args:
        sizes: numbers of examples or windows of the sources.
        block: number of examples that are read together.

    Raises:
        UserError: see `plan_stages`.
    """
    sources = shuffled_sources(sizes, cfg.seed)
    numbered = any(stage.transforms is not None for stage in read_stages(cfg.data))
    return StagedOrder(plan_stages(cfg, names, draw), sources, block, draw, numbered=numbered)


def summarize_stages(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> tuple[list[dict[str, Any]], Shares]:
    """Returns when each stage is expected and with which shares, and the shares of all stages in training.

    Steps are estimated by the mean sizes of examples, unless a stage ends with one.
    """
    means, names = mean_sizes(cfg, corpus, tokenizers), list(corpus.directions or cfg.data.train)
    draw = _example_draws(cfg, corpus, means)
    if windows := cfg.data.batching == "windows":
        draw = DrawSizes.of_windows(cfg, np.array(corpus.sizes) * means.tokens, window_tokens(cfg, tokenizers))
    step, facts, draws = 0.0, [], np.zeros(len(names))
    for text, stage in zip(cfg.data.stages, plan_stages(cfg, names, draw), strict=True):
        begin, change = np.array(stage.begin), np.array(stage.end) - np.array(stage.begin)
        whole = stage.length(step, draw) * float(stage.mean_shares @ draw.batches)
        done = min(whole, cfg.train.steps - step)
        shares = begin + change * (done / whole) / 2
        draws += done / (shares @ draw.batches) * shares
        ends = {name: list(pair) for name, *pair in zip(names, stage.begin, stage.end, strict=True) if any(pair)}
        to_step = round(step + done) if step < cfg.train.steps else None
        facts.append({"stage": text, "from_step": round(step), "to_step": to_step, "examples": ends})
        step += done
    examples, tokens = draws / (means.tokens if windows else 1), draws * draw.tokens
    return facts, Shares(examples / examples.sum(), tokens / tokens.sum(), draws / draw.epochs)


def _example_draws(cfg: Config, corpus: Corpus, means: MeanSizes) -> DrawSizes:
    sizes = np.array(corpus.sizes, float)
    return DrawSizes(sizes, sizes, means.batches, means.tokens, by_tokens=cfg.data.weight_by == "tokens")
