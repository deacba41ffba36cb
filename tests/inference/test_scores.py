"""Log-probabilities of given outputs against float64 and against greedy decoding step by step."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import tokenizers as hf

from tests import oracles
from tests.helpers import assert_close, build, tiny
from tests.inference.test_text import LETTERS, TOKENIZERS, setup, without_start
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.standalone import character_tokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference import scores
from tformer_jax.inference.encoding import dropped_characters
from tformer_jax.inference.scores import Scorer
from tformer_jax.special_tokens import BOS, EOS, PAD, SpecialTokens

PAIRS = [("abc", "bd"), ("g", ""), ("", "fg"), ("abcdefgabcdefga", "a" * 15), ("fedcba", "gfedcbagf")]
TEXTS = [("abc",), ("",), ("g",), ("abcdefgabcdefgab" + "c",), ("fedcba",)]


@pytest.fixture(scope="module", params=["seq2seq", "decoder_lm"])
def scored(request):
    """Returns a family's config, model, examples and their scores."""
    cfg = setup(request.param)
    model, params = build(cfg.model, seed=1)
    examples = PAIRS if request.param == "seq2seq" else TEXTS
    return cfg, model, params, examples, list(Scorer(cfg, model, TOKENIZERS).stream(params, examples))


def log_softmax(logits):
    return np.log(oracles.softmax(logits))


def expected(cfg, params, example) -> tuple[list[int], np.ndarray]:
    """Returns one example's scored tokens and log-probabilities, by a float64 pass over that example only."""
    ids = LETTERS.encode(example[-1])
    if cfg.model.family == "seq2seq":
        source, target = np.array([[*LETTERS.encode(example[0]), EOS]]), [*ids, EOS]
        read = np.array([[BOS, *ids]])
        logits = oracles.seq2seq(oracles.f64(params), cfg.model, source, read, source != PAD, read != PAD)
    else:
        read, target = np.array([ids[:-1]], int).reshape(1, -1), ids[1:]
        if not target:
            return [], np.zeros(0)
        logits = oracles.decoder_lm(oracles.f64(params), cfg.model, read, read != PAD)
    return target, log_softmax(logits[0])[np.arange(len(target)), target]


def test_scores_equal_the_formulas(scored):
    cfg, _, params, examples, actual = scored
    for example, result in zip(examples, actual, strict=True):
        tokens, values = expected(cfg, params, example)
        assert result.tokens == tokens
        assert_close(result.log_probabilities, values, proves=(f"scores of {cfg.model.family}", "NumPy float64"))
        assert result.total == pytest.approx(values.sum(), rel=1e-5, abs=1e-6)


def test_a_target_of_the_maximum_length_is_scored_without_its_end():
    """Outputs may be as long; regression test: they were refused."""
    cfg = setup("seq2seq")
    model, params = build(cfg.model, seed=1)
    scorer, text = Scorer(cfg, model, TOKENIZERS), "abcdefgabcdefgab"
    (actual,) = scorer.stream(params, [("abc", text)])
    assert actual.tokens == LETTERS.encode(text)
    _, values = expected(cfg, params, ("abc", text[:-1]))
    assert_close(actual.log_probabilities[:-1], values[:-1], 1e-5)


def test_scores_do_not_depend_on_other_rows(scored):
    cfg, model, params, examples, actual = scored
    other = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, batch_size=8))
    backwards = list(Scorer(other, model, TOKENIZERS).stream(params, examples[::-1]))
    for mine, theirs in zip(actual, backwards[::-1], strict=True):
        assert mine.tokens == theirs.tokens
        assert_close(mine.log_probabilities, theirs.log_probabilities, 1e-6)


def test_a_text_with_a_character_outside_of_the_vocabulary_has_no_score():
    """Regression test: a tokenizer without unknown token dropped it, and the score was that of another text."""
    scorer = Scorer(setup("decoder_lm"), None, Tokenizers(*[character_tokenizer("abcdefg ")] * 2))
    for example, character in ((("ab", "zc"), "z"), (("ab\n",), "\n"), (("abé",), "é")):
        with pytest.raises(UserError, match=re.escape(f"text 1: has no probability: {character!r} is not in the voc")):
            list(scorer.stream(None, [example]))


def test_what_a_tokenizer_changes_is_not_dropped():
    """Names of special tokens, which decoding omits, and spaces that a normalization removes."""
    tokenizer = hf.Tokenizer(
        hf.models.BPE({c: i for i, c in enumerate(sorted(hf.pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = hf.pre_tokenizers.ByteLevel(), hf.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>"])
    special = SpecialTokens(names=((256, "<|user|>"),), start=256, eos=(256,), bos=None, pad=None, unknown=None)
    bytes_ = HFTokenizer(tokenizer, special)
    assert dropped_characters(bytes_, "<|user|> hé\n\n") == ""
    assert dropped_characters(character_tokenizer("ab ").normalized(("punctuation",), "en"), "a  b") == ""
    assert dropped_characters(character_tokenizer("ab ").normalized(("lowercase",), "en"), "A bC") == "c"


def test_a_continuation_of_an_empty_prompt_is_scored_whole_after_the_token_that_starts_texts():
    cfg = setup("decoder_lm")
    model, params = build(cfg.model, seed=1)
    (actual,) = Scorer(cfg, model, TOKENIZERS).stream(params, [("", "abc")])
    ids = LETTERS.encode("abc")
    read = np.array([[EOS, *ids[:-1]]])
    log_p = log_softmax(oracles.decoder_lm(oracles.f64(params), cfg.model, read, read != PAD)[0])
    assert actual.tokens == ids
    assert_close(actual.log_probabilities, log_p[np.arange(3), ids], 1e-5)
    with pytest.raises(UserError, match="text 2: the prompt has no token of its own, and the model has no token that"):
        list(Scorer(without_start(cfg), model, TOKENIZERS).stream(params, [("a", "b"), ("", "abc")]))


def test_skipped_results_are_left_out(scored):
    cfg, model, params, examples, actual = scored
    assert list(Scorer(cfg, model, TOKENIZERS).stream(params, iter(examples), skip=3)) == actual[3:]


def test_logits_are_computed_for_few_positions_at_once(scored, monkeypatch):
    cfg, model, params, examples, actual = scored
    monkeypatch.setattr(scores, "POSITIONS_AT_ONCE", 3)
    scores._label_scores.clear_cache()
    parts = list(Scorer(cfg, model, TOKENIZERS).stream(params, examples))
    scores._label_scores.clear_cache()
    for mine, theirs in zip(actual, parts, strict=True):
        assert_close(mine.log_probabilities, theirs.log_probabilities, 1e-6)


@pytest.mark.long
def test_the_score_of_greedy_output_is_the_sum_of_its_steps():
    """Each token is chosen by a cached step; the `top` tokens of a position are those of its step."""
    model, params = build(tiny("seq2seq"), seed=1)
    source = np.array([[5, 6, 7, EOS]], np.int32)

    @jax.jit
    def begin(source):
        memory = model.apply({"params": params}, source, None, method="encode")
        return model.apply({"params": params}, memory, None, 6, method="init_cache")

    @jax.jit
    def step(token, cache):
        return model.apply({"params": params}, token[None, None], cache, method="decode_step")

    cache, steps, ids = begin(source), [], []
    while len(ids) < 6 and EOS not in ids:
        logits, cache = step(np.int32(ids[-1] if ids else BOS), cache)
        steps.append(log_softmax(np.asarray(logits, np.float64)[0, 0]))
        ids.append(int(2 + steps[-1][2:].argmax()))  # neither PAD nor BOS is generated
    (actual,) = scores.score_rows(model, params, [scores.make_pair_row(source[0].tolist(), ids)], 1, top=3)
    assert_close(actual.log_probabilities, np.array(steps)[np.arange(len(ids)), ids], 1e-5)
    for top, values in zip(actual.top, steps, strict=True):
        most = np.argsort(-values)[:3]
        assert list(top) == most.tolist()
        assert_close(list(top.values()), values[most], 1e-5)


@pytest.mark.parametrize(
    ("family", "examples", "problem"),
    [
        ("seq2seq", [("a", "b"), ("a" * 16, "b")], "text 2: the source has 16 tokens, but the model takes at most 15"),
        ("seq2seq", [("a", "b" * 17)], "text 1: the target has 17 tokens, but the model takes at most 16"),
        ("decoder_lm", [("a" * 18,)], "text 1: the text has 18 tokens, but the model takes at most 17"),
    ],
)
def test_what_does_not_fit(family, examples, problem):
    cfg = setup(family)
    model, params = build(cfg.model)
    actual = Scorer(cfg, model, TOKENIZERS).stream(params, examples)
    if len(examples) > 1:
        next(actual)
    with pytest.raises(UserError, match=problem):
        next(actual)


def test_a_token_across_the_end_of_a_prompt_is_scored():
    """BPE joins the last space of a prompt with the next word."""
    corpus = ["the answer is yes", "the answer is no"] * 20
    tokenizer = train_tokenizers(
        DataConfig(tokenizer="bpe", vocab_size=300), [{"text": text} for text in corpus]
    ).target
    cfg = setup("decoder_lm")
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=tokenizer.vocab_size))
    model, params = build(cfg.model)
    pairs = [("the answer is ", "yes"), ("the answer is", " yes"), ("", "yes"), ("yes", "")]
    assert len(tokenizer.encode(pairs[0][0])) == len(tokenizer.encode("".join(pairs[0])))
    actual = list(Scorer(cfg, model, Tokenizers(tokenizer, tokenizer)).stream(params, pairs))
    for (prompt, continuation), scored in zip(pairs, actual, strict=True):
        text = tokenizer.decode(scored.tokens)
        assert (prompt + continuation).endswith(text)
        assert len(text) >= len(continuation) or not prompt
    assert actual[0].tokens == actual[1].tokens
    assert_close(actual[0].log_probabilities, actual[1].log_probabilities, 1e-6)
    assert actual[-1].tokens == []
