"""Masks are filled with the most probable tokens of the model's logits, also with tokenizers that read no names."""

import dataclasses

import numpy as np
import pytest
import scipy.special

from tests.helpers import apply, build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference.batching import pad_rows
from tformer_jax.inference.encoding import LongTexts, TextError, encode_with_masks
from tformer_jax.inference.fill_mask import MaskFiller

TOKENIZER = CharacterTokenizer("abcde ").extended(["<mask>"])
CFG = Config(
    model=tiny("masked_lm", vocab_size=TOKENIZER.vocab_size, head_transform=True),
    data=DataConfig(source="text", train="-", batching="windows", window=16, objective="masked_tokens"),
    eval=EvalConfig(batch_size=2),
)
TOP = TOKENIZER.vocab_size
"""All tokens, so that the EOS token is among the fills."""


@pytest.fixture(scope="module")
def filler():
    model, params = build(CFG.model)
    return MaskFiller(CFG, model, Tokenizers(TOKENIZER, TOKENIZER), top=TOP), params


@pytest.mark.long
def test_fills_are_the_best_tokens_of_the_logits(filler):
    filler, params = filler
    texts = ["ab<mask>de", " ", "<mask><mask>c", "abcde<mask>"]
    mask, actual = TOKENIZER.id_of("<mask>"), list(filler.stream(params, texts))
    assert [len(fills) for fills in actual] == [TOP, 0, TOP, TOP]
    marked = (text.strip().replace("<mask>", "m") for text in texts)
    rows = [[mask if c == "m" else TOKENIZER.encode(c)[0] for c in text] for text in marked]
    tokens = pad_rows(rows, len(rows), 16)
    outputs = np.asarray(apply(filler.model, params, tokens, tokens >= 0))
    for ids, fills, logits in zip(rows, actual, outputs, strict=True):
        masks = [at for at, token in enumerate(ids) if token == mask]
        order = np.argsort(-logits[masks], axis=1)
        probabilities = scipy.special.softmax(logits[masks].astype(np.float64), axis=1)
        for rank, fill in enumerate(fills):
            best = order[:, rank]
            assert fill.tokens == tuple(TOKENIZER.special.name(i) or TOKENIZER.decode([i]) for i in best.tolist())
            assert abs(fill.probability - np.prod(probabilities[np.arange(len(masks)), best])) < 1e-6
            filled = np.array(ids)
            filled[masks] = best
            assert fill.text == "".join(TOKENIZER.decode([token], unknown="<unk>") for token in filled.tolist())


def test_rows_that_pad_the_vocabulary_are_no_fills():
    """Their probability counts: the others keep those of the model."""
    cfg = dataclasses.replace(CFG, model=tiny("masked_lm", vocab_size=TOP + 50, head_transform=True))
    model, params = build(cfg.model)
    filler = MaskFiller(cfg, model, Tokenizers(TOKENIZER, TOKENIZER), top=TOP)
    ((*fills,),) = filler.stream(params, ["ab<mask>de"])
    assert all(fill.tokens != ("",) for fill in fills)
    assert {fill.tokens[0] for fill in fills} >= {"a", "b", "c", "d", "e", "</s>"}
    assert sum(fill.probability for fill in fills) < 0.9
    with pytest.raises(UserError, match=f"top={TOP + 1}: must be from 1 to {TOP}, the vocabulary size"):
        MaskFiller(cfg, model, Tokenizers(TOKENIZER, TOKENIZER), top=TOP + 1)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_mask_includes_the_space_before_it_as_the_tokens_of_training_do(kind):
    """Masking the last token of `import os` in training, and asking for it, have the same input."""
    texts = [{"text": text} for text in ("import os", "import sys", "os sys import", "a a") * 20]
    data = dataclasses.replace(CFG.data, tokenizer=kind)
    words = train_tokenizers(dataclasses.replace(data, vocab_size=300), texts).target
    tokenizer = words.extended(["<mask>"])
    mask = tokenizer.id_of("<mask>")
    first, last = tokenizer.encode("import os")
    assert encode_with_masks(tokenizer, "import <mask>") == [first, mask]
    assert encode_with_masks(tokenizer, "<mask> os") == [mask, last]


def test_texts_that_cannot_be_filled(filler):
    filler, params = filler
    with pytest.raises(TextError, match="text 2: the text has no mask: write <mask> where a token is to be predicted"):
        list(filler.stream(params, ["a<mask>", "abc"]))
    with pytest.raises(TextError, match="the text has 17 tokens, but the model takes at most 16"):
        list(filler.stream(params, ["<mask>" + 16 * "a"]))
    (skipped,) = filler.stream(params, ["<mask>" + 16 * "a"], long_texts=LongTexts("skip"))
    assert skipped == []
    with pytest.raises(TextError, match="text 1: the text has no mask within the 16 tokens to which it is truncated"):
        list(filler.stream(params, [16 * "a" + "<mask>"], long_texts=LongTexts("truncate")))
    plain = CharacterTokenizer("abcde")
    with pytest.raises(UserError, match="the tokenizer of this run has no mask token"):
        MaskFiller(CFG, filler.model, Tokenizers(plain, plain), top=1)
