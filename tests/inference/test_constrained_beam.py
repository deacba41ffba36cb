"""Beam search with phrases against exhaustive search, and its guarantee for narrow beams."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, rest_slow
from tformer_jax.config import DecodeConfig
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference import beam
from tformer_jax.inference.constrained_beam import ConstrainedBeamState, Phrases, in_turn
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.phrases import encode_constraints, read_constraints, word_edges
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.special_tokens import EOS, PAD

LETTERS = CharacterTokenizer("ab .")
VOCAB = LETTERS.vocab_size
LENGTH, ROWS = 12, 16
WIDE = DecodeConfig(strategy="beam", beams=20, early_stopping="never")  # more than the 4^2 prefixes that can continue


@jax.jit
def step(state, table, first):
    last = jnp.take_along_axis(state.running, jnp.maximum(state.generated - 1, 0)[:, None, None], axis=2)[..., 0]
    return state.advance(jnp.where((state.generated == 0)[:, None, None], first, table[last]))


def search(decode: DecodeConfig, given: list, table: np.ndarray, limit: int, beams: int = 20) -> beam.Hypotheses:
    """Returns the outputs for `ROWS` rows, of which the first have constraints; `table[i]` follows token i."""
    encoded = [encode_constraints(decode, LETTERS, read_constraints(each), limit) for each in given]
    number = np.full(ROWS, 1, np.int32)
    settings = RowSettings.from_configs([decode] * ROWS).replace(beams=number * beams)
    rules = Constraints(suppressed=(0, 1, 3), vocab_size=VOCAB, word_edges=word_edges(LETTERS))
    phrases = Phrases.from_rows([*encoded, *[()] * (ROWS - len(given))], (4, 4, 4))
    options = {"length": LENGTH, "cfg": decode, "phrases": phrases}
    state = ConstrainedBeamState.start(number, number, number * limit, settings, rules, **options)
    while not state.done.all():
        state = step(state, table, table[0])
    return jax.device_get(state.finished)


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2.0, size=(VOCAB, VOCAB)).astype(np.float32)


def contains(text: str, phrase: str) -> bool:
    """Returns whether a phrase occurs where no letter precedes its first or follows its last letter."""
    text = f" {text} "
    return any(
        text[place : place + len(phrase)] == phrase
        and not (phrase[0].isalpha() and text[place - 1].isalpha())
        and not (phrase[-1].isalpha() and text[place + len(phrase)].isalpha())
        for place in range(1, len(text) - len(phrase))
    )


def satisfies(ids, given) -> bool:
    text = LETTERS.decode(ids)
    return all(any(contains(text, p) for p in each) for each in read_constraints(given))


def every_output(table: np.ndarray, length: int) -> dict[tuple[int, ...], float]:
    """Returns the mean log-probability of every output of at most `length` tokens."""
    log_p = table.astype(np.float64) - np.log(np.exp(table.astype(np.float64)).sum(-1, keepdims=True))
    letters = LETTERS.encode("ab .")
    outputs = [
        (*begin, last)
        for size in range(1, length + 1)
        for begin in itertools.product(letters, repeat=size - 1)
        for last in ([EOS, *letters] if size == length else [EOS])
    ]
    return {ids: sum(log_p[pair] for pair in itertools.pairwise((0, *ids))) / len(ids) for ids in outputs}


GIVEN = [[], ["b"], ["a", "b"], [["ab", "ba"]], ["a.", "b"], ["a", ["b b", "."]], ["a b"], [".", "a."]]


@pytest.mark.long
def test_a_wide_beam_equals_exhaustive_search():
    """The outputs are the best of all that contain the phrases."""
    table, length = logits(0), 3
    actual, scores = search(WIDE, GIVEN, table, length), every_output(table, length)
    for row, given in enumerate(GIVEN):
        wanted = sorted((ids for ids in scores if satisfies(ids, given)), key=scores.get, reverse=True)
        assert wanted
        for ids, tokens, score in zip(wanted[:8], actual.tokens[row], actual.scores[row], strict=False):
            assert tuple(tokens[tokens != PAD].tolist()) == ids, given
            assert_close(score, scores[ids], 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("beams", rest_slow([1, 3, 8], 1))
def test_phrases_are_in_every_output_that_has_room_for_them(beams):
    """Whatever the model prefers; a row has the outputs of a step compiled for its width."""
    draw = random.Random(beams)
    words = ["a", "b", "ab", "ba", "a b", "b.", ".", "aa"]
    for seed in range(3):
        given = [[draw.sample(words, draw.randint(1, 2)) for _ in range(draw.randint(1, 3))] for _ in range(ROWS)]
        actual = search(WIDE, given, logits(seed), LENGTH, beams)
        for tokens, each in zip(actual.tokens[:, 0], given, strict=True):
            assert satisfies(tokens[tokens != PAD].tolist(), each), each
    if beams > 1:
        narrow = dataclasses.replace(WIDE, beams=beams)
        np.testing.assert_array_equal(search(narrow, given, logits(2), LENGTH, beams).tokens, actual.tokens[:, :beams])


def test_an_output_without_room_is_the_best_other():
    """Three tokens have no room for two words and their ends; the others of the batch are as before."""
    table = logits(0)
    actual, scores = search(WIDE, [["aa", "b."], []], table, 3), every_output(table, 3)
    best = max((ids for ids in scores if EOS not in ids), key=scores.get)
    assert tuple(actual.tokens[0, 0][:3].tolist()) == best
    assert actual.tokens[1, 0].tolist()[:2] == list(max(scores, key=scores.get))[:2]


def test_probabilities_are_renormalized_after_phrases_too():
    """By hand: the end is no choice before the phrase is complete, and the others sum to 1."""
    table = logits(0)
    actual = search(dataclasses.replace(WIDE, renormalize=True), [["b"]], table, 1)
    (token,) = LETTERS.encode("b")
    letters = table[0, LETTERS.encode("ab .")].astype(np.float64)
    assert actual.tokens[0, 0, 0] == token
    assert_close(actual.scores[0, 0], table[0, token] - np.log(np.exp(letters).sum()), 1e-5)


def test_candidates_take_turns():
    """By hand: banks 2, 1, 0 in each round, the missing candidates last."""
    banks = np.array([[0, 0, 2, 1, 1, 2, 2, 0]])
    sums = np.array([[-1.0, -2.0, -9.0, -3.0, -4.0, -8.0, beam.WORST, -np.inf]], np.float32)
    assert in_turn(banks, sums)[0].tolist()[:6] == [5, 3, 0, 2, 4, 1]
