"""Cached generation equals float64 full passes repeated for every token, in any batch."""

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import build, rest_slow, tiny
from tests.inference import jitted_continuation
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import decoding_state
from tformer_jax.lab.benchmarks import jitted_loop
from tformer_jax.special_tokens import BOS, EOS, PAD, PAD_TOKEN

LENGTH = 7
SOURCES = [[9, 8, 7, EOS], [6, 5, EOS], [4, 10, 9, 8, EOS]]
PROMPTS = [[5, 6, 7], [4], [8, 9, 10, 4]]
VARIANTS = {
    "sinusoidal": {},
    "learned, post-norm": {"position": "learned", "norm_placement": "post"},
    "none, GQA, RMSNorm": {"position": "none", "num_kv_heads": 2, "norm": "rmsnorm"},
}
SEEDS = {"sinusoidal": 1, "learned, post-norm": 3, "none, GQA, RMSNorm": 1}
"""Seeds of parameters that do not give every row the same output."""


def pad(rows, *, left: bool = False, length: int = 6) -> np.ndarray:
    padded = np.full((len(rows), length), PAD, np.int32)
    for number, row in enumerate(rows):
        start = length - len(row) if left else 0
        padded[number, start : start + len(row)] = row
    return padded


def run(function, model, params, tokens, *, length: int = LENGTH, seed: int = 0, **decode) -> np.ndarray:
    keys = jax.random.split(jax.random.key(seed), len(tokens))
    return np.asarray(function(model, params, tokens, keys, length=length, cfg=DecodeConfig(**decode)))


def greedy_by_full_passes(logits_of, prefix: list[int], length: int = LENGTH) -> list[int]:
    """Reads everything again for each new token; PAD fills the row after EOS."""
    output: list[int] = []
    while len(output) < length and EOS not in output:
        logits = logits_of(np.array([prefix + output]))[0, -1]
        logits[[PAD_TOKEN, BOS]] = -np.inf
        output.append(int(logits.argmax()))
    return output + [PAD] * (LENGTH - len(output))


@pytest.fixture(scope="module", params=rest_slow(VARIANTS.keys(), 1))
def seq2seq(request):
    return build(tiny("seq2seq", **VARIANTS[request.param]), seed=SEEDS[request.param])


@pytest.fixture(scope="module", params=rest_slow(VARIANTS.keys(), 1))
def decoder_lm(request):
    return build(tiny("decoder_lm", **VARIANTS[request.param]), seed=SEEDS[request.param])


def next_logits(model, params, source: list[int]):
    """The decoder's logits of a target prefix [1, T] for this source."""
    source_row = np.array([source])

    def logits_of(prefix):
        real = np.ones(prefix.shape, bool)
        return oracles.seq2seq(oracles.f64(params), model.cfg, source_row, prefix, source_row != PAD, real)

    return logits_of


@pytest.mark.long
def test_translation_equals_full_passes(seq2seq):
    model, params = seq2seq
    outputs = run(jitted_loop.translate, model, params, pad(SOURCES))
    expected = [greedy_by_full_passes(next_logits(model, params, source), [BOS]) for source in SOURCES]
    np.testing.assert_array_equal(outputs, expected)
    assert len(np.unique(outputs, axis=0)) > 1


def test_continuation_equals_full_passes(decoder_lm):
    model, params = decoder_lm

    def logits_of(prefix):
        return oracles.decoder_lm(oracles.f64(params), model.cfg, prefix, np.ones(prefix.shape, bool))

    outputs = run(jitted_continuation.continue_text, model, params, pad(PROMPTS, left=True))
    np.testing.assert_array_equal(outputs, [greedy_by_full_passes(logits_of, prompt) for prompt in PROMPTS])
    assert len(np.unique(outputs, axis=0)) > 1


def assert_independent(function, model, params, rows, *, left: bool):
    together = run(function, model, params, pad(rows, left=left))
    shuffled = run(function, model, params, pad([*rows[::-1], []], left=left, length=8))
    np.testing.assert_array_equal(shuffled, [*together[::-1], [PAD] * LENGTH])
    alone = run(function, model, params, pad([rows[1], [], [], []], left=left, length=8))
    np.testing.assert_array_equal(alone[0], together[1])


@pytest.mark.slow
def test_translation_does_not_depend_on_other_rows(seq2seq):
    assert_independent(jitted_loop.translate, *seq2seq, SOURCES, left=False)


@pytest.mark.slow
def test_continuation_does_not_depend_on_other_rows(decoder_lm):
    assert_independent(jitted_continuation.continue_text, *decoder_lm, PROMPTS, left=True)


@pytest.mark.slow
def test_a_longer_prompt_leaves_fewer_new_tokens():
    model, params = build(tiny("decoder_lm", output_bias=True))
    params["head"]["bias"] = params["head"]["bias"].at[EOS].set(-1e4)
    prompts = pad([[5] * 12, [6] * 16, [7] * 3, []], left=True, length=16)
    output = run(jitted_continuation.continue_text, model, params, prompts, length=6)
    np.testing.assert_array_equal((output != PAD).sum(1), [16 - 12, 0, 6, 0])


@pytest.mark.slow
def test_finished_rows_take_no_steps(monkeypatch):
    calls = []

    def counted(*arguments, **options):
        jax.debug.callback(lambda: calls.append(1))
        return choose(*arguments, **options)

    choose = decoding_state.choose
    monkeypatch.setattr(decoding_state, "choose", counted)
    model, params = build(tiny("seq2seq", output_bias=True, dim=4))
    for bias, steps in ((-1e4, LENGTH), (1e4, 1)):
        params["head"]["bias"] = params["head"]["bias"].at[EOS].set(bias)
        calls.clear()
        output = run(jitted_loop.translate, model, params, pad([*SOURCES, []]))
        jax.effects_barrier()
        np.testing.assert_array_equal((output != PAD).sum(1), [steps, steps, steps, 0])
        assert len(calls) == steps


def test_the_second_call_compiles_nothing(decoder_lm, monkeypatch):
    model, params = decoder_lm
    run(jitted_continuation.continue_text, model, params, pad(PROMPTS, left=True))
    monkeypatch.setattr(jitted_loop, "decode", None)  # a second trace would call it
    run(jitted_continuation.continue_text, model, params, pad(PROMPTS[::-1], left=True), seed=5)


@pytest.mark.slow
def test_sampling_depends_only_on_the_key_of_the_row():
    model, params = build(tiny("decoder_lm"))
    sample = {"strategy": "sample", "temperature": 2.0}
    prompts = pad(PROMPTS * 4, left=True)
    first, again, other = (
        run(jitted_continuation.continue_text, model, params, prompts, seed=seed, **sample) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    keys = jax.random.split(jax.random.key(1), 12)[::-1]
    cfg = DecodeConfig(**sample)
    reversed_rows = jitted_continuation.continue_text(model, params, prompts[::-1], keys, length=LENGTH, cfg=cfg)
    np.testing.assert_array_equal(reversed_rows[::-1], first)


@pytest.mark.slow
def test_each_step_samples_independently():
    model, params = build(tiny("decoder_lm"))
    uniform = jax.tree.map(np.zeros_like, params)
    cfg = DecodeConfig(strategy="sample", min_new_tokens=12)
    prompts, keys = np.full((4, 2), 5, np.int32), jax.random.split(jax.random.key(0), 4)
    outputs = np.asarray(jitted_continuation.continue_text(model, uniform, prompts, keys, length=12, cfg=cfg))
    assert min(len(set(row)) for row in outputs.tolist()) > 3
