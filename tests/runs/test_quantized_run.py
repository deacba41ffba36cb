"""Runs with kernels that are stored as int8: their size, what they compute, and what is refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import tformer_jax as tj
from tests.runs.conftest import small_config
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf, score, translate
from tformer_jax.lab.commands import export_steps
from tformer_jax.nn.quantized import is_quantized
from tformer_jax.runs import experiment

PAIRS = [("abc", "ABC"), ("fedcb", "FEDCB")]


def export(run, folder, *flags):
    export_hf.main(["--run", str(run), str(folder), "--format", "run", *flags])
    return folder


@pytest.fixture(scope="module")
def stored(first, tmp_path_factory):
    pytest.importorskip("qwix")
    return export(first, tmp_path_factory.mktemp("stored") / "int8", "--quantization", "int8")


def test_the_merged_kernels_of_lora_are_stored(first, tmp_path):
    """Regression test: a run with LoRA was told to train without it."""
    pytest.importorskip("qwix")
    adapted = shutil.copytree(first, tmp_path / "adapted")
    cfg = tj.load(first).config
    train = dataclasses.replace(cfg.train, start_from=str(first), lora_rank=2, lora_alpha=4.0)
    config.save(dataclasses.replace(cfg, train=train), adapted / "config.json")
    run = tj.load(export(adapted, tmp_path / "int8"))
    assert run.config.train == cfg.train
    jax.tree.map(np.testing.assert_array_equal, run.params, tj.load(first, quantization="int8_weights").params)


@pytest.mark.slow
def test_a_stored_run_is_the_run_loaded_with_quantize(first, stored, capsys, tmp_path):
    """All arrays, scores and outputs; also with the kernels sharded over devices."""
    expected, loaded = tj.load(first, quantization="int8"), tj.load(stored)
    assert loaded.config.model == expected.config.model
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
    assert [each.log_probabilities for each in loaded.score(PAIRS)] == [
        each.log_probabilities for each in expected.score(PAIRS)
    ]
    texts = [source for source, _ in PAIRS]
    assert loaded.translate(texts) == expected.translate(texts)
    plain = tj.load(first).score(PAIRS)
    assert plain[0].log_probabilities != loaded.score(PAIRS)[0].log_probabilities
    sharded = tj.load(stored, mesh="tensor=2")
    scores, same = (np.concatenate([each.log_probabilities for each in run.score(PAIRS)]) for run in (sharded, loaded))
    np.testing.assert_allclose(scores, same, rtol=1e-4)
    kernels = [leaf for leaf in jax.tree.leaves(sharded.params, is_leaf=is_quantized) if is_quantized(leaf)]
    assert kernels and not all(kernel.qvalue.sharding.is_fully_replicated for kernel in kernels)
    for command, flags in ((translate, []), (score, [])):
        outputs = []
        for run, more in ((first, ["--quantize", "int8"]), (stored, [])):
            given = "abc" if command is translate else "abc\tABC"
            command.main(["--run", str(run), *more, *flags, given])
            outputs.append(capsys.readouterr().out)
        assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_the_size_on_disk_and_the_record(first, stored, tmp_path, capsys):
    """An int8 kernel has a quarter of the bytes, and a float32 scale for each output."""
    plain, facts = tj.load(first), json.loads((stored / "quantized.json").read_text())
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(plain.params))
    kernels = [leaf for leaf in jax.tree.leaves(tj.load(stored).params, is_leaf=is_quantized) if is_quantized(leaf)]
    saved = sum(3 * leaf.qvalue.size - 4 * leaf.scale.size for leaf in kernels)
    assert facts["bytes"] == {"before": whole, "after": whole - saved}
    assert (facts["run"], facts["quantization"]) == (str(first), "int8")
    assert json.loads((stored / "weights.json").read_text())["kernels"] == "int8"
    weights_only = export(first, tmp_path / "weights_only")
    assert "kernels of layers stored as int8; parameters " in capsys.readouterr().out
    assert tj.load(weights_only).config.model.quantization == "int8_weights"
    again = export(stored, tmp_path / "again")  # its own kind
    assert tj.load(again).config.model.quantization == "int8"
    jax.tree.map(np.testing.assert_array_equal, tj.load(again).params, tj.load(stored).params)


@pytest.mark.slow
def test_what_is_refused(first, stored, corpus_folder, tmp_path):
    for setting in ("start_from", "teacher"):
        cfg = small_config(**{setting: str(stored)})
        tokenizer = {"tokenizer": "file", "tokenizer_file": str(first)}
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **tokenizer))
        with pytest.raises(UserError, match=f"train.{setting}=.*: has kernels of int8: name the run from which it was"):
            experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)
    with pytest.raises(UserError, match="has kernels of int8: export the run from which it was made"):
        export_hf.main(["--run", str(stored), str(tmp_path / "out")])
    pytest.importorskip("flatbuffers")
    with pytest.raises(UserError, match="has kernels of int8: export the run from which it was made"):
        export_steps.main(["--run", str(stored), str(tmp_path / "out")])


def test_flags_that_do_not_fit(tmp_path):
    for flags, sentence in (
        (["--format", "run", "--quantization", "int16"], "--quantization must be int8_weights, int8 for --format run"),
        (
            ["--format", "ctranslate2", "--quantization", "int8_weights"],
            "--quantization must be float32, .* ctranslate2",
        ),
        (["--quantization", "int8"], "--quantization is for --format ctranslate2 or run: add it"),
        (["--base", "x"], "--base is for --format peft: add it"),
    ):
        with pytest.raises(UserError, match=sentence):
            export_hf.main(["--run", "absent", str(tmp_path / "new"), *flags])
