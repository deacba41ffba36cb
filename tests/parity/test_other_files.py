"""Checkpoints as other tools wrote them: PyTorch's state dicts, a tied array under its other name, other fields."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.parity import checkpoints
from tests.parity import test_huggingface as parity
from tests.parity.test_tokenizer_options import TEXTS, as_published, change
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.interop import hf, torch_files

STATE = "pytorch_model.bin"


def assert_same(folder, cfg, params):
    again, same = hf.load(folder)
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, same, params)


@pytest.mark.parametrize("name", ["bart", "gpt2", "llama"])
def test_state_dicts(name, tmp_path):
    """Of today's and of the old format, whole and in shards; copies of arrays are in them, too."""
    theirs = parity.their_model(name)
    theirs.save_pretrained(tmp_path)
    expected = hf.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = theirs.state_dict()
    for zipped in (True, False):
        torch.save(state, tmp_path / STATE, _use_new_zipfile_serialization=zipped)
        assert_same(tmp_path, *expected)
    (tmp_path / STATE).unlink()
    names = sorted(state)
    places = {key: f"pytorch_model-{1 + number % 2}.bin" for number, key in enumerate(names)}
    for file in set(places.values()):
        torch.save({key: state[key] for key in names if places[key] == file}, tmp_path / file)
    (tmp_path / f"{STATE}.index.json").write_text(json.dumps({"weight_map": places}))
    assert_same(tmp_path, *expected)


def test_a_state_dict_beside_other_files_of_safetensors(tmp_path):
    """Regression test: files that transformers does not read came first."""
    parity.their_model("llama").save_pretrained(tmp_path)
    expected, arrays = hf.load(tmp_path), load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp32.safetensors")
    save_file({"base_model.model.lora": np.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert_same(tmp_path, *expected)
    save_file({name: array + 1 for name, array in arrays.items()}, tmp_path / "model.fp32.safetensors")
    torch.save({name: torch.tensor(array) for name, array in arrays.items()}, tmp_path / STATE)
    assert_same(tmp_path, *expected)


def test_an_old_pytorch_reads_no_file(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(1)}, tmp_path / STATE)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(UserError, match=r"needs torch 2.6 or later, not 2.5.1\+cpu"):
        torch_files.load(tmp_path / STATE)


OTHER_NUMBERS = {
    "has dtype int8, not a floating-point dtype": lambda tensor: tensor.to(torch.int8),
    "has dtype complex64, not a floating-point dtype": lambda tensor: tensor.to(torch.complex64),
    r"is a tensor \(strided, float8_e4m3fn on cpu\) that NumPy does not have": lambda tensor: tensor.to(
        torch.float8_e4m3fn
    ),
    r"is a tensor \(sparse_coo, float32 on cpu\)": lambda tensor: tensor.to_sparse(),
    r"is a tensor \(strided, float32 on meta\)": lambda tensor: tensor.to("meta"),
}


@pytest.mark.parametrize("message", OTHER_NUMBERS)
def test_tensors_of_other_numbers_are_refused(message, tmp_path):
    """Regression test: integers became weights, imaginary parts were dropped, and other tensors raised `TypeError`."""
    theirs = parity.their_model("llama")
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    name = "model.layers.0.mlp.up_proj.weight"
    state = theirs.state_dict()
    torch.save(state | {name: OTHER_NUMBERS[message](state[name])}, tmp_path / STATE)
    with pytest.raises(UserError, match=message):
        hf.load(tmp_path)


def test_rounded_tensors_are_told(tmp_path, caplog):
    theirs = parity.their_model("llama")
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: tensor.double() / 3 for name, tensor in theirs.state_dict().items()}, tmp_path / STATE)
    hf.load(tmp_path)
    assert "arrays are rounded to float32: " in caplog.text


@pytest.mark.parametrize(
    ("name", "stored"),
    [("gpt2", "transformer.wte.weight"), ("bart", "model.shared.weight"), ("gemma", "model.embed_tokens.weight")],
)
def test_a_tied_array_may_have_the_name_of_the_head(name, stored, tmp_path):
    """As tools that keep the first name in sorted order write it; config.json need not say that it is tied."""
    parity.their_model(name).save_pretrained(tmp_path)
    expected = hf.load(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    arrays["lm_head.weight"] = arrays.pop(stored)
    save_file(arrays, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(tmp_path, *expected)


@pytest.mark.parametrize("kind", ["gpt2", "albert", "roberta", "bart", "t5"])
def test_a_vocab_txt_of_a_named_class(kind, tmp_path):
    """As Chinese and Japanese models of other types have it."""
    sizes = checkpoints.word_pieces(tmp_path)
    ids = {"eos_token_id": 3, "decoder_start_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": sizes["vocab_size"]} | ids))
    with pytest.raises(UserError, match=f"has only vocab.txt, which is not read for {kind}"):
        load_checkpoint_tokenizers(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    theirs, ours = transformers.BertTokenizer.from_pretrained(tmp_path), load_checkpoint_tokenizers(tmp_path).target
    for text in ("the cat sat", "The mat"):
        assert [*ours.special.before, *ours.encode(text), *ours.special.after] == theirs(text)["input_ids"]


@pytest.mark.parametrize("write", [checkpoints.llama, as_published])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"legacy": True}, {}),
        ({"legacy": False}, {}),
        ({"add_bos_token": False}, {}),
        ({}, {"post_processor": None}),
        ({"add_eos_token": True}, {"post_processor": None}),
    ],
)
def test_code_llama(write, options, parts, tmp_path):
    """Its class puts no space before the text after a special token, and BOS before each text, whatever files say."""
    write(tmp_path)
    change(tmp_path / "tokenizer_config.json", {"tokenizer_class": "CodeLlamaTokenizer"} | options)
    change(tmp_path / "tokenizer.json", parts)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_checkpoint_tokenizers(tmp_path).target
    assert type(theirs).__name__ == "CodeLlamaTokenizer"
    for text in (*TEXTS, "the cat</s>the<s> mat", " ▁<PRE>the"):
        ids = theirs(text)["input_ids"]
        assert [*ours.special.before, *ours.encode_with_symbols([text])[0], *ours.special.after] == ids, text
        if not {*ids} & {*ours.special.eos}:  # where decoding ends
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_small_gpt2_has_no_end(tmp_path):
    """Its config has the end of the published vocabulary, or none, which is never predicted."""
    checkpoints.gpt2(tmp_path)
    change(tmp_path / "config.json", {"eos_token_id": 50256, "bos_token_id": 50256})
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert load_checkpoint_tokenizers(tmp_path).target.special.eos == (size,)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_checkpoint_tokenizers(tmp_path).target.special.eos == (size,)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama", "bos_token_id": 1}))
    assert load_checkpoint_tokenizers(tmp_path).target.special.eos == (2,)


def test_fields_without_effect_and_names_of_labels(tmp_path):
    """Fields that other tools and versions write; an exported classifier names its labels in both directions."""
    checkpoints.bert(tmp_path)
    more = {"sentence_transformers": {"version": "4.0.1"}, "xla_device": True, "torchscript": True, "_commit_hash": "a"}
    change(tmp_path / "config.json", more | {"hidden_act": "gelu_python", "eos_token_ids": [2], "language": "en"})
    import_hf.main([str(tmp_path), "--run", str(tmp_path / "run")])
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out")])
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.label2id == {"bad": 0, "good": 1, "neither": 2}


def test_spaces_that_transformers_cleans_up_are_told(tmp_path, capsys):
    checkpoints.t5(tmp_path)
    change(tmp_path / "tokenizer_config.json", {"clean_up_tokenization_spaces": True})
    import_hf.main([str(tmp_path), "--run", str(tmp_path / "run")])
    assert "not applied: clean_up_tokenization_spaces=True" in capsys.readouterr().err
