"""Cached generation equals the full pass taken again for every token, whatever shares the batch."""

import functools

import jax
import numpy as np
import pytest

from tests.helpers import build, tiny
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import generate
from tformer_jax.special_tokens import BOS, EOS, PAD

LIMIT = 7
SOURCES = [[9, 8, 7, 2], [6, 5, 2], [4, 10, 9, 8, 2]]
PROMPTS = [[5, 6, 7], [4], [8, 9, 10, 4]]
VARIANTS = [
    {},
    {"position": "learned", "norm_placement": "post"},
    {"position": "none", "num_kv_heads": 2, "norm": "rmsnorm"},
]
SEEDS = (1, 3, 1)
"""Of parameters that do not give every row the same output."""
KEY = jax.random.key(0)


def pad(rows, *, left: bool = False, length: int = 6) -> np.ndarray:
    padded = np.full((len(rows), length), PAD, np.int32)
    for number, row in enumerate(rows):
        start = length - len(row) if left else 0
        padded[number, start : start + len(row)] = row
    return padded


def greedy_by_full_passes(logits_of, prefix: list[int]) -> list[int]:
    """Reads everything again for each new token."""
    output: list[int] = []
    while len(output) < LIMIT and EOS not in output:
        logits = np.array(logits_of(np.array([prefix + output], np.int32)))[0, -1]
        logits[[PAD, BOS]] = -np.inf
        output.append(int(logits.argmax()))
    return output


def tokens(row) -> list[int]:
    """A row without the padding after EOS."""
    row = [int(i) for i in row]
    return row[: row.index(EOS) + 1] if EOS in row else row


@pytest.fixture(scope="module", params=range(len(VARIANTS)))
def translation(request):
    """A model, and a function from padded sources to outputs."""
    model, params = build(tiny("seq2seq", **VARIANTS[request.param]), seed=SEEDS[request.param])
    call = generate.jitted(generate.translate, model, DecodeConfig())
    return model, params, lambda sources: np.asarray(call(params, sources, KEY, LIMIT))


@pytest.fixture(scope="module", params=range(len(VARIANTS)))
def continuation(request):
    """A model, and a function from left-padded prompts to outputs."""
    model, params = build(tiny("decoder_lm", **VARIANTS[request.param]), seed=SEEDS[request.param])
    call = generate.jitted(generate.continue_text, model, DecodeConfig())
    return model, params, lambda prompts: np.asarray(call(params, prompts, KEY, LIMIT))


def test_translation_equals_full_passes(translation):
    model, params, translate = translation
    outputs = [tokens(row) for row in translate(pad(SOURCES))]
    for source, output in zip(SOURCES, outputs, strict=True):
        logits_of = functools.partial(model.apply, {"params": params}, np.array([source], np.int32))
        assert output == greedy_by_full_passes(logits_of, [BOS])
    assert len({tuple(output) for output in outputs}) > 1


def test_continuation_equals_full_passes(continuation):
    model, params, continue_text = continuation
    outputs = [tokens(row) for row in continue_text(pad(PROMPTS, left=True))]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == greedy_by_full_passes(functools.partial(model.apply, {"params": params}), prompt)
    assert len({tuple(output) for output in outputs}) > 1


def test_neither_batch_nor_order_nor_padding_matters(translation, continuation):
    for (_, _, run), rows, left in ((translation, SOURCES, False), (continuation, PROMPTS, True)):
        together = run(pad(rows, left=left))
        np.testing.assert_array_equal(run(pad(rows[::-1], left=left))[::-1], together)
        np.testing.assert_array_equal(run(pad(rows, left=left, length=8)), together)
        for row, expected in zip(rows, together, strict=True):
            np.testing.assert_array_equal(run(pad([row], left=left))[0], expected)


def test_it_stops_when_every_row_has_ended():
    model, params = build(tiny("decoder_lm", output_bias=True))
    params["head"]["bias"] = params["head"]["bias"].at[EOS].set(1e4)
    call = generate.jitted(generate.continue_text, model, DecodeConfig())
    output = np.asarray(call(params, pad(PROMPTS, left=True), KEY, LIMIT))
    np.testing.assert_array_equal(output[:, 0], EOS)
    np.testing.assert_array_equal(output[:, 1:], PAD)


def test_sampling_depends_on_the_key_alone():
    model, params = build(tiny("decoder_lm"))
    call = generate.jitted(generate.continue_text, model, DecodeConfig(strategy="sample", temperature=2.0))
    prompts = pad(PROMPTS * 4, left=True)
    first, again, other = (np.asarray(call(params, prompts, jax.random.key(seed), LIMIT)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
