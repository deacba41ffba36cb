"""Pre-training objectives: examples by hand, sizes of T5, shares over many examples, and texts restored exactly."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest

from tests.data.objectives import FIRST, KINDS, LETTERS, MASK, built, extended
from tests.data.trained import trained_tokenizer
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, NoiseConfig
from tformer_jax.data.objectives.denoising import Denoising, draw_span_lengths
from tformer_jax.data.objectives.span_corruption import SpanCorruption, draw_parts
from tformer_jax.data.objectives.vocabulary import Vocabulary
from tformer_jax.data.tokenizers import Tokenizers, from_json
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.special_tokens import BOS, EOS, IGNORED, SpecialTokens


def examples(objective, count: int = 200):
    """Yields random texts that fill a row, and what the objective makes of them."""
    rng = np.random.default_rng(0)
    for seed in range(count):
        ids = rng.integers(FIRST, MASK, objective.tokens, dtype=np.int32)
        yield ids, objective(ids, np.random.default_rng(seed))


class Scripted:
    """A generator whose draws are given."""

    def __init__(self, **draws):
        self._draws = {name: iter(values) for name, values in draws.items()}

    def __getattr__(self, name):
        return lambda *_, **__: np.array(next(self._draws[name]))


class TestByHand:
    def test_masked_tokens(self):
        ids = np.array([5, 6, 7, EOS, 9, 10, 11, 12], np.int32)  # five positions of [0, 1, 2, 4, 5, 6, 7] are chosen
        rng = Scripted(choice=[[6, 0, 4, 1, 7], [20, 21, 22, 23, 24]], random=[[0.79, 0.81, 0.95, 0.89, 0.1]])
        actual = built("masked_tokens", 8, density=0.45)(ids, rng)
        np.testing.assert_array_equal(actual["tokens"], [21, 23, 7, EOS, 9, 10, MASK, MASK])
        np.testing.assert_array_equal(actual["targets"], [5, 6, -1, -1, 9, -1, 11, 12])

    def test_span_corruption(self):
        # 12 tokens: round(12 * 0.4) = 5 of noise in round(5 / 2.5) = 2 spans; 7 stay: 3 and 4; 5 in spans: 1 and 4
        ids = np.arange(10, 22, dtype=np.int32)
        objective = built("span_corruption", 10, density=0.4, mean_span=2.5)
        assert (objective.tokens, objective.lengths["source"], objective.lengths["target_out"]) == (12, 10, 8)
        actual = objective(ids, Scripted(choice=[[2], [0]]))
        first, second = MASK, MASK + 1
        np.testing.assert_array_equal(actual["source"], [10, 11, 12, first, 14, 15, 16, 17, second, EOS])
        np.testing.assert_array_equal(actual["target_in"], [BOS, first, 13, second, 18, 19, 20, 21])
        np.testing.assert_array_equal(actual["target_out"], [first, 13, second, 18, 19, 20, 21, EOS])

    def test_denoising(self):
        # round(10 * 0.3) = 3 of noise: spans of 2, 0 and 1 (of a drawn 4) after 1, 4 and 7 of the 7 tokens that stay
        ids = np.arange(10, 20, dtype=np.int32)
        actual = built("denoising", 11, density=0.3)(ids, Scripted(poisson=[2, 0, 4], choice=[[7, 1, 4]]))
        np.testing.assert_array_equal(actual["source"], [10, MASK, 13, 14, 15, MASK, 16, 17, 18, MASK, EOS])
        np.testing.assert_array_equal(actual["target_in"], [BOS, *ids])
        np.testing.assert_array_equal(actual["target_out"], [*ids, EOS])

    def test_permuted_sentences(self):
        tokenizer = CharacterTokenizer(LETTERS)
        ids = np.array(tokenizer.encode("ab. c!de"), np.int32)
        objective = built("denoising", 9, inner=tokenizer, permute_sentences=True)
        rng = Scripted(permutation=[[2, 0, 1]], poisson=[1], choice=[[7]])
        assert objective(ids, rng)["source"].tolist() == [*tokenizer.encode("deab. c"), MASK, EOS]


@pytest.mark.parametrize(
    ("window", "density", "mean_span", "tokens", "target"),
    [(512, 0.15, 3.0, 568, 114), (3, 0.15, 3.0, 2, 3)],  # of T5's own settings; by hand
)
def test_the_sizes_of_t5(window, density, mean_span, tokens, target):
    sizes = NoiseConfig(density=density, mean_span=mean_span).longest_spans(window)
    assert (sizes.tokens, sizes.source, sizes.target) == (tokens, window, target)


@pytest.mark.parametrize("tokens", [2, 3, 10, 34, 37, 568])
@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.49, 1.0), (0.3, 10.0)])
def test_span_sizes_are_those_of_the_formula(tokens, density, mean_span):
    """`random_spans_noise_mask`: round(length * density) tokens of noise in round(noise / mean) spans."""
    noise = min(max(int(np.round(tokens * density)), 1), tokens - 1)
    spans = min(max(int(np.round(noise / mean_span)), 1), tokens - noise)
    sizes = NoiseConfig(density=density, mean_span=mean_span).span_sizes(tokens)
    assert (sizes.noise, sizes.spans) == (noise, spans)
    assert sizes.target <= sizes.source == tokens - noise + spans + 1


class TestRestored:
    """Inputs and labels together are the text."""

    @pytest.mark.parametrize("whole_words", [False, True])
    def test_masked_tokens(self, whole_words):
        for ids, actual in examples(built("masked_tokens", whole_words=whole_words)):
            chosen = actual["targets"] != IGNORED
            np.testing.assert_array_equal(np.where(chosen, actual["targets"], actual["tokens"]), ids)

    @pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.49, 1.0), (0.01, 9.0)])
    def test_span_corruption(self, density, mean_span):
        objective = built("span_corruption", 64, density=density, mean_span=mean_span)
        for ids, actual in examples(objective):
            source, target = actual["source"].tolist(), actual["target_out"].tolist()
            assert {key: len(row) for key, row in actual.items()} == objective.lengths
            assert actual["target_in"].tolist() == [BOS, *target[:-1]]
            spans: dict[int, list[int]] = {}
            for token in target[:-1]:
                if token >= MASK:
                    spans[token] = []
                else:
                    spans[list(spans)[-1]].append(token)
            assert [token for token in source if token >= MASK] == list(spans) == [MASK + n for n in range(len(spans))]
            assert all(spans.values())
            restored = [part for token in source[:-1] for part in spans.get(token, [token])]
            assert (restored, source[-1], target[-1]) == (ids.tolist(), EOS, EOS)

    @pytest.mark.parametrize(("density", "mean_span"), [(0.3, 3.0), (0.49, 1.0)])
    def test_denoising(self, density, mean_span):
        objective = built("denoising", density=density, mean_span=mean_span)
        for ids, actual in examples(objective):
            source = actual["source"].tolist()
            assert actual["target_out"].tolist() == [*ids, EOS]
            assert actual["target_in"].tolist() == [BOS, *ids]
            assert len(source) <= 64
            assert source[-1] == EOS
            remaining = iter(ids.tolist())
            left = [token for token in source[:-1] if token != MASK]
            assert all(token in remaining for token in left)  # a subsequence
            assert len(left) == len(ids) - round(density * len(ids))
            assert (MASK, MASK) not in itertools.pairwise(source)  # a token stays between two spans

    def test_permuted_sentences_are_those_of_the_text(self):
        objective, stop = built("denoising", permute_sentences=True), CharacterTokenizer(LETTERS).encode(".")[0]
        sentences = [[5, 6, stop], [7, stop], [8, 9, 10, stop], [stop]]
        ids = np.concatenate(sentences, dtype=np.int32)
        orders = {tuple(objective._permute_sentences(ids, np.random.default_rng(seed)).tolist()) for seed in range(500)}
        assert orders == {tuple(itertools.chain(*order)) for order in itertools.permutations(sentences)}

    @pytest.mark.parametrize("objective", KINDS)
    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_short_texts(self, objective, size):
        ids = np.arange(FIRST, FIRST + size, dtype=np.int32)
        for seed in range(20):
            actual = built(objective)(ids, np.random.default_rng(seed))
            assert set(ids) <= set(np.concatenate(list(actual.values())))


class TestShares:
    def test_15_percent_of_which_80_10_10(self):
        chosen, masked, same, total, places = 0, 0, 0, 0, np.zeros(64)
        for ids, actual in examples(built("masked_tokens"), 2000):
            at = actual["targets"] != IGNORED
            assert at.sum() == 10  # round(0.15 * 64)
            chosen, total, places = chosen + at.sum(), total + len(ids), places + at
            masked += (actual["tokens"][at] == MASK).sum()
            same += (actual["tokens"] == ids)[at].sum()
        assert chosen / total == pytest.approx(0.15, abs=0.01)
        assert masked / chosen == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / chosen))
        expected = 0.1 + 0.1 / len(LETTERS)  # a random token may be the same
        assert same / chosen == pytest.approx(expected, abs=4 * math.sqrt(expected / chosen))
        assert np.abs(places / 2000 - 10 / 64).max() < 4.5 * math.sqrt(10 / 64 / 2000)

    def test_random_replacements_are_ordinary_tokens(self):
        objective, replacements = built("masked_tokens"), collections.Counter()
        for ids, actual in examples(objective, 2000):
            replacements.update(actual["tokens"][(actual["tokens"] != ids) & (actual["tokens"] != MASK)].tolist())
        assert set(replacements) == set(range(FIRST, MASK))

    def test_spans_have_the_mean_length(self):
        lengths = [draw_span_lengths(300, 3.0, np.random.default_rng(seed)) for seed in range(50)]
        assert {row.sum() for row in lengths} == {300}
        drawn = np.concatenate([row[:-1] for row in lengths])
        assert drawn.mean() == pytest.approx(3.0, abs=0.1)
        assert drawn.var() == pytest.approx(3.0, abs=0.3)  # of Poisson
        assert (drawn == 0).mean() == pytest.approx(math.exp(-3), abs=0.015)

    def test_each_division_is_as_probable(self):
        rng = np.random.default_rng(0)
        counts = collections.Counter(tuple(draw_parts(6, 3, rng).tolist()) for _ in range(5000))
        assert len(counts) == math.comb(5, 2)
        assert all(min(parts) > 0 and sum(parts) == 6 for parts in counts)
        assert max(abs(count / 5000 - 0.1) for count in counts.values()) < 4 * math.sqrt(0.09 / 5000)

    def test_special_tokens_stay(self):
        objective = built("masked_tokens", density=0.4)
        ids = np.array([5, EOS, 6, EOS] * 16, np.int32)
        actual = objective(ids, np.random.default_rng(0))
        assert (actual["tokens"][1::2] == EOS).all()
        assert (actual["targets"][1::2] == IGNORED).all()


class TestWholeWords:
    TEXT = "the tokenizers, of  words_2 and\nnumbers: 31415 été"
    WORDS = ("the", "tokenizers", ",", "of", "words_2", "and", "numbers", ":", "31415", "été")

    @pytest.mark.parametrize("kind", ["bytes", "bpe", "wordpiece", "unigram"])
    def test_words_are_masked_as_a_whole(self, kind):
        texts, size = (["the words", "tokens and numbers"], 300) if kind != "wordpiece" else ([self.TEXT], 60)
        inner = ByteTokenizer() if kind == "bytes" else trained_tokenizer(kind, texts, size)
        words = " ".join(self.WORDS).replace("_", " _ ").split() if kind == "wordpiece" else self.WORDS
        objective = built("masked_tokens", 128, inner, whole_words=True, density=0.3)
        ids = np.array(inner.encode(self.TEXT), np.int32)
        assert len(ids) > len(self.WORDS) + 4
        for seed in range(50):
            chosen = objective(ids, np.random.default_rng(seed))["targets"] != IGNORED
            assert 0 < chosen.sum() <= max(round(0.3 * len(ids)), 1)
            left = inner.decode([token for token, gone in zip(ids.tolist(), chosen, strict=True) if not gone])
            assert "".join(left.split()) in subsequences(words), (left, seed)

    def test_a_word_that_is_too_long_is_masked_alone(self):
        objective = built("masked_tokens", whole_words=True)
        ids = np.array(CharacterTokenizer(LETTERS).encode("abcdefgh"), np.int32)
        assert (objective(ids, np.random.default_rng(0))["targets"] == ids).all()


def subsequences(words) -> set[str]:
    actual = {""}
    for word in words:
        actual |= {text + word for text in actual}
    return actual


class TestTokenizer:
    def test_added_tokens(self):
        inner = CharacterTokenizer("ab")
        tokenizer = from_json(extended("span_corruption", inner).to_json())
        assert tokenizer.to_json() == extended("span_corruption", inner).to_json()
        assert tokenizer.vocab_size == 6 + 100
        assert (tokenizer.id_of("<extra_id_0>"), tokenizer.id_of("<extra_id_99>")) == (6, 105)
        assert tokenizer.encode("ab") == inner.encode("ab") == [4, 5]
        assert tokenizer.encode_batch(["b", ""]) == [[5], []]
        assert tokenizer.decode([4, 6, 5, 7, EOS, 4]) == "ab"

    def test_special_tokens_of_a_published_vocabulary_are_used(self):
        """Nothing is appended, so that published embeddings fit; they surround sources and targets."""

        class Published(CharacterTokenizer):
            special = SpecialTokens(((4, "[MASK]"), (5, "[SEP]")), start=7, eos=(5,), before=(6,), after=(5,))

        inner = Published("mebcdf")
        tokenizer = inner.extended(KINDS["denoising"].added)
        assert (tokenizer.vocab_size, tokenizer.id_of("<mask>")) == (inner.vocab_size, 4)
        vocabulary = Vocabulary(tokenizer)
        assert np.flatnonzero(~vocabulary.ordinary).tolist() == [4, 5]
        cfg = DataConfig(objective="denoising", window=8, batching="windows")
        objective = Denoising.build(cfg, vocabulary)
        ids = np.array([8, 9] * 3, np.int32)
        assert objective.tokens == len(ids)
        actual = objective(ids, np.random.default_rng(0))
        assert actual["target_out"].tolist() == [6, *ids, 5]
        assert actual["target_in"].tolist() == [7, 6, *ids]
        assert (actual["source"][0], actual["source"][-1]) == (6, 5) and 4 in actual["source"]
        assert max(map(len, actual.values())) <= objective.lengths["source"] == 8
        spans = inner.extended(KINDS["span_corruption"].added)
        assert (spans.vocab_size, spans.special.name(spans.id_of("<extra_id_1>"))) == (
            inner.vocab_size + 100,
            "<extra_id_1>",
        )
        framed = SpanCorruption.build(dataclasses.replace(cfg, objective="span_corruption"), Vocabulary(spans))
        actual = framed(np.full(framed.tokens, 8, np.int32), np.random.default_rng(0))
        assert {key: len(row) for key, row in actual.items()} == framed.lengths
        assert len(actual["source"]) <= 8

    @pytest.mark.parametrize(
        ("objective", "size"), [(None, 7), ("masked_tokens", 7), ("denoising", 7), ("span_corruption", 107)]
    )
    def test_a_run_keeps_the_vocabulary_of_another(self, tmp_path, objective, size):
        """Parameters that `train.start_from` loads need the same ids; tokens that are missing are appended."""
        before = extended("masked_tokens", CharacterTokenizer("ab"))
        Tokenizers(before, before).save(tmp_path)
        cfg = DataConfig(
            source="stdlib_text",
            objective=objective,
            batching="windows",
            tokenizer="file",
            tokenizer_file="target.json",
        )
        tokenizer = train_tokenizers(cfg, [{"text": "abc"}], tmp_path).target
        assert (tokenizer.vocab_size, tokenizer.encode("ab"), tokenizer.id_of("<mask>")) == (size, [4, 5], 6)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"objective": "masked_token"}, "data.objective='masked_token': is not a known value; did you mean"),
        ({"objective": "masked_tokens"}, r"data.objective='masked_tokens': must be one of \(None, 'span_corruption'"),
        ({"objective": "denoising", "batching": "buckets"}, r"must be one of \('windows',\) for data.objective='deno"),
        ({"objective": "denoising", "source": "parallel_lines", "train": "{lang}"}, "'parallel_lines': does not fit d"),
        ({"objective": "span_corruption", "window": 2}, "data.window=2: must be at least 3 for data.objective='span_"),
        (
            {"objective": "span_corruption", "window": 2000},
            "needs 111 sentinels, but there are only 100; increase ",
        ),
        ({"noise": {"density": 0.3}}, "data.noise.density=0.3: is used only by data.objective='masked_tokens' or "),
        ({"objective": "denoising", "noise": {"whole_words": True}}, "is used only by data.objective='masked_tokens'"),
        ({"objective": "denoising", "noise": {"density": 0.0}}, "data.noise.density=0.0: must be above 0"),
        ({"objective": "denoising", "noise": {"density": 0.5}}, "data.noise.density=0.5: must be at most 0.49"),
    ],
)
def test_settings_that_do_not_fit(values, sentence):
    usual = {"batching": "windows", "source": "stdlib_text"} if "objective" in values else {}
    with pytest.raises(UserError, match=sentence) as caught:
        Config.from_dict({"model": {"max_length": 2000}, "data": usual | values})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "data.objective=None: must be one of .'masked_tokens',. for model.family='masked_lm'"),
        ({"train": {"metric": "bleu"}, "data": {"objective": "masked_tokens"}}, "train.metric='bleu': must be one of"),
    ],
)
def test_masked_language_models_need_their_objective(values, sentence):
    data = {"batching": "windows", "source": "stdlib_text", **values.get("data", {})}
    with pytest.raises(UserError, match=sentence):
        Config.from_dict({"model": {"family": "masked_lm"}, **values, "data": data})
