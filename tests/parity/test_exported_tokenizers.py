"""Exported tokenizers of this package: transformers, and this package again, read the same ids from every text."""

import functools
import json

import pytest
import transformers

from tests.data.trained import trained_tokenizer
from tests.helpers import tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.exported import export_tokenizers
from tformer_jax.data.tokenizers.normalization import WHITESPACE
from tformer_jax.data.tokenizers.simple import WordTokenizer, byte_names
from tformer_jax.data.tokenizers.standalone import character_tokenizer
from tformer_jax.interop import hf

TEXTS = ("the cat sat", " the </s> cat<pad><mask>", "a\u2028b", "<unk>", "<extra_id_0> on", "")
WRITTEN = (
    *(*TEXTS, "  two  spaces ", "\tnew\n\nlines\r\n", "der Hund, die KATZE", "123 456.78", "isn't it?", "the+cat + +"),
    *("Ωμέγα 漢字 ไทย", "e\u0301 and \u00e9", "<|endoftext|> [CLS] [MASK] <s>", "a\x1cb\x85c\u3000d", "\U0001f600!"),
)


@pytest.fixture(scope="module", params=["bpe", "unigram", "wordpiece"])
def own(request):
    return trained_tokenizer(request.param, ["the cat sat on the mat"] * 9, 300)


KINDS = ("bpe", "unigram", "wordpiece", "bytes", "characters", "words")
SEQ2SEQ = ("t5", "bart", "marian")


@functools.cache
def trained(kind):
    texts = ["the cat sat on the mat", "der Hund, 1234 Ωμέγα 漢字 isn't", "\tnew <|endoftext|>"] * 9
    return trained_tokenizer(kind, texts, 400, split_digits=kind in ("bpe", "unigram"))


def added_tokens(objective):
    return kinds.load(kinds.OBJECTIVES, objective).added


def assert_equal_after_export(tokenizer, folder, model_type, family, texts=TEXTS):
    """Exports a tokenizer into `folder`, with the ids of `export_hf.py`, and reads it twice."""
    cfg = tiny(family, vocab_size=tokenizer.vocab_size)
    config = {"model_type": model_type, "vocab_size": cfg.vocab_size} | hf.token_ids(tokenizer.special, cfg)
    (folder / "config.json").write_text(json.dumps(config))
    pair = family == "seq2seq"
    assert export_tokenizers(folder, Tokenizers(tokenizer, tokenizer), model_type, pair=pair) is None
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    again = load_checkpoint_tokenizers(folder).target
    again = Tokenizers.from_json(json.loads(json.dumps(Tokenizers(again, again).to_json()))).target
    end = [tokenizer.special.eos[0]] if pair else []
    for text in texts:
        ids = [*tokenizer.encode(text), *end]
        assert theirs(text)["input_ids"] == ids, text
        assert [*again.special.before, *again.encode(text), *again.special.after] == ids, text
        written = tokenizer.decode(tokenizer.encode(text))
        assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == written, text
        assert again.decode(tokenizer.encode(text)) == written, text
    return theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", hf.ARCHITECTURES)
def test_every_architecture_reads_the_same_ids(model_type, kind, tmp_path):
    """Although transformers chooses a class of tokenizer by the type of the model."""
    family = "seq2seq" if model_type in SEQ2SEQ else "classifier" if model_type == "bert" else "decoder_lm"
    theirs = assert_equal_after_export(trained(kind), tmp_path, model_type, family, WRITTEN)
    assert theirs.decode([5, 260, 7, 300][: 1 + trained(kind).vocab_size // 100], skip_special_tokens=True) == (
        trained(kind).decode([5, 260, 7, 300][: 1 + trained(kind).vocab_size // 100])
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "bart"])
def test_a_tokenizer_that_cleans_white_space(model_type, kind, tmp_path):
    cleaning = trained(kind).normalized((WHITESPACE,), "")
    extended = cleaning.extended(added_tokens("masked_tokens"))
    family = "seq2seq" if model_type in SEQ2SEQ else "decoder_lm"
    theirs = assert_equal_after_export(extended, tmp_path, model_type, family, WRITTEN)
    assert theirs.convert_tokens_to_ids("<mask>") == extended.id_of("<mask>")
    assert extended.encode("  the\ncat ") == trained(kind).encode("the cat")


SYMBOLS = ("<b>", "<b></b>", "{0}", "\U000f0000", "≠≠")
WITH_SYMBOLS = (*WRITTEN, "the <b> cat<b></b> {0}\n\tsat", "<b>", " {0}{0} ", "x\U000f0000 ≠≠≠", "< b>{ 0}<b><\u200bb>")


@pytest.mark.parametrize("steps", [(), (WHITESPACE,)])
@pytest.mark.parametrize("kind", KINDS)
def test_symbols_are_added_tokens(kind, steps, tmp_path):
    with_symbols = trained(kind).with_symbols(SYMBOLS).normalized(steps, "").extended(added_tokens("masked_tokens"))
    assert_equal_after_export(with_symbols, tmp_path, "llama", "decoder_lm", WITH_SYMBOLS)


@pytest.mark.parametrize("symbol", ["%", "é"])
def test_a_symbol_that_the_library_reads_as_another_token_is_not_written(symbol, tmp_path):
    tokenizer = trained("bpe").with_symbols((symbol,))
    why_not = export_tokenizers(tmp_path, Tokenizers(tokenizer, tokenizer), "llama", pair=False)
    assert why_not == f"tokenizer.json cannot hold data.symbols with {symbol!r}"


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_vocabularies_of_characters(kind, byte_fallback, tmp_path):
    texts = ["the cat sat on the mat"] * 9 + ["1234 isn't Ωμέγα"]
    options = {"character_coverage": 0.99, "byte_fallback": byte_fallback, "symbols": ("<b>",)}
    tokenizer = trained_tokenizer(kind, texts, 400, **options)
    assert_equal_after_export(tokenizer, tmp_path, "llama", "decoder_lm", WITH_SYMBOLS)


def test_the_steps_that_cannot_be_written_are_named(tmp_path):
    normalized = trained("bpe").normalized((WHITESPACE, "nfkc"), "")
    why_not = export_tokenizers(tmp_path, Tokenizers(normalized, normalized), "llama", pair=False)
    assert why_not == "tokenizer.json cannot hold data.normalize=('nfkc',)"


def test_qwen2_reads_the_same_ids_with_trust_in_the_folder(tmp_path):
    tokenizer = trained("wordpiece")
    assert_equal_after_export(tokenizer, tmp_path, "qwen2", "decoder_lm", WRITTEN)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert [theirs(text)["input_ids"] for text in WRITTEN] == [tokenizer.encode(text) for text in WRITTEN]


@pytest.mark.parametrize("declared", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_checkpoint_of_qwen2_is_read_as_qwen2(declared, tmp_path):
    """Whatever its files declare; it is exported without code of its own."""
    library = transformers.Qwen2Tokenizer(*byte_level_vocabulary()).backend_tokenizer
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "qwen2", "vocab_size": 300, "eos_token_id": 256, "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared}))
    ours, theirs = load_checkpoint_tokenizers(tmp_path).target, transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [ours.encode(text) for text in WRITTEN] == theirs(list(WRITTEN))["input_ids"]
    (out := tmp_path / "out").mkdir()
    (out / "config.json").write_text(json.dumps(config))
    assert export_tokenizers(out, Tokenizers(ours, ours), "qwen2", pair=False) is None
    assert not (out / "exported_tokenizer.py").exists()
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again(list(WRITTEN))["input_ids"] == theirs(list(WRITTEN))["input_ids"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_tokenizer_that_transformers_rebuilds_for_qwen2(kind, tmp_path):
    """As written by other programs: of a BPE, the parts are replaced as transformers does; other kinds are refused."""
    export_tokenizers(tmp_path, Tokenizers(trained(kind), trained(kind)), "llama", pair=False)
    config = {"model_type": "qwen2", "vocab_size": 400, "eos_token_id": 2, "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind == "wordpiece":
        with pytest.raises(
            UserError, match="tokenizer.json has no BPE, from which transformers would build the tokenizer of Qwen"
        ):
            load_checkpoint_tokenizers(tmp_path)
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_checkpoint_tokenizers(tmp_path).target
    assert [ours.encode(text) for text in WRITTEN] == theirs(list(WRITTEN))["input_ids"]
    assert [ours.encode(text) for text in WRITTEN] != [trained(kind).encode(text) for text in WRITTEN]


def byte_level_vocabulary():
    """Returns a vocabulary of all bytes, an end and a merged token, and the merge."""
    vocab = {name: number for number, name in enumerate([*byte_names(), "<|endoftext|>", "th"])}
    return vocab, [("t", "h")]


def test_words_that_are_names_of_special_tokens_are_not_written(tmp_path):
    tokenizer = WordTokenizer(["<unk>", "cat", "the"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    why_not = export_tokenizers(tmp_path, Tokenizers(tokenizer, tokenizer), "gpt2", pair=False)
    assert why_not == "tokenizer.json cannot hold a tokenizer of the kind 'words' with these ids"


@pytest.mark.parametrize(
    ("model_type", "family"), [("llama", "decoder_lm"), ("bart", "seq2seq"), ("bert", "classifier")]
)
def test_names_of_special_tokens_in_a_text_are_text(own, model_type, family, tmp_path):
    assert_equal_after_export(own, tmp_path, model_type, family)


@pytest.mark.parametrize("objective", ["masked_tokens", "span_corruption"])
def test_tokens_that_an_objective_added(own, objective, tmp_path):
    extended = own.extended(added_tokens(objective))
    theirs = assert_equal_after_export(extended, tmp_path, "t5", "seq2seq")
    for name in added_tokens(objective):
        assert theirs.convert_tokens_to_ids(name) == extended.id_of(name)


def test_a_tokenizer_that_an_objective_did_not_extend(own, tmp_path):
    assert_equal_after_export(own.extended(()), tmp_path, "bert", "masked_lm")


@pytest.mark.parametrize("text", ["abc", "0123"])
def test_characters_without_an_end_are_read_again(text, tmp_path):
    """As of nanoGPT: no token ends a text, and there may be no letter a."""
    tokenizer = character_tokenizer(text)
    assert_equal_after_export(tokenizer, tmp_path, "gpt2", "decoder_lm", [text, text[1:] * 2])
    assert load_checkpoint_tokenizers(tmp_path).target.special.eos == (len(text),)
