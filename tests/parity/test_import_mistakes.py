"""Checkpoints that are damaged, incomplete, missing or not supported are refused by import_hf.py, in one sentence."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file

import tformer_jax as tj
from tests.helpers import build
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.config.layers import PROJECTIONS
from tformer_jax.runs import run_folder, weights
from tformer_jax.runs.guards import FolderLock


def index(folder, **places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def shard(folder):
    """Splits the arrays into two shards with an index."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: arrays[name] for name in part}, folder / file)
    index(folder, **{name: file for file, part in parts.items() for name in part})


def without_shard(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()


def without_array(folder):
    shard(folder)
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    index(folder, **places, missing="a.safetensors")


def outside(folder):
    (folder / "model.safetensors").unlink()
    index(folder, x="../x.safetensors")


def truncated(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-10])


def tampered(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"', 1))


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "model.ckpt")


def damaged(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def saved(folder, content):
    """Writes a file of `torch.save` in place of the arrays."""
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def objects(folder):
    saved(folder, {"path": Path("x")})


def fields(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        given = {name: value for name, value in config.items() if value != "left out"}
        (folder / "config.json").write_text(json.dumps(given))

    return change


def written(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def larger(folder, *, special: int = 0):
    """Adds 20 tokens to the tokenizer, the first of which are special."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<new{number}>" for number in range(special)])
    tokenizer.add_tokens([f"new{number}" for number in range(special, 20)])
    tokenizer.save(str(folder / "tokenizer.json"))


def endless(folder):
    """Adds special tokens, one of which the model lacks and ends texts."""
    larger(folder, special=20)
    written("generation_config.json", '{"eos_token_id": 65}')(folder)


def repeated(folder):
    """Stores all arrays in both shards."""
    shard(folder)
    arrays = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    save_file(arrays, folder / "b.safetensors")


def integers(folder):
    arrays = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(arrays | {name: arrays[name].view(np.int32)}, folder / "model.safetensors")


def removed(name: str):
    return lambda folder: (folder / name).unlink()


MISTAKES = {
    "architecture": (
        fields(model_type="bloom"),
        "model_type 'bloom' is not supported; supported are albert, arcee, bart, bert, ",
    ),
    "shard": (without_shard, "b.safetensors is missing: model.safetensors.index.json lists it"),
    "array of a shard": (without_array, "a.safetensors has no array missing, which model.safetensors.index.json lists"),
    "index": (outside, "names a file outside of its folder: ../x.safet"),
    "truncated": (truncated, "model.safetensors is damaged: "),
    "tampered": (tampered, "model.safetensors is damaged: "),
    "repeated": (repeated, "b.safetensors and another file both contain the array lm_head.weight"),
    "integers": (integers, "model.norm.weight of the checkpoint has dtype int32, not a floating-point"),
    "beams": (written("generation_config.json", '{"num_beams": "many"}'), "a decoding setting has the wrong type or"),
    "temperature": (
        written("generation_config.json", '{"do_sample": true, "temperature": "warm"}'),
        "a decoding setting has the wrong type or value: could not convert string to float: 'warm'",
    ),
    "pickle": (pickled, "model.ckpt is a pickle, which may run code and is not read: save it as safetensors"),
    "objects": (objects, "pytorch_model.bin holds other objects than tensors, which are never unpickled"),
    "no state dict": (functools.partial(saved, content=[1]), "pytorch_model.bin is no state dict: save model.state_di"),
    "damaged state dict": (damaged, "pytorch_model.bin is not a file of torch.save, or is damaged"),
    "field": (fields(nonlocal_attention=3), "the field nonlocal_attention=3 is not supported"),
    "not causal": (fields(is_causal=False), "is_causal=False is not supported, only True is"),
    "quantized": (fields(quantization_config={"bits": 4}), "the field quantization_config={'bits': 4} is not"),
    "missing field": (fields(hidden_size="left out"), "config.json has no 'hidden_size'"),
    "type": (fields(rms_norm_eps="small"), "rms_norm_eps|norm_eps"),
    "zero": (fields(num_attention_heads=0), "num_heads=0|wrong type or value"),
    "scaling": (
        fields(rope_parameters=None, rope_scaling={"type": "linear"}, rope_theta=1e4),
        "has no 'factor', which",
    ),
    "JSON": (written("config.json", "{"), "config.json is not valid JSON"),
    "no tokenizer": (removed("tokenizer.json"), "has no tokenizer: one of the files tokenizer.json, vocab.txt"),
    "vocabulary": (larger, "its tokenizer has 7. tokens, and its model only 64"),
    "vocabulary, the last one is ordinary": (functools.partial(larger, special=19), "its tokenizer has 7. tokens, and"),
    "vocabulary, the last ones are used": (endless, "its tokenizer has 7. tokens, and its model only 64"),
    "end": (written("generation_config.json", '{"eos_token_id": 999}'), "the special token 999 is not one of its 64"),
    "start": (fields(decoder_start_token_id=[1, 2]), r"decoder_start_token_id=\[1, 2\] is not a token id"),
    "negative end": (written("generation_config.json", '{"eos_token_id": -1}'), "the special token -1 is not one of"),
    "type of the model": (fields(model_type=["llama"]), "the architecture|model_type"),
    "forced": (
        written("generation_config.json", '{"forced_bos_token_id": 70}'),
        "the special token 70 is not one of its 64 tokens",
    ),
    "kinds of layers": (
        fields(rope_parameters={"full_attention": {"rope_theta": 99.0}}),
        "rope_parameters by kind of layer are not supported for this architecture",
    ),
    "local rotations": (fields(rope_local_base_freq=7.0), "the field rope_local_base_freq=7.0 is not supported"),
    "tokenizer": (written("tokenizer.json", '{"model": 3}'), "tokenizer.json, or a JSON file beside it, is not valid"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(imported, name, tmp_path):
    change, sentence = MISTAKES[name]
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    change(folder)
    with pytest.raises(UserError, match=sentence) as caught:
        import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_special_tokens_that_the_model_lacks_are_left_out(imported, tmp_path):
    """Gemma 3's tokenizer has one for images, whose id is the size of the text model's vocabulary."""
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    larger(folder, special=20)
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    ours, theirs = tj.load(tmp_path / "run").tokenizers.target, transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the cat", "the <new0> cat<new1>"):
        assert ours.special.wrap_text(ours.encode(text)) == theirs(text)["input_ids"]
    remaining = [name for name in theirs.get_added_vocab() if theirs.convert_tokens_to_ids(name) < 64]
    assert len(theirs) > ours.vocab_size == 64 and {name for _, name in ours.special.names} == set(remaining)
    assert max(ours.encode("the <new19> cat")) < 64 <= max(theirs("the <new19> cat")["input_ids"])


def test_shards_are_joined(imported, tmp_path):
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    shard(folder)
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    actual, expected = (tj.load(run).params for run in (tmp_path / "run", imported("llama")[1]))
    np.testing.assert_array_equal(actual["embedding"]["embedding"], expected["embedding"]["embedding"])


@pytest.mark.parametrize("shards", ["are missing", "have other weights"])
def test_an_old_index_beside_the_weights_is_not_read(imported, shards, tmp_path, capsys):
    """transformers reads model.safetensors, too."""
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    stored = load_file(folder / "model.safetensors")
    if shards == "are missing":
        index(folder, **dict.fromkeys(stored, "a.safetensors"))
    else:
        shard(folder)
        save_file({name: array * 2 for name, array in stored.items()}, folder / "a.safetensors")
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    assert "model.safetensors is read; not read: " in capsys.readouterr().err
    ours = tj.load(tmp_path / "run").params["embedding"]["embedding"]
    theirs = transformers.AutoModel.from_pretrained(folder).embed_tokens.weight
    np.testing.assert_array_equal(ours, theirs.detach())


def test_checkpoints_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^org/m does not exist here, and downloading it from .* failed: .*") as caught:
        import_hf.main(["org/m", "--run", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="missing/a/b does not exist: name a folder, a file, or a model"):
        import_hf.main(["missing/a/b", "--run", str(tmp_path / "run")])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="downloading it needs huggingface_hub: pip install"):
        import_hf.main(["org/m", "--run", str(tmp_path / "run")])
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError, match="weights.bin is a file: name a folder, or a .pt or .pth of torch.save"):
        import_hf.main([str(tmp_path / "weights.bin"), "--run", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_flags_that_a_folder_does_not_use(imported, tmp_path):
    run = ["--run", str(tmp_path / "run")]
    for flags in (["--tokenizer", "a.json"], ["--model-args", "nhead=3"]):
        with pytest.raises(
            UserError, match=f"{flags[0]} is for state dicts of PyTorch, but .* is not one: leave it out"
        ):
            import_hf.main([str(imported("llama")[0]), *run, *flags])


def test_a_run_is_not_replaced_unasked(imported, tmp_path):
    folder, run, _ = imported("llama")
    with pytest.raises(UserError, match="already holds a run: add --overwrite to replace it"):
        import_hf.main([str(folder), "--run", str(run)])
    with pytest.raises(UserError, match="already exists: name a new folder"):
        export_hf.main(["--run", str(run), str(folder)])


NOT_HELD = {
    "; 'llama' needs a model trained with model.attention='multi_head'": {
        "attention": "mla",
        "num_kv_heads": None,
        "attention_bias": PROJECTIONS,
    },
    "; 'llama' needs a model trained with model.attention_sinks=False": {"attention_sinks": True},
}


@pytest.mark.parametrize("reason", NOT_HELD)
def test_a_model_that_no_architecture_holds_is_not_exported(imported, reason, tmp_path):
    """The reason is named if it is the same for all of them."""
    original = tj.load(imported("llama")[1])
    model = dataclasses.replace(original.config.model, **NOT_HELD[reason])
    cfg = dataclasses.replace(original.config, model=model)
    run_folder.create(tmp_path / "run", cfg, original.tokenizers, None)
    weights.save(tmp_path / "run", build(cfg.model)[1], "last", [], 0)
    with pytest.raises(UserError, match=f"^none of the architectures gpt2, .* represents this model{reason}$"):
        export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_replace_what_it_imports(imported, tmp_path):
    """Regression test: with --overwrite, as the message for a folder with a config.json said, the weights were lost."""
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    for checkpoint, run in ((folder, folder), (folder, tmp_path)):
        with pytest.raises(UserError, match="--run .* would replace .*copy, which is imported: choose another --run"):
            import_hf.main([str(checkpoint), "--run", str(run), "--overwrite"])
    assert (folder / "model.safetensors").exists()


def test_a_run_in_use_is_not_replaced(imported, tmp_path):
    lock = FolderLock(tmp_path / "run")
    with pytest.raises(UserError, match="run is in use by process"):
        import_hf.main([str(imported("llama")[0]), "--run", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    lock.release()
    import_hf.main([str(imported("llama")[0]), "--run", str(tmp_path / "run")])
    FolderLock(tmp_path / "run").release()


def test_an_import_that_fails_replaces_no_run(imported, tmp_path, monkeypatch):
    folder, run, _ = imported("llama")
    copy = shutil.copytree(run, tmp_path / "run")
    monkeypatch.setattr(weights, "save", mock.Mock(side_effect=RunError("the disk is full")))
    with pytest.raises(RunError, match="the disk is full"):
        import_hf.main([str(folder), "--run", str(copy), "--overwrite"])
    assert run_folder.run_id(copy) == run_folder.run_id(run) and weights.verify(copy, None)
