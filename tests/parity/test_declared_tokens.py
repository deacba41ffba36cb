"""Tokens that JSON files add beside a tokenizer.json or a vocabulary have the ids and the rules of transformers."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers as hf
import transformers

from tests.parity import checkpoints
from tests.parity.test_tokenizer_options import bert, change
from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers


def token(name: str, **flags: bool) -> dict:
    return {"content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | flags


ROLE = token("<left>", lstrip=True) | {"__type": "AddedToken"}
DECODER = {
    "300": token("<|im_start|>", special=True),
    "301": token("<|im_end|>", special=True, rstrip=True),
    "302": token("<think>", special=False, lstrip=True, rstrip=True),
    "303": token("cat", special=False, single_word=True),
}
LISTED = {"additional_special_tokens": ["<|im_start|>"], "pad_token": token("<left>", lstrip=True)}
BESIDE = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": DECODER}},
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "<fill>"]}},
    "extra by name": {"tokenizer_config.json": {"extra_special_tokens": {"im": "<|im_start|>"}}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<|im_start|>"]}},
    "roles": {"tokenizer_config.json": {"pad_token": "<fill>", "mask_token": ROLE}},
    "a role of one model": {"tokenizer_config.json": {"image_token": "<fill>"}},
    "added_tokens.json": {"added_tokens.json": {"<|im_start|>": 300, "<think>": 301}},
    "special_tokens_map.json": {
        "added_tokens.json": {"<|im_start|>": 301, "<think>": 300},
        "special_tokens_map.json": LISTED,
    },
    "special tokens of older files": {
        "added_tokens.json": {"<|im_start|>": 300, "<think>": 301},
        "special_tokens_map.json": {"additional_special_tokens": ["<|im_start|>"], "pad_token": "<think>"},
    },
    "a map that is not read": {
        "tokenizer_config.json": {"added_tokens_decoder": {"300": token("<think>", special=False)}},
        "special_tokens_map.json": {"pad_token": "<fill>"},
    },
}
TEXTS = (
    "the <|im_start|>cat <|im_end|> sat",
    "a <think>  dog</think>b  <left> x",
    "the<fill> cat <|im_start|>",
    "acat cat. the",
    "the cat</s> [SEP]sat",
)


def bart(folder: Path) -> None:
    ids = {"eos_token_id": 2, "decoder_start_token_id": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "bart", "is_encoder_decoder": True, **ids}))
    checkpoints.bart_tokenizer(folder)


def qwen(folder: Path) -> None:
    checkpoints.gpt2(folder)
    change(folder / "config.json", {"model_type": "qwen3"})


MAKERS = {"gpt2": checkpoints.gpt2, "llama": checkpoints.llama, "t5": checkpoints.t5, "bart": bart, "bert": bert}
MAKERS |= {"qwen": qwen}
CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "qwen": "Qwen2Tokenizer",
    "llama": "LlamaTokenizer",
    "t5": "T5Tokenizer",
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a folder of each kind."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in MAKERS}
    for kind, folder in made.items():
        MAKERS[kind](folder)
    return made


def assert_equal(folder: Path) -> None:
    """Compares ids, and texts that an end does not cut, also after saving."""
    ours, theirs = load_checkpoint_tokenizers(folder).target, transformers.AutoTokenizer.from_pretrained(folder)
    again = Tokenizers.from_json(json.loads(json.dumps(Tokenizers(ours, ours).to_json()))).target
    assert ours.vocab_size == again.vocab_size == len(theirs)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert [*ours.special.before, *ours.encode(text), *ours.special.after] == ids, text
        assert again.encode(text) == ours.encode(text)
        inner = ours.encode(text)
        if not {*inner} & {*ours.special.eos}:
            assert ours.decode(inner) == theirs.decode(inner, skip_special_tokens=True)


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rebuilt", [False, True])
def test_tokens_beside_a_tokenizer_json(folders, kind, name, rebuilt, tmp_path):
    """The classes of transformers 5 rebuild a tokenizer from its vocabulary; `PreTrainedTokenizerFast` reads it."""
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_text((folders[kind] / file).read_text())
    options = json.loads((folders[kind] / "tokenizer_config.json").read_text())
    options["tokenizer_class"] = CLASSES[kind] if rebuilt else "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    for file, content in BESIDE[name].items():
        (tmp_path / file).touch()
        (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text() or "{}") | content))
    assert_equal(tmp_path)


@pytest.mark.parametrize("roles", [{"image_token": "<FILL>"}, {"extra_special_tokens": {"image_token": "<FILL>"}}])
def test_a_role_of_one_model_is_normalized_as_its_file_says(folders, roles, tmp_path):
    """Regression test: a token of added_tokens.json with such a role was not found in lower case."""
    shutil.copytree(folders["bert"], tmp_path, dirs_exist_ok=True)
    change(tmp_path / "tokenizer_config.json", roles)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<FILL>": 300}))
    ours, theirs = load_checkpoint_tokenizers(tmp_path).target, transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", BESIDE)
def test_tokens_beside_a_vocab_txt(name, tmp_path):
    config = checkpoints.word_pieces(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    for file, content in BESIDE[name].items():
        (tmp_path / file).write_text(json.dumps(content))
    assert_equal(tmp_path)


def vocab_and_merges(folder: Path, kind: str, options: dict) -> None:
    """Writes vocab.json, merges.txt and the JSON files of a byte-level BPE."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if kind == "bart" else ["<|endoftext|>"]
    trained = checkpoints.trained(hf.models.BPE(), hf.trainers.BpeTrainer, special, metaspace=False)
    trained.model.save(str(folder))
    config = {"model_type": kind, "eos_token_id": 2, "decoder_start_token_id": 2, "is_encoder_decoder": kind == "bart"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"add_bos_token": True}),
        ("gpt2", {"add_prefix_space": True, "unk_token": "<|endoftext|>"}),
        ("bart", {}),
        ("bart", {"add_prefix_space": True, "mask_token": ROLE | {"content": "<mask>"}}),
        ("qwen2", {"added_tokens_decoder": {"289": token("<|endoftext|>", special=True), **DECODER}}),
        ("qwen2", {"tokenizer_class": "GPT2Tokenizer"}),
        ("qwen3", {}),
    ],
)
def test_a_vocabulary_with_merges(kind, options, tmp_path):
    vocab_and_merges(tmp_path, kind, options)
    assert_equal(tmp_path)


def test_a_vocabulary_with_merges_of_another_class_is_refused(tmp_path):
    """transformers cannot read these folders either."""
    vocab_and_merges(tmp_path, "llama", {})
    with pytest.raises(UserError, match=r"has only vocab.json and merges.txt, which are read for .*: save tokenizer"):
        load_checkpoint_tokenizers(tmp_path)
    change(tmp_path / "config.json", {"model_type": "gpt2"})
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match="has no tokenizer: one of the files tokenizer.json, vocab.txt"):
        load_checkpoint_tokenizers(tmp_path)
