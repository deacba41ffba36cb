"""Arrays of float32 in checkpoints of bfloat16: imported and exported as they are, or named in a warning."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tformer_jax as tj
from tests.parity import test_families
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.cli.export_checks import logits

DEEPSEEK = "deepseek-ai/DeepSeek-V3"
FLOAT32 = {
    DEEPSEEK: ("gate.weight", "e_score_correction_bias"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("A_log", "linear_attn.norm.weight"),
    "Qwen/Qwen3.5-0.8B": ("A_log", "linear_attn.norm.weight"),
}
"""Ends of names of arrays by family."""


def make(folder, name, ends):
    """Saves a checkpoint of bfloat16 with float32 values that bfloat16 would round: 5 +- 0.05 in DeepSeek's."""
    config = test_families.small(name) | test_families.tokenizer_of(folder, name)
    test_families.save(folder, config | {"torch_dtype": "bfloat16", "dtype": "bfloat16"})
    arrays = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    mean, deviation = (5, 0.05) if name == DEEPSEEK else (0, 0.4)
    for key in filter(lambda key: key.endswith(ends), arrays):
        arrays[key] = mean + deviation * torch.randn(arrays[key].shape, generator=draw)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return arrays


@pytest.mark.parametrize("name", FLOAT32)
def test_they_are_read_and_written_as_they_are(tmp_path, caplog, name):
    (folder := tmp_path / "checkpoint").mkdir()
    arrays = make(folder, name, FLOAT32[name])
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    assert "rounded" not in caplog.text
    tokens = np.random.default_rng(3).integers(0, 50, (3, 20), np.int32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    run = tj.load(tmp_path / "run")
    assert run.config.model.param_dtype == "bfloat16"
    np.testing.assert_allclose(logits(run, {"tokens": tokens}), expected, atol=1e-4 * np.abs(expected).max())
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out")])
    written = load_file(tmp_path / "out" / "model.safetensors")
    for key, array in arrays.items():
        assert torch.equal(written[key], array)
        assert written[key].dtype == array.dtype or key.endswith(FLOAT32[name])


def test_arrays_that_are_rounded_are_named(tmp_path, caplog):
    make(tmp_path, DEEPSEEK, ("norm.weight",))
    import_hf.main([str(tmp_path), "--run", str(tmp_path / "run")])
    assert "arrays are rounded to bfloat16: decoder/layers_0/ffn_residual/norm/scale" in caplog.text
