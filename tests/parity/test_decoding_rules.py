"""Decoding constraints equal the logits processors of `transformers`, on random logits and histories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from tests.helpers import assert_close
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import sampling
from tformer_jax.inference.constraints import Constraints, constrain
from tformer_jax.inference.forced import FirstTokens, ForcedTokens
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.special_tokens import EOS, PAD

B, V, L = 24, 30, 14
DRAW = np.random.default_rng(0)
LOGITS = (3 * DRAW.normal(size=(B, V))).astype(np.float32)
COUNTS = DRAW.integers(0, L + 1, B)
COUNTS[:3] = 0, 1, L
HISTORY = DRAW.integers(3, 3 + DRAW.choice([2, 5, V - 3], (B, 1)), (B, L)).astype(np.int32)
"""Histories with few distinct tokens in some rows, so that n-grams repeat; arbitrary tokens after COUNTS."""
FORBIDDEN = ((7,), (3, 4), (4, 4), (5, 3, 4), (3, 3, 4, 3), (9, 9), (4,) * 20)
constrained = jax.jit(constrain, static_argnames="constraints")


def compare(actual: jax.Array, expected: np.ndarray, switch: str, oracle: type) -> None:
    """Asserts that the same tokens are excluded, and that the others have the same logits."""
    actual = np.asarray(actual)
    left = expected > -np.inf
    np.testing.assert_array_equal(actual > -np.inf, left)
    assert_close(actual[left], expected[left], 1e-6, proves=(f"decode.{switch}", f"transformers {oracle.__name__}"))


def by_row(processors: list) -> np.ndarray:
    """Returns the results of their processors, one per row, for each row's real tokens."""
    actual = []
    for row in range(B):
        ids = torch.tensor(HISTORY[row : row + 1, : COUNTS[row]], dtype=torch.long)
        actual.append(processors[row](ids, torch.tensor(LOGITS[row : row + 1])).numpy()[0])
    return np.stack(actual)


def settings(**changes: np.ndarray) -> RowSettings:
    return RowSettings.from_config(DecodeConfig(strategy="sample"), B).replace(
        **{name: jnp.asarray(value) for name, value in changes.items()}
    )


@pytest.mark.parametrize(
    ("name", "oracle", "values"),
    [
        ("top_k", theirs.TopKLogitsWarper, [1, 2, 7, V, V + 5]),
        ("top_p", theirs.TopPLogitsWarper, [0.0, 0.1, 0.5, 0.9, 0.99]),
        ("min_p", theirs.MinPLogitsWarper, [0.001, 0.05, 0.3, 1.0]),
        ("temperature", theirs.TemperatureLogitsWarper, [0.3, 1.0, 2.5]),
    ],
)
def test_restrictions(name, oracle, values):
    each = [values[row % len(values)] for row in range(B)]
    actual = sampling.restrict(jnp.asarray(LOGITS), settings(**{name: jnp.array(each)}))
    compare(actual, by_row([oracle(value) for value in each]), name, oracle)


def test_all_restrictions_in_their_order():
    pipeline = theirs.LogitsProcessorList(
        [
            theirs.TemperatureLogitsWarper(0.7),
            theirs.TopKLogitsWarper(9),
            theirs.TopPLogitsWarper(0.9),
            theirs.MinPLogitsWarper(0.1),
        ]
    )
    cfg = DecodeConfig(strategy="sample", temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)
    actual = sampling.restrict(jnp.asarray(LOGITS), RowSettings.from_config(cfg, B))
    expected = by_row([pipeline] * B)
    assert len(np.unique((expected > -np.inf).sum(axis=1))) > 2
    compare(actual, expected, "temperature, top_k, top_p, min_p", theirs.LogitsProcessorList)


def test_repetition_penalty():
    strength = DRAW.choice([0.8, 1.0, 1.3, 5.0], B)
    constraints = Constraints(repetition=True)
    actual = constrained(
        LOGITS, HISTORY, COUNTS, COUNTS, settings(repetition=np.float32(strength)), constraints=constraints
    )
    oracle = theirs.RepetitionPenaltyLogitsProcessor
    compare(actual, by_row([oracle(float(value)) for value in strength]), "repetition_penalty", oracle)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 20])
def test_no_repeat_ngram(n):
    actual = constrained(LOGITS, HISTORY, COUNTS, COUNTS, settings(), constraints=Constraints(no_repeat_ngram=n))
    expected = by_row([theirs.NoRepeatNGramLogitsProcessor(n)] * B)
    assert n > 4 or (expected == -np.inf).any()
    compare(actual, expected, "no_repeat_ngram", theirs.NoRepeatNGramLogitsProcessor)


def test_forbidden():
    actual = constrained(LOGITS, HISTORY, COUNTS, COUNTS, settings(), constraints=Constraints(forbidden=FORBIDDEN))
    expected = by_row([theirs.NoBadWordsLogitsProcessor([list(ids) for ids in FORBIDDEN])] * B)
    assert len(np.unique((expected == -np.inf).sum(axis=1))) > 2
    compare(actual, expected, "forbidden", theirs.NoBadWordsLogitsProcessor)


def test_min_new_tokens():
    shortest = DRAW.integers(0, 6, B)
    read = np.maximum(COUNTS - DRAW.integers(0, 6, B), 0)
    actual = constrained(
        LOGITS, HISTORY, COUNTS, COUNTS - read, settings(min_tokens=np.int32(shortest)), constraints=Constraints()
    )
    oracle = theirs.MinNewTokensLengthLogitsProcessor
    expected = by_row([oracle(int(read[row]), int(shortest[row]), EOS) for row in range(B)])
    assert 0 < (expected == -np.inf).sum() < B
    compare(actual, expected, "min_new_tokens", oracle)


def test_forced_first_token():
    made, first = COUNTS % 3, [FirstTokens((3 + row % 7,)) for row in range(B)]
    forced = ForcedTokens.from_rows(first).next(jnp.asarray(made))
    oracle = theirs.ForcedBOSTokenLogitsProcessor
    expected = np.stack(
        [
            oracle(*first[row].ids)(torch.zeros(1, 1 + made[row], dtype=torch.long), torch.zeros(1, V)).numpy()[0]
            for row in range(B)
        ]
    )
    actual = np.where((forced[:, None] == np.arange(V)) | (forced[:, None] == PAD), 0, -np.inf)
    compare(actual, expected, "prefix", oracle)


def test_all_rules_in_their_order():
    constraints = Constraints(repetition=True, no_repeat_ngram=2, forbidden=FORBIDDEN)
    cfg = DecodeConfig(repetition_penalty=1.4, min_new_tokens=9)
    pipeline = theirs.LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.4),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.NoBadWordsLogitsProcessor([list(ids) for ids in FORBIDDEN]),
            theirs.MinNewTokensLengthLogitsProcessor(0, 9, EOS),
        ]
    )
    actual = constrained(LOGITS, HISTORY, COUNTS, COUNTS, RowSettings.from_config(cfg, B), constraints=constraints)
    compare(actual, by_row([pipeline] * B), "all rules", theirs.LogitsProcessorList)
