"""Minimum Bayes risk decoding: sacreBLEU's chrF between all candidates, and the choice of the most similar output."""

import dataclasses

import numpy as np
import pytest
import sacrebleu

from tests.helpers import build, rest_slow, tiny
from tests.inference.test_text import TEXTS, TOKENIZERS, setup
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.risk import chrf_matrix, rank_by_risk
from tformer_jax.inference.text import Translator
from tformer_jax.models import registry

CANDIDATES = [
    "the cat sat",
    "the cat  sat down",
    "a dog",
    "the cat sat",
    "",
    "xyz",
    "den Hund",
    "ab",
    " the\tcats sat. ",
]


def sentence_chrf(output, reference):
    return sacrebleu.CHRF().sentence_score(output, [reference]).score


def test_chrf_of_all_pairs_equals_sacrebleu():
    expected = [[sentence_chrf(output, reference) for reference in CANDIDATES] for output in CANDIDATES]
    np.testing.assert_allclose(chrf_matrix(CANDIDATES), expected, atol=1e-10)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ab c"), rng.integers(0, 12))) for _ in range(40)]
    expected = [[sentence_chrf(output, reference) for reference in texts] for output in texts]
    np.testing.assert_allclose(chrf_matrix(texts), expected, atol=1e-10)


def test_the_first_has_the_highest_mean_chrf_and_repeated_texts_count_as_often():
    order = rank_by_risk(CANDIDATES)
    means = [np.mean([sentence_chrf(text, other) for other in CANDIDATES]) for text in CANDIDATES]
    assert sorted(order) == list(range(len(CANDIDATES)))
    assert [means[place] for place in order] == pytest.approx(sorted(means, reverse=True))
    assert rank_by_risk(["q", "r", "q"]) == [0, 2, 1]
    assert rank_by_risk([]) == []


@pytest.mark.parametrize("settings", rest_slow([{"strategy": "sample"}, {"strategy": "beam", "beams": 6}], 1))
def test_translations_are_the_best_of_all_candidates(settings):
    """Oracle: all outputs of the same seed, of which the mean chrF is computed one pair at a time."""
    cfg = setup("seq2seq")
    _, params = build(tiny("seq2seq"), seed=1)
    model, params = registry.build(cfg.model), params | {"head": {"bias": np.zeros(11, np.float32)}}

    def outputs(count, **options):
        decode = DecodeConfig(max_new_tokens=5, **options)
        translate = Translator(dataclasses.replace(cfg, decode=decode), model, TOKENIZERS)
        return [[each.text for each in row] for row in translate.stream(params, TEXTS, seed=3, outputs=count)]

    decoded = outputs(6, **settings)
    best = [max(row, key=lambda text: np.mean([sentence_chrf(text, other) for other in row])) for row in decoded]
    assert outputs(1, candidates=6, **settings) == [[text] for text in best]
    assert [sorted(row) for row in outputs(6, candidates=6, **settings)] == [sorted(row) for row in decoded]
    assert any(text != row[0] for text, row in zip(best, decoded, strict=True))


def test_candidates_need_several_outputs():
    with pytest.raises(UserError, match=r"decode.candidates=8: needs decode.strategy='sample' or 'beam'"):
        DecodeConfig(candidates=8)
    with pytest.raises(UserError, match="must not exceed decode.beams=4"):
        DecodeConfig(candidates=8, strategy="beam")
