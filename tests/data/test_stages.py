"""Stages: each draw is from the mixture of its stage, exactly, and a restored iterator continues in any of them."""

import json
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_mixtures import mixed
from tests.data.test_pipeline import assert_restored_exactly, assert_same, assert_shards_of, setup, take
from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.config.stages import End, read_stages
from tformer_jax.data.columns import jsonable
from tformer_jax.data.corpora import Corpus, Joined
from tformer_jax.data.order import Mixture, shuffled_sources
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.rows import Shards
from tformer_jax.data.stages import DrawSizes, PlannedStage, StagedOrder, stages_begun

ROOT = Path(__file__).resolve().parents[2]


def due(begin: float, end: float, length: float, draw: int) -> float:
    """Bisects for the number of draws at which the integral of a share reaches `draw` + 1/2."""

    def share(draws: float) -> float:
        inside = min(draws, length)
        return begin * inside + (end - begin) * inside * inside / (2 * length) + end * (draws - inside)

    low, high = 0.0, 1e5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) >= draw + 0.5 else (middle, high)
    return high


def oracle(begin: tuple[float, ...], end: tuple[float, ...], length: float, draws: int) -> list[tuple[int, int]]:
    """Returns the source of each draw and its number there."""
    shares = [(a / sum(begin), b / sum(end)) for a, b in zip(begin, end, strict=True)]
    drawn = [
        (round(due(*share, length, number), 6), source, number)
        for source, share in enumerate(shares)
        for number in range(draws)
        if share[1] or number + 0.5 < share[0] * length / 2
    ]
    return [(source, number) for _, source, number in sorted(drawn)[:draws]]


@pytest.mark.parametrize(
    ("begin", "end", "length"), [((3, 1, 2), (3, 1, 2), 40), ((4, 1), (1, 6), 41), ((1, 0, 2), (0, 1, 2), 25)]
)
def test_draws_are_those_of_the_formula(begin, end, length):
    mixture = Mixture.linear(begin, end, length)
    expected = oracle(begin, end, length, 60)
    whole = list(zip(*(part.tolist() for part in mixture.draws(0, 60)), strict=True))
    assert whole == expected
    for start in range(0, 60, 7):
        assert list(zip(*(part.tolist() for part in mixture.draws(start, 60)), strict=True)) == expected[start:]
        counts = np.bincount([source for source, _ in expected[:start]], minlength=len(begin))
        np.testing.assert_array_equal(mixture.counts(start), counts)
        source, number = expected[start]
        assert mixture.draws_until(source, number + 1) == start + 1


def test_linear_draws_have_the_integral_of_their_shares():
    mixture = Mixture.linear((5, 1, 0), (0, 1, 3), 100_000)
    begin, end = np.array([5, 1, 0]) / 6, np.array([0, 1, 3]) / 4
    for draws in (1, 999, 50_000, 100_000):
        expected = begin * draws + (end - begin) * draws**2 / 200_000
        assert abs(mixture.counts(draws) - expected).max() <= 1


SIZES = (7, 5, 11)
TOKENS = (3, 5, 4)
BLOCK = 4
STAGES = (
    PlannedStage((1, 0, 0), (1, 0, 0), End("epochs", 1.5), 0, 7),
    PlannedStage((1, 0, 0), (1, 2, 3), End("step", 40)),
    PlannedStage((1, 2, 3), (1, 2, 3), End("tokens", 100)),
    PlannedStage((0, 1, 3), (0, 1, 0), End("epochs", 4), 2, 11),
    PlannedStage((1, 1, 1), (1, 1, 1), None),
)


def staged() -> StagedOrder:
    draw = DrawSizes(np.array(SIZES), np.array(SIZES), np.full(3, 1 / BLOCK), np.array(TOKENS), by_tokens=False)
    return StagedOrder(STAGES, shuffled_sources(SIZES, 3), BLOCK, draw)


def read_block(order: StagedOrder, number: int) -> list[int]:
    """Reads a block as `LoadedBlocks` does, and counts it as a batch; returns its numbers."""
    order.advance(number)
    numbers = order.number_block(BLOCK, number).tolist()
    order.count_batch(sum(TOKENS[source_of(each)] for each in numbers))
    return numbers


def source_of(number: int) -> int:
    return int(np.searchsorted(np.cumsum(SIZES), number % sum(SIZES), "right"))


def replayed(blocks: int) -> tuple[list[int], list[int]]:
    """Replays the stages draw by draw, in plain Python; returns the source of each draw, and where stages begin."""
    drawn, begins, stage, counts, step, tokens, pending = [], [0], 0, [0, 0, 0], 0, 0, []
    for _ in range(blocks):
        for _ in range(BLOCK):
            until, inside = STAGES[stage].until, len(drawn) % BLOCK
            if until and {
                "step": not inside and step >= until.number,
                "tokens": not inside and tokens >= until.number,
                "epochs": counts[STAGES[stage].source] == round(until.number * STAGES[stage].epoch),
            }.get(until.unit):
                stage, counts, tokens, pending = stage + 1, [0, 0, 0], 0, []
                begins.append(len(drawn))
            if not pending:
                lengths = {1: (40 - step) * BLOCK, 3: 4 * 11 / ((3 / 4 + 0) / 2)}
                pending = oracle(STAGES[stage].begin, STAGES[stage].end, lengths.get(stage, 1), 150)
            source, _ = pending.pop(0)
            counts[source] += 1
            drawn.append(source)
        step, tokens = step + 1, tokens + sum(TOKENS[source] for source in drawn[-BLOCK:])
    return drawn, begins


def test_stages_are_those_of_a_replay():
    order = staged()
    numbers = [each for number in range(90) for each in read_block(order, number)]
    sources, begins = replayed(90)
    assert [source_of(number) for number in numbers] == sources
    assert [begun.draw for begun in order.begun] == begins
    assert [begun.step for begun in order.begun] == [begin // BLOCK for begin in begins]


def test_sources_go_on_where_the_last_stage_left_them():
    order = staged()
    numbers = [each for number in range(90) for each in read_block(order, number)]
    for source, size in enumerate(SIZES):
        own = [number for number in numbers if source_of(number) == source]
        epochs = [number // sum(SIZES) for number in own]
        assert epochs == sorted(epochs)
        assert all(len(set(own[start : start + size])) == size for start in range(0, len(own) - size, size))


CHANGING = (
    "long until step 3",
    "long 3 to 1, short 0 to 2 until step 7",
    "linearly to short for 1200 tokens",
    "temperature 3 for 0.02 epochs of short",
    "long 2, short",
)
MASKED = ("a until step 3", "a 3 to 1, b 0 to 2 until step 7", "linearly to b for 90 tokens", "a")
KINDS = {
    "pairs in buckets": {},
    "pairs packed": {},
    "documents packed and split": {},
    "windows": {"batching": "windows", "window": 30, "batch_size": 8},
    "masked tokens": {},
}


def staged_data(kind: str, stages=CHANGING, **changes):
    """Returns the arguments of `train_batches` for a kind of batches in stages."""
    if kind == "masked tokens":
        files = {"train": ("a.tsv", "b.tsv"), "batch_size": 4, "weights": ()}
        return setup("a mixture of masked tokens", stages=MASKED, **files, **changes)
    changes = {"weights": (), "weight_by": "examples", "stages": stages} | KINDS[kind] | changes
    return mixed("documents packed and split" if kind == "windows" else kind, **changes)


def begun(batches) -> list[list[int]]:
    """Returns where stages began: numbers of draws, batches and tokens."""
    return jsonable(stages_begun(batches.get_state()))


@pytest.mark.long
@pytest.mark.parametrize("kind", rest_slow([*KINDS], 2))
def test_restored_in_any_stage_it_continues_with_the_very_next_batch(kind):
    assert_restored_exactly(staged_data(kind), batches=24, points=8)


@pytest.mark.long
@pytest.mark.parametrize("kind", rest_slow([*KINDS], 2))
def test_processes_have_the_same_global_batches(kind):
    arguments = staged_data(kind)
    batches = train_batches(*arguments)
    whole = take(batches, 24)
    assert_shards_of(arguments, whole)
    for shard in range(4 if kind == "windows" else 0):
        part = train_batches(*arguments, shards=Shards(4, (shard,)))
        for own, batch in zip(take(part, 24), whole, strict=True):
            np.testing.assert_array_equal(own["targets"], np.split(batch["targets"], 4)[shard])
    assert len(begun(batches)) == len(arguments[0].data.stages)


def test_windows_change_exactly_at_a_step():
    """Texts of "a" until step 3, then both, then texts of "b" alone."""
    cfg, corpus, tokenizers = staged_data("windows", ("long until step 3", "long, short until step 5", "short"))
    a, b = tokenizers.target.encode("ab")
    seen = [
        ((batch["tokens"] == a).any(), (batch["tokens"] == b).any())
        for batch in take(train_batches(cfg, corpus, tokenizers), 8)
    ]
    assert seen == [(True, False)] * 3 + [(True, True)] * 2 + [(False, True)] * 3


def test_one_stage_is_a_mixture_by_weights():
    weighted = mixed("pairs in buckets", weights=(3, 1))
    stage = mixed("pairs in buckets", weights=(), stages="long 3, short 1")
    expected = take(train_batches(*weighted), 20)
    assert_same(take(train_batches(*stage), 20), expected)
    assert "stages" not in json.dumps(jsonable(train_batches(*weighted).get_state()))


@pytest.mark.parametrize(("weights", "counts"), [((1, 1, 2), (1, 1, 2)), ((0.2, 0.6), (1, 3)), ((5, 1, 5), (5, 1, 5))])
def test_draws_by_weights_are_those_of_fractions(weights, counts):
    """Draw i of a source that is drawn n times stands at (i + 1/2) / n, the first of equals first."""
    places = sorted((Fraction(2 * i + 1, 2 * n), source, i) for source, n in enumerate(counts) for i in range(99 * n))
    actual = zip(*(part.tolist() for part in Mixture.constant(weights).draws(0, 200)), strict=True)
    assert list(actual) == [place[1:] for place in places[:200]]


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (("lnog until step 9", "short"), r"stage 1, 'lnog until step 9': unknown source 'lnog'; did you mean 'long'\?"),
        (("long for 1 epoch of shrot", "short"), r"unknown source 'shrot'; did you mean 'short'\?"),
        (("long until step 9", "short until step 9", "long"), "stage 2, .*: it ends before it begins, after step 9"),
        (("long until step 2.5", "short"), "the number of step is 2.5: write a whole number above 0"),
        (("long for 500 tokens", "short"), "a batch has up to 512 tokens; write at least as many"),
        (("long 0, short until step 9", "long"), "'long' has weight 0: leave it out, or write 'to' another weight"),
        (("long 0 to 1 until step 9", "long"), "all weights are 0 at the beginning or at the end: write one above 0"),
        (("long", "short"), "only the last stage has no end: write 'until step'"),
        (("long until step 9",), "the last stage lasts until train.steps: leave out its end"),
        (("long until step 9", "linearly to short"), "the last stage has no end, so that its weights cannot change"),
        (("linearly to long until step 9", "short"), "there is no previous stage; write the weights at the beginning"),
        (("long for 2 epochs of short", "short"), "it draws nothing from 'short'; write one of its sources"),
        (("long, long until step 9", "short"), "'long' occurs twice: write it once"),
        (("temperature 0.5 until step 9", "short"), "a temperature is at least 1 and stands alone"),
        (("long until step soon", "short"), "'soon' is no number: write a mixture such as"),
        (("long, until step 9", "short"), "a weight has no source|unknown source"),
    ],
)
def test_stages_that_make_no_sense(stages, sentence):
    with pytest.raises(UserError, match=rf"data.stages=.*{sentence}"):
        staged_data("pairs in buckets", stages)


def test_stages_replace_weights_and_need_validation_data():
    with pytest.raises(UserError, match="have their weights and temperatures; leave out data.weights, temperature"):
        mixed("pairs in buckets", stages="long")
    with pytest.raises(UserError, match=r"data.stages=\('long',\): requires data.validation"):
        DataConfig(source="tsv", train="long.tsv", stages="long")
    assert Config.resume_effect("data.stages") is None


def test_a_stage_that_probably_ends_before_it_begins_is_refused():
    stages = ("long for 3 epochs of long", "short until step 5", "long")
    with pytest.raises(
        UserError, match=r"stage 2, 'short until step 5': it ends before it begins, after about step \d"
    ):
        train_batches(*staged_data("pairs in buckets", stages))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs in buckets", "windows"])
def test_loader_processes_read_the_same_batches(kind):
    whole, loaded = (train_batches(*staged_data(kind, workers=workers)) for workers in (0, 2))
    assert_same(take(loaded, 24), take(whole, 24))
    assert begun(loaded) == begun(whole)
    loaded.close()


UPPER = {"kind": "case", "probability": 1.0}


@pytest.mark.slow
def test_a_stage_names_its_transforms():
    """Upper case in the first stage, none in the second, all in the last; resumes and processes are exact."""
    stages = ("long with case until step 3", "long, short without transforms until step 7", "short")
    arguments = staged_data("pairs in buckets", stages, transforms=(UPPER,))
    batches = train_batches(*arguments)
    whole = take(batches, 40)
    decode = arguments[2].target.decode
    texts = [decode(row) for batch in whole for row in batch["source"]]
    assert {letter for text in texts for letter in text} == set("AabB")
    assert not any({"A", "a"} <= {*text} for text in texts)
    assert {*texts[-1]} == {"B"}
    assert_restored_exactly(arguments, batches=12, points=6)
    assert_shards_of(arguments, whole[:12])
    plain = take(
        train_batches(
            *staged_data("pairs in buckets", tuple(re.sub(" with.*s?(?= until)", "", stage) for stage in stages))
        ),
        40,
    )
    assert [decode(row).lower() for batch in plain for row in batch["source"]] == [text.lower() for text in texts]


@pytest.mark.parametrize(
    ("stages", "transforms", "sentence"),
    [
        (("long with cose until step 9", "short"), (UPPER,), r"data.transforms has no 'cose'; did you mean 'case'\?"),
        (("long without transforms until step 9", "short"), (), "data.transforms is empty: list the transforms"),
        (("long with case, short for 1 epoch of short", "short"), (UPPER,), "data.transforms has no 'short'"),
    ],
)
def test_unknown_transforms_of_a_stage(stages, transforms, sentence):
    with pytest.raises(UserError, match=sentence):
        staged_data("pairs in buckets", stages, transforms=transforms)


def test_the_example_of_the_readme_is_a_config():
    readme = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"### Stages\n.*?```python\n(.*?)```", readme, re.DOTALL)
    names = {"DataConfig": DataConfig}
    exec(example, names)
    assert [stage.end for stage in read_stages(names["data"])] == [End("step", 20_000), End("step", 30_000), None]


@pytest.mark.parametrize("weight_by", ["examples", "tokens"])
def test_a_stage_without_examples_for_batches_is_refused(weight_by):
    """Pairs of 90 tokens fit no bucket."""
    cfg, _, tokenizers = staged_data("pairs in buckets", ("long until step 9", "short"), weight_by=weight_by)
    train = Joined([[{"source": "a" * 90, "target": "a"}], [{"source": "b", "target": "b"}]])
    with pytest.raises(UserError, match="stage 1, 'long until step 9': all .* that were read are blank or"):
        train_batches(cfg, Corpus(train, [], []), tokenizers)


def test_a_linear_stage_ends_when_its_tokens_are_counted():
    """Rows of 512 tokens with corrupted spans are made of 568 tokens of texts; stages count those of rows."""
    cfg = DataConfig(source="stdlib_text", batching="windows", window=512, batch_size=4)
    model = ModelConfig(family="decoder_lm", max_length=512)
    draw = DrawSizes.of_windows(Config(model=model, data=cfg), [1e6, 1e6], 568)
    assert PlannedStage((1, 0), (0, 1), End("tokens", 512 * 1000)).length(0, draw) == 1000
    np.testing.assert_array_equal(draw.epochs, 1e6 / 568)
