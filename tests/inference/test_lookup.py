"""Decoding with drafts from the prompt and the output gives the outputs of decoding token by token."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import rest_slow
from tests.inference.engines import GREEDY, SAMPLE, TEXTS, config, endless, engine, finish, models, plain, submit
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import lookup
from tformer_jax.inference.engine import lane as lanes
from tformer_jax.special_tokens import PAD

LENGTH = 4


def draft_by_search(tokens: list[int], length: int) -> list[int]:
    """Returns what follows the last earlier occurrence of the end of `tokens`, repeated from there on."""
    size = lookup.MATCH
    for start in range(len(tokens) - 1, size - 1, -1):
        if tokens[start - size : start] == tokens[-size:]:
            return list(itertools.islice(itertools.cycle(tokens[start:]), length))
    return [PAD] * length


@pytest.mark.long
@given(st.lists(st.lists(st.integers(4, 5), min_size=1, max_size=12), min_size=1, max_size=3))
def test_drafts_follow_the_last_match(rows):
    history = np.full((len(rows), 13), PAD)
    for row, tokens in zip(history, rows, strict=True):
        row[: len(tokens)] = tokens
    actual = lookup.drafts(jnp.asarray(history), jnp.array([*map(len, rows)]), LENGTH)
    assert np.asarray(actual).tolist() == [draft_by_search(tokens, LENGTH) for tokens in rows]


def outputs(trained, decode: DecodeConfig, texts: list[str] = TEXTS, **options) -> list[tuple[str, float, str]]:
    """Returns the text, the score and the finish reason of each output."""
    served = engine(trained, **options)
    numbers = [submit(served, text, decode, seed=3, index=n, scored=True) for n, text in enumerate(texts)]
    actual = finish(served)
    return [(text, event.score, event.finish) for text, event in (actual[number, 0] for number in numbers)]


VARIANTS = {
    "greedy": (GREEDY, {}),
    "samples": (SAMPLE, {"position": "rotary", "head_dim": 4, "num_kv_heads": 2}),
    "windows": (GREEDY, {"window": 3, "layer_pattern": ("window", "full"), "decoder_layers": 2}),
    "prefix LM": (SAMPLE, {"prefix_lm": True}),
    "constraints": (dataclasses.replace(GREEDY, repetition_penalty=1.3, no_repeat_ngram=3, min_new_tokens=4), {}),
    "first tokens": (dataclasses.replace(SAMPLE, prefix="ab", stop=("ca",)), {}),
    "int8 cache": (dataclasses.replace(GREEDY, cache_dtype="int8"), {}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(VARIANTS, 1))
def test_outputs_are_those_of_single_tokens(case):
    decode, changes = case
    trained = models("decoder_lm", **changes) if changes else plain("decoder_lm")
    decode = dataclasses.replace(decode, max_new_tokens=20)
    expected = outputs(trained, decode)
    actual = outputs(trained, dataclasses.replace(decode, lookup_tokens=LENGTH))
    assert [(text, finish) for text, _, finish in actual] == [(text, finish) for text, _, finish in expected]
    np.testing.assert_allclose([score for _, score, _ in actual], [score for _, score, _ in expected], rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("grows", rest_slow([False, True], 1))
def test_repeated_texts_take_fewer_steps_and_fill_all_slots(grows, monkeypatch):
    trained, _ = endless()
    steps = []
    take_steps = lanes.Lane._take_steps

    def counted(lane, *given):
        taken = take_steps(lane, *given)
        steps.append(int(taken.taken))
        return taken

    monkeypatch.setattr(lanes.Lane, "_take_steps", counted)
    decode = DecodeConfig()  # to the maximum length of the model
    (expected,), single = outputs(trained, decode, ["abc"], grows=grows), sum(steps)
    steps.clear()
    (actual,) = outputs(trained, dataclasses.replace(decode, lookup_tokens=LENGTH), ["abc"], grows=grows)
    assert actual[0] == expected[0] and actual[2] == expected[2] == "length"
    assert sum(steps) < single


@pytest.mark.parametrize("family, changes", [("seq2seq", {}), ("decoder_lm", {"attention": "gated_delta"})])
def test_models_that_cannot_take_back_tokens_are_refused(family, changes):
    decode = dataclasses.replace(GREEDY, lookup_tokens=LENGTH)
    with pytest.raises(UserError, match=r"decode\.lookup_tokens=4: needs .*; write 0"):
        submit(engine(models(family, **changes)), "abc", decode)
    with pytest.raises(UserError, match=r"decode\.lookup_tokens=4: needs .*; write 0"):
        dataclasses.replace(config(family, **changes), decode=decode)


def test_beam_search_has_no_drafts():
    with pytest.raises(UserError, match="lookup_tokens has no effect on beam search: leave it out"):
        DecodeConfig().changed({"strategy": "beam", "lookup_tokens": LENGTH})
    assert DecodeConfig(lookup_tokens=LENGTH).changed({"beams": 3}).tokens_per_step == 3
