"""Exported tokenizers of this package: transformers, and this package again, read the same ids from every text."""

import json

import pytest
import transformers

from tests.helpers import tiny
from tformer_jax.data.tokenizers import Tokenizers, load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.exported import save_tokenizers
from tformer_jax.data.tokenizers.extended import ADDED, ExtendedTokenizer
from tformer_jax.data.tokenizers.standalone import characters
from tformer_jax.data.tokenizers.subword import SubwordTokenizer
from tformer_jax.interop import hf

TEXTS = ("the cat sat", " the </s> cat<pad><mask>", "a\u2028b", "<unk>", "<extra_id_0> on", "")


@pytest.fixture(scope="module", params=["bpe", "unigram", "wordpiece"])
def own(request):
    return SubwordTokenizer.train(request.param, ["the cat sat on the mat"] * 9, 300, split_digits=False)


def assert_equal_after_export(tokenizer, folder, model_type, family, texts=TEXTS):
    """Exports a tokenizer into `folder`, with the ids of `export_hf.py`, and reads it twice."""
    cfg = tiny(family, vocab_size=tokenizer.vocab_size)
    config = {"model_type": model_type, "vocab_size": cfg.vocab_size} | hf.token_ids(tokenizer.special, cfg)
    (folder / "config.json").write_text(json.dumps(config))
    pair = family == "seq2seq"
    assert save_tokenizers(folder, Tokenizers(tokenizer, tokenizer), model_type, pair=pair) is None
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    again = load_checkpoint_tokenizers(folder).target
    again = Tokenizers.from_json(json.loads(json.dumps(Tokenizers(again, again).to_json()))).target
    end = [tokenizer.special.eos[0]] if pair else []
    for text in texts:
        ids = [*tokenizer.encode(text), *end]
        assert theirs(text)["input_ids"] == ids, text
        assert [*again.special.before, *again.encode(text), *again.special.after] == ids, text
    return theirs


@pytest.mark.parametrize(
    ("model_type", "family"), [("llama", "decoder_lm"), ("bart", "seq2seq"), ("bert", "classifier")]
)
def test_names_of_special_tokens_in_a_text_are_text(own, model_type, family, tmp_path):
    assert_equal_after_export(own, tmp_path, model_type, family)


@pytest.mark.parametrize("objective", ["masked_tokens", "span_corruption"])
def test_tokens_that_an_objective_added(own, objective, tmp_path):
    extended = ExtendedTokenizer.of(own, ADDED[objective])
    theirs = assert_equal_after_export(extended, tmp_path, "t5", "seq2seq")
    for name in ADDED[objective]:
        assert theirs.convert_tokens_to_ids(name) == extended.id_of(name)


def test_a_tokenizer_that_an_objective_did_not_extend(own, tmp_path):
    assert_equal_after_export(ExtendedTokenizer.of(own, ()), tmp_path, "bert", "masked_lm")


@pytest.mark.parametrize("text", ["abc", "0123"])
def test_characters_without_an_end_are_read_again(text, tmp_path):
    """As of nanoGPT: no token ends a text, and there may be no letter a."""
    tokenizer = characters(text)
    assert_equal_after_export(tokenizer, tmp_path, "gpt2", "decoder_lm", [text, text[1:] * 2])
    assert load_checkpoint_tokenizers(tmp_path).target.special.eos == (len(text),)
