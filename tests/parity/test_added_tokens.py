"""Tokens that a folder with a SentencePiece model adds to its pieces have the ids of transformers."""

import io
import json
import pickle

import pytest
import sentencepiece
import transformers

from tests.parity import checkpoints, multilingual
from tests.parity.checkpoints import TEXTS
from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.base import SENTINEL_TOKENS
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.exported import export_tokenizers

T5 = {"model_type": "t5", "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
LLAMA = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {"model_type": "gemma2", "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PADDED = ROLES | {"pad_token": "<fill>"}
CLASS = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}


def token(name, **flags):
    return {"content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | flags


def decoder(size):
    tokens = [token("<|im_start|>", special=True), token("<|im_end|>", special=True, rstrip=True)]
    tokens += [token("<think>", special=False), token("<left>", special=True, lstrip=True), token("<fill>")]
    return {"added_tokens_decoder": {str(size + i): fields for i, fields in enumerate(tokens)}}


FOLDERS = {
    "t5, no other file": (T5, lambda size: {}),
    "t5, named": (
        T5,
        lambda size: {"tokenizer_config.json": {"extra_ids": 100, "additional_special_tokens": [*SENTINEL_TOKENS]}},
    ),
    "t5, another number": (T5, lambda size: {"tokenizer_config.json": {"extra_ids": 7}}),
    "llama": (LLAMA, lambda size: {"tokenizer_config.json": CLASS | ROLES | decoder(size) | {"legacy": False}}),
    "llama, legacy": (LLAMA, lambda size: {"tokenizer_config.json": CLASS | PADDED | decoder(size) | {"legacy": True}}),
    "llama, older files": (
        LLAMA,
        lambda size: {
            "added_tokens.json": {"<|im_start|>": size, "<think>": size + 1},
            "special_tokens_map.json": {"pad_token": "<|im_start|>"},
            "tokenizer_config.json": CLASS | ROLES,
        },
    ),
    "gemma": (
        GEMMA,
        lambda size: {
            "tokenizer_config.json": ROLES
            | decoder(size)
            | {"tokenizer_class": "GemmaTokenizer", "pad_token": "<pad>", "mask_token": "<mask>", "add_bos_token": True}
        },
    ),
    "llama, a name": (LLAMA, lambda size: {"tokenizer_config.json": CLASS | ROLES | {"pad_token": "<|im_start|>"}}),
}
PROMPTS = [
    "the <extra_id_0> sat on <extra_id_1>",
    "<extra_id_6>the cat<extra_id_99> dog <extra_id_100>",
    "<|im_start|>the cat<|im_end|> \n <left>dog",
    "the <|im_start|> cat <left> <think>dog</think> and<think> a",
    "<|im_start|><|im_end|>",
    "the </s> cat<unk>dog",
    "the<fill> cat",
    "Ω<think>Ω",
    "",
    " the cat",
    "  the  <think>  cat ",
    " ",
]


EXACT = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "normalization_rule_name": "identity"}
EXACT |= {"remove_extra_whitespaces": False}
TRAINED = {
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 40},
    "llama": EXACT,
    "gemma2": EXACT | {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
}
"""Settings of SentencePiece models by the `model_type` whose models have them."""


def train(texts=TEXTS, **options) -> bytes:
    model, limits = io.BytesIO(), {"hard_vocab_limit": False, "minloglevel": 9}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **limits, **options)
    return model.getvalue()


@pytest.fixture(scope="module")
def models():
    return {kind: train(**options) for kind, options in TRAINED.items()}


def write(folder, model, config, files):
    (folder / ("spiece.model" if config["model_type"] == "t5" else "tokenizer.model")).write_bytes(model)
    for name, content in ({"config.json": config} | files).items():
        (folder / name).write_text(json.dumps(content))


def assert_equal(ours, theirs):
    assert ours.vocab_size == len(theirs)
    for text in PROMPTS:
        ids = theirs(text)["input_ids"]
        assert ours.special.wrap_text(ours.encode(text)) == ids
        if "</s>" not in text:  # which ends our decoding
            expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_texts_are_those_of_transformers(models, name, tmp_path):
    """Also after they are saved in a run and after they are exported."""
    config, files = FOLDERS[name]
    model = models[config["model_type"]]
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    write(tmp_path, model, config, files(size))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pair = load_checkpoint_tokenizers(tmp_path)
    assert_equal(pair.source, theirs)
    assert_equal(Tokenizers.from_json(json.loads(json.dumps(pair.to_json()))).target, theirs)
    assert_equal(pickle.loads(pickle.dumps(pair.target)), theirs)
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps(config))
    assert export_tokenizers(exported, pair, config["model_type"], pair=config is T5) is None
    assert_equal(pair.source, transformers.AutoTokenizer.from_pretrained(exported))
    assert_equal(load_checkpoint_tokenizers(exported).source, theirs)


def test_special_tokens_from_a_size_on_are_left_out(models, tmp_path):
    write(tmp_path, models["t5"], T5, {})
    whole = load_checkpoint_tokenizers(tmp_path).target
    cut = whole.without_added(whole.vocab_size - 1)
    assert cut.vocab_size == whole.vocab_size - 1
    text = "the <extra_id_1> cat"
    assert cut.encode(text) == whole.encode(text)
    assert max(cut.encode("the <extra_id_0> cat")) < whole.vocab_size - 100
    assert not {name for _, name in cut.special.names} & {"<extra_id_0>"}


def test_span_corruption_uses_the_sentinels_of_t5(models, tmp_path):
    write(tmp_path, models["t5"], T5, {})
    tokenizer = load_checkpoint_tokenizers(tmp_path).target
    extended = tokenizer.extended(SENTINEL_TOKENS)
    assert extended.vocab_size == tokenizer.vocab_size
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [extended.id_of(name) for name in SENTINEL_TOKENS] == theirs.convert_tokens_to_ids([*SENTINEL_TOKENS])
    assert extended.id_of("<extra_id_0>") == extended.vocab_size - 1


@pytest.mark.parametrize(
    "text", ["the cat", "a </s> cat", "the<unk> cat", "a<pad>b  c", ">>fr<< the cat", " <unk> the"]
)
def test_names_of_special_tokens_in_texts_of_marian(text, tmp_path):
    checkpoints.marian(tmp_path)
    tokenizer = load_checkpoint_tokenizers(tmp_path).source
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert [*tokenizer.encode(text), *tokenizer.special.after] == theirs


ADDED = [token("<br>"), token("<left>", lstrip=True), token("<both>", lstrip=True, rstrip=True)]
ADDED += [token("<ph>", special=True), token("<end>", special=True, rstrip=True), token("__haw__", special=True)]
AROUND = (
    "the <br> cat",
    "<br>",
    "a <left> dog<ph>",
    "der<both>Hund",
    "the <both>  cat <end> <br>dog",
    "<br><br> a",
    "",
)


def add_beside(folder, first, files):
    """Lists added tokens from the id `first` on as new or old versions of transformers do."""
    if files == "tokenizer_config.json":
        options = json.loads((folder / files).read_text())
        options["added_tokens_decoder"] |= {str(first + i): fields for i, fields in enumerate(ADDED)}
        options["extra_special_tokens"] = ["<ph>", "<end>", "__haw__"]
        (folder / files).write_text(json.dumps(options))
    else:
        options = json.loads((folder / "tokenizer_config.json").read_text())
        del options["added_tokens_decoder"]
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
        (folder / "added_tokens.json").write_text(json.dumps({"<br>": first, "<ph>": first + 1}))
        special = {"additional_special_tokens": ["<ph>"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))


@pytest.mark.parametrize("files", ["tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("kind", ["marian", "m2m_100"])
def test_tokens_beside_a_vocabulary_of_pieces(kind, files, tmp_path):
    """Regression test: they were left out in silence, and their names split. Also after saving, and after an export."""
    if kind == "marian":
        checkpoints.marian(tmp_path)
        transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    else:
        config = {"model_type": kind, "eos_token_id": 2, "decoder_start_token_id": 2, "pad_token_id": 1}
        (tmp_path / "config.json").write_text(json.dumps(config | multilingual.m2m(tmp_path)))
    first = load_checkpoint_tokenizers(tmp_path).source.vocab_size
    add_beside(tmp_path, first, files)
    pair = load_checkpoint_tokenizers(tmp_path)
    assert pair.source.vocab_size == first + (len(ADDED) if files == "tokenizer_config.json" else 2)
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text((tmp_path / "config.json").read_text())
    assert export_tokenizers(exported, pair, kind, pair=True) is None
    for folder in (tmp_path, exported):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for ours in (pair, Tokenizers.from_json(pair.to_json()), load_checkpoint_tokenizers(exported)):
            for text in AROUND:
                ids = ours.source.encode(text)
                assert theirs(text)["input_ids"] == [*theirs("")["input_ids"][:-1], *ids, 0 if kind == "marian" else 2]
                known = [i for i in ids if i != ours.source.special.unknown]
                assert ours.source.decode(known) == theirs.decode(known, skip_special_tokens=True)


def test_an_added_token_with_the_id_of_a_tag_is_refused(tmp_path):
    """transformers 5 gives a token that it adds to an M2M-100 the id of a tag."""
    sizes = multilingual.m2m(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m2m_100", "eos_token_id": 2} | sizes))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens(["<br>"])
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its added token '<br>' has the id of '__af__', "):
        load_checkpoint_tokenizers(tmp_path)


def test_a_tokenizer_that_an_objective_extended_keeps_its_tokens(models, tmp_path):
    """Leaving some out would renumber the tokens that the objective appended."""
    write(tmp_path, models["t5"], T5, {})
    extended = load_checkpoint_tokenizers(tmp_path).target.extended(["<mask>"])
    assert extended.without_added(extended.vocab_size - 2).to_json() == extended.to_json()
