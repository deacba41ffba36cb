"""Empty prompts: the token that a text starts after, and outputs that begin without a space."""

import dataclasses

import numpy as np
import pytest

from tests import oracles
from tests.helpers import build
from tests.inference.test_text import LETTERS, TOKENIZERS, setup, without_start
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.encoding import start_of_text
from tformer_jax.inference.text import TextGenerator
from tformer_jax.special_tokens import BOS, EOS, PAD, PAD_TOKEN, SpecialTokens


@pytest.mark.long
def test_an_empty_prompt_continues_after_the_token_that_starts_texts():
    """The end of the previous document, in training on windows; each token is the best one by a float64 pass."""
    cfg = setup("decoder_lm")
    model, params = build(cfg.model, seed=5)  # a seed for which other first tokens have other outputs
    (text,) = TextGenerator(cfg, model, TOKENIZERS)(params, [""])
    ids = LETTERS.encode(text)
    read = np.array([[EOS, *ids]])
    logits = oracles.decoder_lm(oracles.f64(params), cfg.model, read, read != PAD)[0]
    logits[:, [PAD_TOKEN, BOS]] = -np.inf
    assert logits.argmax(axis=-1).tolist() == [*ids, EOS]
    assert ids


class WithSpaces(CharacterTokenizer):
    """Writes a space before each letter but the first, as SentencePiece does for words."""

    special = dataclasses.replace(CharacterTokenizer.special, context=LETTERS.encode("a")[0])
    separator = " "


def test_an_output_of_an_empty_prompt_is_no_continuation():
    cfg, tokenizer = setup("decoder_lm"), WithSpaces("abcdefg")
    model, params = build(cfg.model, seed=5)
    for stop in ((), ("gggg",)):  # at once, and as a stream
        decode = dataclasses.replace(cfg.decode, stop=stop)
        generate = TextGenerator(dataclasses.replace(cfg, decode=decode), model, Tokenizers(tokenizer, tokenizer))
        empty, other, unknown = generate(params, ["", "a", "x"])
        assert empty and not empty.startswith(" ") and other.startswith(" ")
        assert unknown.startswith(" "), "an unknown token is text, too"


@pytest.mark.parametrize(
    ("special", "batching", "expected"),
    [
        (SpecialTokens(before=(7,)), "windows", (7,)),
        (SpecialTokens(bos=5, suppressed=()), "windows", (5,)),
        (SpecialTokens(bos=5, suppressed=()), "packed", (5,)),
        (SpecialTokens(), "windows", (EOS,)),
        (SpecialTokens(), "packed", ()),
        (SpecialTokens(bos=None, eos=(11,)), "windows", ()),
        (SpecialTokens(bos=11, eos=(11,), suppressed=()), "windows", ()),
    ],
)
def test_the_token_that_starts_texts(special, batching, expected):
    """The vocabulary has ids 0 to 10."""
    cfg, tokenizer = setup("decoder_lm"), CharacterTokenizer("abcdefg")
    tokenizer.special = special
    assert start_of_text(cfg if batching == "windows" else without_start(cfg), tokenizer) == expected
