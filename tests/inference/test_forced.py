"""Rows of one batch whose outputs start with different tokens: tags of languages, and prefixes."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.helpers import rest_slow
from tests.inference.engines import BEAM, GREEDY, LETTERS, SAMPLE, SEEDS, TEXTS, engine, finish, plain, submit
from tformer_jax.inference.forced import FirstTokens, ForcedTokens
from tformer_jax.special_tokens import PAD

FIRST = [((), ""), ((5,), ""), ((), "ba"), ((6, 4), "c"), ((), ""), ((4,), "abcd")]
"""Tags and prefix of each of TEXTS."""
EACH = {
    f"{family}-{decode.strategy}": (family, decode)
    for family, decode in (
        ("seq2seq", GREEDY),
        ("decoder_lm", SAMPLE),
        *itertools.product(SEEDS, (GREEDY, SAMPLE, BEAM)),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_slow(EACH, 1))
def test_outputs_of_a_mixed_batch_are_those_of_each_row_alone(case):
    """A row that chooses its first token has the output of an engine without forced tokens, another program."""
    family, decode = case
    outputs = 1 if decode is GREEDY else 2

    def run(indices):
        """Returns the outputs of these texts, and the width of the array of their first tokens."""
        served = engine(plain(family), max_rows=4)
        options = {"seed": 3, "scored": True, "num_outputs": outputs}
        for index in indices:
            tags, prefix = FIRST[index]
            submit(served, TEXTS[index], dataclasses.replace(decode, prefix=prefix), index=index, tags=tags, **options)
        actual = finish(served)
        (lane,) = served._lanes.values()
        return [[actual[n, sample] for sample in range(outputs)] for n in range(len(indices))], lane._size.forced

    together, width = run(range(len(TEXTS)))
    assert width == 16
    for index, (tags, prefix) in enumerate(FIRST):
        forced = bool(tags or prefix)
        (separate,), width = run([index])
        assert width == 16 * forced
        for (text, event), (other, expected) in zip(together[index], separate, strict=True):
            assert (text, event.finish, event.tokens) == (other, expected.finish, expected.tokens)
            assert event.score == pytest.approx(expected.score, rel=1e-6)
            assert text.startswith(LETTERS.decode(tags) + prefix)


def test_the_next_forced_tokens():
    rows = [FirstTokens(), FirstTokens((5, 6), 1), FirstTokens(tuple(range(4, 20)))]
    forced = ForcedTokens.from_rows(rows)
    actual = [np.asarray(forced.next(np.full(3, generated))).tolist() for generated in (0, 1, 2, 15, 16, 99)]
    assert actual == [[PAD, 5, 4], [PAD, 6, 5], [PAD, PAD, 6], [PAD, PAD, 19], [PAD] * 3, [PAD] * 3]
    assert ForcedTokens.from_rows([FirstTokens()]).next(np.zeros(1, int)) is None
