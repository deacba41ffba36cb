"""Beam search against exhaustive search, greedy decoding and the length penalties' formulas."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, build, rest_slow, tiny
from tests.inference import jitted_continuation
from tests.inference.beam_search import best_continuations, best_translations
from tformer_jax.config import DecodeConfig
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference import beam
from tformer_jax.inference.constraints import NO_CONSTRAINTS, Constraints
from tformer_jax.inference.forced import FirstTokens, ForcedTokens, first_tokens
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.lab.benchmarks import jitted_loop
from tformer_jax.models import registry
from tformer_jax.nn.decoder_cache import row_cache
from tformer_jax.special_tokens import BOS, EOS, PAD, PAD_TOKEN

SOURCES = np.array([[5, 4, 5, EOS], [4, EOS, PAD, PAD], [3, 3, 4, EOS]], np.int32)
VOCAB, LENGTH = 6, 4


@pytest.fixture(scope="module", params=rest_slow([0, 1], 1))
def seq2seq(request):
    return build(tiny("seq2seq", vocab_size=VOCAB, source_vocab_size=VOCAB), seed=request.param)


def best(model, params, source, *, length: int = LENGTH, forced=None, **decode) -> beam.Hypotheses:
    cfg = DecodeConfig(strategy="beam", **decode)
    return jax.device_get(best_translations(model, params, source, length=length, cfg=cfg, forced=forced))


def penalty(length: int, kind: str, alpha: float) -> float:
    return ((5 + length) / 6 if kind == "gnmt" else length) ** alpha


def every_output(model, params, source: np.ndarray, first: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Returns the log-probability, after `first`, of every output of at most LENGTH tokens, by float64 full passes."""
    allowed = [token for token in range(VOCAB) if token not in (PAD_TOKEN, BOS)]
    others = [token for token in allowed if token != EOS]
    outputs = [
        (*first, *begin, last)
        for length in range(1, LENGTH + 1 - len(first))
        for begin in itertools.product(others, repeat=length - 1)
        for last in (allowed if length == LENGTH - len(first) else [EOS])
    ]
    rows = np.full((len(outputs), LENGTH), PAD)
    for row, output in zip(rows, outputs, strict=True):
        row[: len(output)] = output
    prefix = np.concatenate([np.full((len(rows), 1), BOS), rows[:, :-1]], axis=1)
    sources = np.repeat(source[None], len(rows), axis=0)
    logits = oracles.seq2seq(oracles.f64(params), model.cfg, sources, prefix, sources != PAD, prefix != PAD)
    log_p = np.take_along_axis(np.log(oracles.softmax(logits)), rows[..., None], axis=-1)[..., 0]
    return {output: log_p[number, len(first) : len(output)].sum() for number, output in enumerate(outputs)}


@pytest.mark.long
@pytest.mark.parametrize("penalized", rest_slow([("average", 1.0), ("gnmt", 0.6), ("average", 0.0), ("gnmt", 2.0)], 1))
def test_a_wide_beam_equals_exhaustive_search(seq2seq, penalized):
    """Rows have no first token, a tag, and a tag before a prefix, whose length does not count."""
    kind, alpha = penalized
    model, params = seq2seq
    beams = 64  # more than the 3^3 prefixes that can continue
    options = {"length_penalty": kind, "length_alpha": alpha, "early_stopping": "never"}
    rows = [FirstTokens(), FirstTokens((5,)), FirstTokens((4, 3), 1)]
    actual = best(model, params, SOURCES, beams=beams, forced=ForcedTokens.from_rows(rows), **options)
    for row, (source, first) in enumerate(zip(SOURCES, rows, strict=True)):
        sums = every_output(model, params, source, first.ids)
        scores = {output: value / penalty(len(output) - first.prefix, kind, alpha) for output, value in sums.items()}
        wanted = sorted(scores, key=scores.get, reverse=True)[:20]
        for output, tokens, score in zip(wanted, actual.tokens[row], actual.scores[row], strict=False):
            np.testing.assert_array_equal(tokens, [*output, *[PAD] * (LENGTH - len(output))])
            proves = (f"decode.strategy=beam, {kind} length penalty", "exhaustive search")
            assert_close(score, scores[output], 1e-5, proves=proves)
        missing = actual.scores[row][len(scores) :]
        np.testing.assert_array_equal(missing, np.full_like(missing, beam.WORST))


@pytest.mark.slow
def test_one_beam_is_greedy(seq2seq):
    model, params = seq2seq
    keys = jax.random.split(jax.random.key(0), 3)
    greedy = jitted_loop.translate(model, params, SOURCES, keys, length=8, cfg=DecodeConfig())
    single = best(model, params, SOURCES, length=8, beams=1)
    np.testing.assert_array_equal(single.tokens[:, 0], greedy)


@pytest.mark.long
@pytest.mark.parametrize(
    "constraints", rest_slow([Constraints(no_repeat_ngram=2), Constraints(forbidden=((4, 5), (4, 3), (3, 4)))], 1)
)
def test_constraints_see_the_prompt(constraints):
    """One beam is greedy also if constraints look back: over the prompt, of different lengths, and the output."""
    model, params = build(tiny("decoder_lm", vocab_size=VOCAB, max_length=32))
    prompts = np.array(
        [[PAD, PAD, first, second, first] for first in (3, 4, 5) for second in (3, 4, 5)] + [[3, 4, 5, 3, 3]], np.int32
    )
    keys = jax.random.split(jax.random.key(0), len(prompts))
    options = {"length": 9, "constraints": constraints}
    greedy = jitted_continuation.continue_text(model, params, prompts, keys, cfg=DecodeConfig(), **options)
    cfg = DecodeConfig(strategy="beam", beams=1)
    single = best_continuations(model, params, prompts, cfg=cfg, **options)
    np.testing.assert_array_equal(single.tokens[:, 0], greedy)
    free = jitted_continuation.continue_text(model, params, prompts, keys, cfg=DecodeConfig(), length=9)
    assert (np.asarray(free) != np.asarray(greedy)).any()


@pytest.mark.slow
def test_beams_do_not_compete_for_experts():
    """A single token always fits into an expert, for any capacity; the tokens of the beams must not compete."""
    moe = {"num_experts": 3, "experts_per_token": 1}
    crowded = tiny("decoder_lm", vocab_size=VOCAB, ffn="moe", moe=moe | {"expert_capacity": 0.5})
    model, params = build(crowded)
    roomy = registry.build(dataclasses.replace(crowded, moe=moe))
    cfg = DecodeConfig(strategy="beam", beams=4)
    prompts = np.array([[4], [5], [3]], np.int32)
    actual, expected = (best_continuations(each, params, prompts, length=4, cfg=cfg) for each in (model, roomy))
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    assert_close(actual.scores, expected.scores, 1e-6)


@pytest.mark.long
def test_rows_are_independent(seq2seq):
    model, params = seq2seq
    together = best(model, params, SOURCES, beams=3)
    padded = np.pad(SOURCES[::-1], ((0, 1), (0, 2)), constant_values=PAD)
    others = best(model, params, padded, beams=3)
    np.testing.assert_array_equal(others.tokens[:3], together.tokens[::-1])
    assert_close(others.scores[:3], together.scores[::-1], 1e-6)
    assert (others.tokens[3] == PAD).all()


@pytest.mark.long
def test_finished_rows_do_not_change():
    """If a finished row continued with the others, its beams would find better hypotheses than its first ones."""
    model, params = build(tiny("decoder_lm", vocab_size=VOCAB), seed=5)
    prompts = np.array([[token, other] for token in (3, 4, 5) for other in (3, 4, 5)], np.int32)
    cfg = DecodeConfig(strategy="beam", beams=2, early_stopping="first", length_alpha=2.0)
    together = best_continuations(model, params, prompts, length=12, cfg=cfg)
    for row in range(len(prompts)):
        others_empty = np.where(np.arange(len(prompts))[:, None] == row, prompts, PAD)
        alone = best_continuations(model, params, others_empty, length=12, cfg=cfg)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[row])
    assert len(set((np.asarray(together.tokens[:, 0]) != PAD).sum(axis=1).tolist())) > 1


@pytest.mark.slow
def test_continuations_of_prompts_of_different_length():
    model, params = build(tiny("decoder_lm", vocab_size=VOCAB))
    prompts = np.array([[PAD, PAD, 4, 5], [3, 4, 5, 3]], np.int32)
    cfg = DecodeConfig(strategy="beam", beams=3)
    together = best_continuations(model, params, prompts, length=5, cfg=cfg)
    for row, (rows, at) in enumerate((([[4, 5]], 0), ([[PAD] * 4, [3, 4, 5, 3]], 1))):
        alone = best_continuations(model, params, np.array(rows, np.int32), length=5, cfg=cfg)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[at])
        assert_close(together.scores[row], alone.scores[at], 1e-5)


@pytest.mark.slow
def test_stricter_early_stopping_finds_no_worse_outputs(seq2seq):
    """The k-th scores: those of `never` are at least those of `heuristic`, and those at least those of `first`."""
    model, params = seq2seq
    worst = [
        best(model, params, SOURCES, beams=3, length=7, early_stopping=kind).scores.min(axis=1)
        for kind in ("first", "heuristic", "never")
    ]
    assert (worst[0] <= worst[1] + 1e-6).all()
    assert (worst[1] <= worst[2] + 1e-6).all()


@pytest.mark.parametrize("stopping", ["first", "heuristic", "never"])
def test_missing_outputs_are_empty(stopping):
    """Of one forced output, and of four outputs of one token; copies of them are no further outputs."""
    cfg, single = DecodeConfig(strategy="beam", beams=6, early_stopping=stopping), np.array([1])
    logits = np.array([5.0, 2.0, 1.0, 0.0, -1.0, 0.5], np.float32)
    log_p = logits - np.log(np.exp(logits).sum())
    cases = {(4, 5, 4): [[4, 5, 4]], (): [[2], [5], [3], [4]]}  # without padding and BOS, which are never generated
    for forced, outputs in cases.items():
        length = len(outputs[0])
        settings, first = RowSettings.from_config(cfg, 1), ForcedTokens.from_rows([FirstTokens(forced)])
        options = {"length": length, "cfg": cfg, "forced": first}
        state = beam.BeamState.start(single, single, single * length, settings, NO_CONSTRAINTS, **options)
        advance = jax.jit(beam.BeamState.advance)
        for _ in range(length):
            state = advance(state, np.broadcast_to(logits, (1, 6, VOCAB)))
        assert state.done.all()
        missing = len(state.finished.scores[0]) - len(outputs)
        np.testing.assert_array_equal(state.finished.tokens[0], outputs + [[PAD] * length] * missing)
        scores = [0] if forced else [log_p[token] for (token,) in outputs]
        assert_close(state.finished.scores[0], np.array(scores + [beam.WORST] * missing), 1e-6)


@pytest.mark.parametrize("kind", ["average", "gnmt"])
@pytest.mark.parametrize("stopping", rest_slow(["heuristic", "never"], 1))
def test_scores_do_not_count_the_tokens_of_a_prefix(kind, stopping):
    """If the logits are the same at each step, a prefix changes neither the outputs after it nor their scores."""
    cfg = DecodeConfig(strategy="beam", beams=2, length_penalty=kind, length_alpha=1.0, early_stopping=stopping)
    logits = np.log(np.array([0, 0, 0.2, 0.6, 0.2, 0.0], np.float32) + 1e-9)  # P(EOS) = 0.2
    single, actual = np.array([1]), {}
    for prefix in ((), (4, 5, 4)):
        length = len(prefix) + 3
        settings, first = RowSettings.from_config(cfg, 1), ForcedTokens.from_rows([FirstTokens(prefix, len(prefix))])
        options = {"length": length, "cfg": cfg, "forced": first}
        state = beam.BeamState.start(single, single, single * length, settings, NO_CONSTRAINTS, **options)
        for _ in range(length):
            state = jax.jit(beam.BeamState.advance)(state, np.broadcast_to(logits, (1, 2, VOCAB)))
        assert state.done.all()
        np.testing.assert_array_equal(state.finished.tokens[0, :, : len(prefix)], [prefix] * 2)
        actual[prefix] = state.finished.tokens[0, :, len(prefix) :].tolist(), state.finished.scores[0]
    by_hand = {
        "average": ([[3, 3, 3], [3, 3, EOS]], np.log([0.6**3, 0.6**2 * 0.2]) / 3),
        "gnmt": ([[3, 3, 3], [EOS, PAD, PAD]], np.log([0.6**3, 0.2]) / [8 / 6, 6 / 6]),
    }
    for tokens, scores in actual.values():
        assert tokens == by_hand[kind][0]
        assert_close(scores, by_hand[kind][1], 1e-5)


def test_the_first_token_of_a_checkpoint_counts_in_the_length_of_a_score():
    """As in transformers, where `forced_bos_token_id` is a generated token, and given decoder inputs are not."""
    tokenizer = CharacterTokenizer("abc")
    special = dataclasses.replace(tokenizer.special, forced=(EOS,))
    tokenizer.special = special
    for prefix, ids in {"": (), "ab": (4, 5)}.items():
        actual = first_tokens(DecodeConfig(prefix=prefix), tokenizer, continues=False, tags=(6,))
        assert actual == ((EOS, 6, *ids), len(ids))


def test_beams_without_a_hypothesis_end_the_search():
    """Both outputs of one token end at once if no other token is allowed."""
    cfg, single = DecodeConfig(strategy="beam", beams=3), np.array([1])
    constraints = Constraints(eos=(EOS, 5), forbidden=((3,), (4,)))
    state = beam.BeamState.start(
        single, single, single * 9, RowSettings.from_config(cfg, 1), constraints, length=9, cfg=cfg
    )
    state = jax.jit(beam.BeamState.advance)(state, np.zeros((1, 3, VOCAB), np.float32))
    assert state.done.all()
    assert (state.finished.scores[0] > beam.WORST).tolist() == [True, True, False]


def test_a_longer_state_keeps_its_tokens():
    """Tokens, hypotheses and ancestors are followed by PAD, PAD and 0."""
    cfg, number = DecodeConfig(strategy="beam", beams=2), np.array([5])
    start = beam.BeamState.start(
        number, number, number, RowSettings.from_config(cfg, 1), Constraints(), length=2, cfg=cfg
    )
    tokens = np.array([[[3, 4], [4, 5]]], np.int32)
    state = dataclasses.replace(
        start,
        running=tokens,
        ancestry=start.ancestry.replace(ancestors=tokens),
        finished=start.finished._replace(tokens=tokens),
    ).resized(4, 0)
    assert state.length == 4
    for actual, empty in ((state.running, PAD), (state.finished.tokens, PAD), (state.ancestry.ancestors, 0)):
        np.testing.assert_array_equal(actual, [[[3, 4, empty, empty], [4, 5, empty, empty]]])


def test_a_step_needs_room_for_the_beams_within_the_width_of_each_row():
    """A row of 3 beams in a step of 4 must not end every call because a fourth beam would not fit."""
    count = np.full(2, 1, np.int32)
    cfg = DecodeConfig(strategy="beam", beams=4)
    settings = RowSettings.from_configs([dataclasses.replace(cfg, beams=3), dataclasses.replace(cfg, beams=2)])
    rows = beam.BeamState.start(count, count, count, settings, NO_CONSTRAINTS, length=LENGTH, cfg=cfg)
    cache = row_cache(tiny("decoder_lm"), 2, 8)
    for used, fits in (([5, 6], True), ([6, 6], False), ([5, 7], False)):
        slots = {kind: dataclasses.replace(own, index=np.array(used)) for kind, own in cache.row_slots.items()}
        assert bool(rows.fits(dataclasses.replace(cache, slots=slots))) == fits
