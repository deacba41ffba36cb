"""The experts of gpt-oss as published, in MXFP4, are those that transformers unpacks."""

import json

import jax
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations import mxfp4

from tformer_jax.interop import hf

SIZES = {"vocab_size": 20, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}


def test_packed_experts(tmp_path):
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).save_pretrained(tmp_path)
    arrays, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    packed = dict(arrays)
    torch.manual_seed(0)
    for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = arrays[name].shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 130, blocks.shape[:-1], dtype=torch.uint8)
        arrays[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    expected = hf.load(tmp_path)
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    actual = hf.load(tmp_path)
    assert actual[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, actual[1], expected[1])
