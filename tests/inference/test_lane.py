"""A lane: the pages of its rows, its compiled functions, and the lengths of its arrays."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import rest_slow
from tests.inference.engines import (
    BEAM,
    GREEDY,
    SAMPLE,
    TEXTS,
    alone,
    encode,
    endless,
    engine,
    finish,
    models,
    plain,
    submit,
)
from tformer_jax.inference.beam import Hypotheses
from tformer_jax.inference.engine import Request, compiled
from tformer_jax.inference.engine import engine as engines
from tformer_jax.inference.engine import lane as lanes
from tformer_jax.inference.engine.scheduler import Vacancy
from tformer_jax.inference.engine.state import State

EMPTY_STATE: Any = State(None, None)


@pytest.fixture
def called(monkeypatch):
    """Replaces the compiled functions; returns the names of those that are called."""
    names = []

    def replace(name, result=EMPTY_STATE):
        monkeypatch.setattr(compiled, name, lambda *_, **options: names.append(name) or result)

    for name in ("empty_state", "resize", "admit", "read_prompts", "finished_hypotheses"):
        replace(name)
    replace("advance", (EMPTY_STATE, (None, 1, None)))
    return names


def lane_and_rows(served, decode, text="abc"):
    """Returns the lane of a request of three outputs, and its rows."""
    queued = served._queue_request(0, Request(encode(text, served._cfg.model.family), decode, num_outputs=3))
    return served._lane(queued.kind), queued.rows


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 32, 33, 34])
def test_samples_read_the_prompt_and_take_the_pages_that_were_promised(length, called):
    """A full page of the prompt is shared, and a partly filled one is copied."""
    lane, rows = lane_and_rows(engine(plain("decoder_lm")), SAMPLE, "a" * length)
    free, promised = lane.table.free_pages, lane.pages_needed(rows)
    lane.reserve(rows)
    assert free - lane.table.free_pages == promised
    leader, *siblings = rows
    contents = {(leader.allocation.pages[slot // 16], slot % 16): slot for slot in range(length - 1)}
    full = (length - 1) // 16
    for row in siblings:
        assert row.allocation.pages[:full] == leader.allocation.pages[:full]
        assert set(row.allocation.pages[full:]).isdisjoint(leader.allocation.pages)
        for page, copy in row.copies:
            contents |= {(copy, slot): contents[page, slot] for slot in range(16) if (page, slot) in contents}
        read = [contents[row.allocation.pages[slot // 16], slot % 16] for slot in range(length - 1)]
        assert read == list(range(length - 1))


SHARING = {"causal": ({}, 1), "prefix LM": ({"prefix_lm": True}, 0), "states": ({"attention": "gated_delta"}, 0)}


@pytest.mark.parametrize(("changes", "shared"), SHARING.values(), ids=SHARING)
def test_prompts_share_the_full_pages_of_a_common_prefix(changes, shared, called):
    """Not where earlier tokens attend to later ones, or where a layer has no pages."""
    served = engine(models("decoder_lm", **changes))
    pages = []
    for last in "ab":
        lane, (row, *_) = lane_and_rows(served, SAMPLE, "abcdefg" * 3 + last)
        lane.reserve([row])
        lane.start([[row]])
        pages.append(set(row.allocation.pages))
    assert len(set.intersection(*pages)) == shared


def test_the_steps_of_a_beam_search_are_counted(called):
    """The arrays grow by this number."""
    served = engine(plain("seq2seq"))
    lane, (row, *_) = lane_and_rows(served, BEAM)
    lane.running[0] = row
    for generated in (2, 4):
        assert served._events(lane, 0, lanes.NewTokens([5, 6], [0.0, 0.0], done=False)) == []
        assert row.generated == generated


@pytest.mark.parametrize("decode", [BEAM, GREEDY])
def test_changed_lengths_keep_the_types_of_the_state(decode):
    """Else the functions that the warm-up has compiled would be compiled once more."""
    lane, _ = lane_and_rows(engine(plain("seq2seq")), decode)
    before = compiled.empty_state.eval_shape(lane.plan, lane._size)
    after = compiled.resize.eval_shape(lane.plan, before, lane._size)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, before)


@pytest.mark.parametrize(
    ("few_shapes", "count", "read"), [(True, 4, [1] * 4), (True, 5, [6]), (False, 4, [4]), (False, 5, [8])]
)
def test_few_prompts_are_read_separately_if_few_shapes_are_compiled(few_shapes, count, read, monkeypatch):
    served = engine(plain("seq2seq"), max_rows=6, few_shapes=few_shapes)
    for text in TEXTS[:count]:
        submit(served, text, GREEDY)
    sizes, admit = [], compiled.admit
    monkeypatch.setattr(compiled, "admit", lambda *given: sizes.append(len(given[-1].indices)) or admit(*given))
    assert [text for text, _ in finish(served).values()] == [
        alone(plain("seq2seq"), text, GREEDY) for text in TEXTS[:count]
    ]
    assert sizes == read


@pytest.mark.parametrize("beams", [2, 5])
def test_the_warm_up_of_beam_search_compiles_the_next_size_of_a_dense_cache(beams, called, monkeypatch):
    """Of two beams, 82 slots hold all 41 tokens, which is less than twice the 57 slots of the start."""
    compiled_sizes, take_steps = [], lanes.Lane._take_steps

    def noted(lane, *inputs):
        compiled_sizes.append(lane._size.slots)
        return take_steps(lane, *inputs)

    monkeypatch.setattr(lanes.Lane, "_take_steps", noted)
    served = engine(plain("seq2seq"))
    served.warm_up(dataclasses.replace(BEAM, beams=beams, max_new_tokens=40))
    (lane,) = served._lanes.values()
    larger = lane._fitted(1, 41, lane._smallest.slots + 1, 0)
    assert compiled_sizes == [lane._smallest.slots, larger.slots]


@pytest.mark.parametrize("pages", [None, 9])
def test_the_warm_up_of_beam_search_compiles_the_functions_that_requests_need(pages, called):
    """No array grows; after the warm-up, all rows and pages are free."""
    served = engine(plain("seq2seq"), pages=pages)
    served.warm_up(BEAM)
    resized = set() if pages else {"resize"}
    assert set(called) == {"empty_state", "admit", "advance", "finished_hypotheses"} | resized
    lane, _ = lane_and_rows(served, BEAM)
    assert lane.vacancy == Vacancy(3, lane.plan.pages - 1, 0)


def test_hypotheses_are_read_from_the_rows_alone(monkeypatch):
    """Once after each call; with the whole state, the arrays of the cache would be arguments, too."""
    read: list[Any] = []
    tokens, scores = np.arange(6).reshape(3, 1, 2), np.arange(3.0)[:, None]
    monkeypatch.setattr(
        compiled, "finished_hypotheses", lambda *given: read.append(given) or Hypotheses(tokens, scores)
    )
    lane, _ = lane_and_rows(engine(plain("decoder_lm")), BEAM)
    vars(lane)["state"] = State("the cache", "the rows")
    assert [lane.hypotheses(row)[0].tolist() for row in (2, 0)] == [[[4, 5]], [[0, 1]]]
    assert read == [("the rows",)]


def test_only_longer_outputs_of_a_paged_beam_search_are_allocated_again(called):
    lane, _ = lane_and_rows(engine(plain("decoder_lm")), BEAM)
    assert lane.state is EMPTY_STATE
    lane._resize(lane._fitted(1, 16, 2 * lane._size.slots, 0))
    assert called == ["empty_state"]
    lane._resize(lane._fitted(1, 17, 1, 0))
    assert called == ["empty_state", "resize"]


def test_outputs_of_language_models_are_allocated_at_their_maximum_length(called):
    lane, rows = lane_and_rows(engine(plain("decoder_lm")), dataclasses.replace(BEAM, max_new_tokens=30))
    lane.reserve(rows)
    lane.start([rows])
    assert lane._size.output == 32


@pytest.mark.parametrize(("used", "slots"), [(1, 40), (40, 40), (41, 80), (80, 80), (81, 123), (200, 123)])
def test_the_slots_of_a_dense_beam_search_follow_its_rows(used, slots, called):
    """Outputs of 16 tokens and 3 beams start with 16 + 3 x 8 slots; 3 x 41 hold everything."""
    lane, _ = lane_and_rows(engine(plain("seq2seq")), BEAM)
    assert lane._fitted(1, 16, used, 0).slots == slots
    lane._size = lane._fitted(1, 16, 1000, 0)
    assert lane._fitted(1, 16, -(-3 * used // 4), 0).slots == slots


@pytest.mark.parametrize("decode", [BEAM, GREEDY])
def test_arrays_are_cut_to_the_running_rows(decode, called, monkeypatch):
    """A source of 35 tokens needs 64 in memory, limited to the model's 40, and one of 2 tokens needs 16."""
    monkeypatch.setattr(lanes, "SHRINK_FACTOR", 2)
    served = engine(plain("seq2seq"))
    lane, (long, *_) = lane_and_rows(served, decode, "abcdefg" * 5)
    _, (short, *_) = lane_and_rows(served, decode, "a")
    long.expected = short.expected = 41
    width = decode.width
    for rows, source, output in (([long], 40, 41), ([long, short], 40, 41), ([short], 16, 16)):
        lane._fit(rows)
        assert (lane._size.source, lane._size.output) == (source, output)
        assert lane._size.slots == output + (8 * 3 if width == 3 else 0)
    lane._smallest = lane._fitted(1, 33, 1, 0)
    lane._fit([long])
    short.generated = 20
    lane._fit([short])
    assert lane._size.output == 41


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "limit", "length"), [("abcdefg" * 3, 33, 32), ("abcdefg" * 3, 9, 16), ("abc", 33, 16)]
)
def test_arrays_of_translations_start_as_long_as_the_source(text, limit, length):
    """Lengths are powers of two from 16; a source has the text's tokens and EOS."""
    served = engine(models("seq2seq"), seconds=0.0)
    submit(served, text, dataclasses.replace(GREEDY, max_new_tokens=limit))
    served.step()
    (lane,) = served._lanes.values()
    assert lane._size.output == length


@pytest.mark.slow
@pytest.mark.parametrize("decode", rest_slow({"beam": BEAM, "greedy": GREEDY}, 1))
def test_outputs_fill_all_slots_of_a_dense_cache(decode):
    """An output of 16 tokens needs 16 slots: BOS and all tokens but the last."""
    trained, _ = endless("seq2seq")
    decode = dataclasses.replace(decode, max_new_tokens=16)
    served = engine(trained)
    number = submit(served, "abc", decode)
    assert finish(served)[number, 0][0] == alone(trained, "abc", decode)
    (lane,) = served._lanes.values()
    assert lane._size.slots == (40 if decode.width == 3 else 16)


@pytest.mark.slow
def test_shared_pages_outlive_long_outputs(monkeypatch):
    """After a long output and a short one, the arrays of outputs could be smaller; the pages must stay."""
    monkeypatch.setattr(lanes, "SHRINK_FACTOR", 2)
    trained, _ = endless("decoder_lm")
    served, prefix = engine(trained), "gfedcba" * 3
    for text, length in ((f"{prefix}a", 17), ("abc", 2), (f"{prefix}b", 7)):
        decode = dataclasses.replace(GREEDY, max_new_tokens=length)
        number = submit(served, text, decode)
        assert finish(served)[number, 0][0] == alone(trained, text, decode)


REUSED = {
    "dense": ("seq2seq", None, 0.0),
    "dense, several steps per call": ("seq2seq", None, 1.0),
    "paged": ("seq2seq", 20, 0.0),
    "shared prompts": ("decoder_lm", 20, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pages", "seconds"), REUSED.values(), ids=REUSED)
def test_reused_slots_do_not_change_beam_search(family, pages, seconds, monkeypatch):
    """With requests that start at different steps, and a dense cache that grows and is cut."""
    monkeypatch.setattr(lanes, "SLOTS_PER_BEAM", 1)
    used, sizes, take_steps = [], [], lanes.Lane._take_steps

    def counted(lane, *inputs):
        steps = take_steps(lane, *inputs)
        used.append(int(steps.filled.max()))
        sizes.append(lane._size.slots)
        return steps

    monkeypatch.setattr(lanes.Lane, "_take_steps", counted)
    trained, _ = endless(family)
    norm = trained[2]["decoder"]["norm"]
    norm["scale"] *= 0.3  # beams of an unsure model have common ancestors
    norm["bias"] *= 0.3
    texts = TEXTS[:4] if family == "seq2seq" else [f"abcdefgabcdefga{end}" for end in ("", "a", "ab", "c")]
    decode = dataclasses.replace(BEAM, beams=4, max_new_tokens=30 if family == "seq2seq" else 22)
    served = engine(trained, max_rows=2, pages=pages, seconds=seconds)
    numbers, events = [], []
    for text in texts:
        numbers.append(submit(served, text, decode))
        for _ in range(8):
            events += served.step()
    actual = finish(served, events)
    assert [actual[number, 0][0] for number in numbers] == [alone(trained, text, decode) for text in texts]
    assert max(used) < decode.max_new_tokens * 4
    if pages is None:
        assert any(before < after for before, after in itertools.pairwise(sizes))
        assert any(before > after for before, after in itertools.pairwise(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm"])
def test_kinds_of_decoding_share_a_limited_number_of_lanes(family, monkeypatch):
    monkeypatch.setattr(engines, "MAX_LANES", 1)
    trained = plain(family)
    served = engine(trained)
    kinds = [GREEDY, BEAM, SAMPLE]
    numbers = [submit(served, "abc", decode) for decode in kinds]
    actual = finish(served)
    assert [actual[number, 0][0] for number in numbers] == [alone(trained, "abc", decode) for decode in kinds]
