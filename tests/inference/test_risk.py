"""Minimum Bayes risk decoding: sacreBLEU's chrF between all candidates, and the choice of the most similar output."""

import dataclasses
import itertools

import numpy as np
import pytest
import sacrebleu

from tests.helpers import build, rest_slow, tiny
from tests.inference.test_text import TEXTS, TOKENIZERS, setup
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, kinds
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.requests import EncodedRequest
from tformer_jax.inference.risk import Utility, chrf_matrix
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
    order = Utility().rank("", CANDIDATES)
    means = [np.mean([sentence_chrf(text, other) for other in CANDIDATES]) for text in CANDIDATES]
    assert sorted(order) == list(range(len(CANDIDATES)))
    assert [means[place] for place in order] == pytest.approx(sorted(means, reverse=True))
    assert Utility().rank("", ["q", "r", "q"]) == [0, 2, 1]
    assert Utility().rank("", []) == Utility("ter").rank("", []) == []


SIMILARITIES = {
    "bleu": lambda _, text, other: sacrebleu.BLEU(effective_order=True).sentence_score(text, [other]).score,
    "ter": lambda _, text, other: -sacrebleu.TER().sentence_score(text, [other]).score,
    "chrf++": lambda _, text, other: sacrebleu.CHRF(word_order=2).sentence_score(text, [other]).score,
    "exact_match": lambda _, text, other: 100.0 * (text.split() == other.split()),
    "shared": lambda source, text, other: len({*source} & {*text} & {*other}),
}


def shared(sources, outputs, references):
    return [len({*a} & {*b} & {*c}) for a, b, (c,) in zip(sources, outputs, references, strict=True)]


@pytest.mark.parametrize("name", SIMILARITIES)
def test_any_metric_ranks_every_list_of_a_tiny_set_as_enumeration_does(name, monkeypatch):
    """All lists of up to three texts, with repetitions; a metric of its own reads the source, too."""
    monkeypatch.setitem(kinds.METRICS, "shared", shared)
    own, similarity = Utility(name), SIMILARITIES[name]
    texts, source = ["a dog", "a cat", "", "the cat"], "a d"
    value = {(a, b): similarity(source, a, b) for a in texts for b in texts}
    for row in itertools.chain.from_iterable(itertools.product(texts, repeat=count) for count in (1, 2, 3)):
        means = [np.mean([value[text, other] for other in row]) for text in row]
        order = own.rank(source, row)
        assert sorted(order) == list(range(len(row)))
        assert [means[place] for place in order] == pytest.approx(sorted(means, reverse=True))
    rows = [texts, texts[:2], []]
    for actual, own_texts in zip(own.matrices([source] * 3, rows), rows, strict=True):
        assert actual.tolist() == [pytest.approx([value[a, b] for b in own_texts]) for a in own_texts]


def test_outputs_are_ranked_by_the_metric_of_their_own_language():
    """Regression test: Chinese and Japanese outputs of models of many languages were one word for BLEU."""
    letters = CharacterTokenizer("ab").extended(["<2de>", "<2en>", "<2zh>"])
    files = {"train": ("{src}-{tgt}.tsv",), "validation": ("{src}-{tgt}.tsv",)}
    cfg = Config(
        data=DataConfig(source="tsv", **files, directions=("en-zh", "en-de")),
        decode=DecodeConfig(strategy="sample", candidates=3, utility="bleu"),
    )
    utility = Utility.of_run(cfg, Tokenizers(letters, letters))
    texts = ["他走了很远", "我吃了一个大苹果", "我吃了大苹果"]
    scorer = sacrebleu.BLEU(tokenize="zh", effective_order=True)
    means = [np.mean([scorer.sentence_score(text, [other]).score for other in texts]) for text in texts]
    best = sorted(range(3), key=lambda place: -means[place])
    tags = languages_of(letters)
    assert utility.rank_outputs(EncodedRequest([tags["zh"], *letters.encode("ab")]), texts, [True] * 3) == best
    assert best != [0, 1, 2]
    assert utility.rank_outputs(EncodedRequest([tags["de"], *letters.encode("ab")]), texts, [True] * 3) == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("settings", rest_slow([{"strategy": "sample"}, {"strategy": "beam", "beams": 6}], 1))
def test_translations_are_the_best_of_all_candidates(settings, monkeypatch):
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
    longest = [sorted(row, key=len)[-1] for row in decoded]
    monkeypatch.setitem(kinds.METRICS, "length", lambda sources, outputs, references: [len(text) for text in outputs])
    assert [len(row[0]) for row in outputs(1, candidates=6, utility="length", **settings)] == [*map(len, longest)]
    with pytest.raises(UserError, match="decode.utility='command': has settings in eval: add it to eval.metrics"):
        outputs(1, candidates=6, utility="command", **settings)
    with pytest.raises(UserError, match="off_target"):
        outputs(1, candidates=6, utility="off_target", **settings)


def test_candidates_need_several_outputs():
    with pytest.raises(UserError, match=r"decode.candidates=8: needs decode.strategy='sample' or 'beam'"):
        DecodeConfig(candidates=8)
    with pytest.raises(UserError, match=r"decode.utility='ter': compares candidates: write decode.candidates above 1"):
        DecodeConfig(utility="ter")
    with pytest.raises(UserError, match="must not exceed decode.beams=4"):
        DecodeConfig(candidates=8, strategy="beam")


def test_outputs_that_beam_search_adds_are_no_candidates():
    """Equal blank ones would be the most similar to each other."""
    texts = ["", "", "", "ab", "cd"]
    request = EncodedRequest([1], "x")
    assert Utility("exact_match").rank_outputs(request, texts, [True] * 5)[0] == 0
    assert Utility("exact_match").rank_outputs(request, texts, [False] * 3 + [True] * 2) == [3, 4, 0, 1, 2]
