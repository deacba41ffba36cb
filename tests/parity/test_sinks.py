"""Attention with sinks equals gpt-oss's, with YaRN and grouped queries."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from tests.helpers import apply, assert_close, normal, tiny, with_settings
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.attention_positions import make_attention_positions
from tformer_jax.nn.masks import Mask

B, T, N, K, H = 2, 7, 4, 2, 6
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_attention_equals_that_of_gpt_oss(backend):
    sizes = {"hidden_size": 8, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H}
    config = transformers.GptOssConfig(**sizes, rope_parameters=YARN, attn_implementation="eager")
    theirs = GptOssAttention(config, 1).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    x = normal(B, T, 8)
    hidden = torch.full((T, T), -torch.inf).triu(1)[None, None]
    angles = GptOssRotaryEmbedding(config)(torch.zeros(1), torch.arange(T)[None])
    with torch.no_grad():
        expected, _ = theirs(torch.tensor(np.asarray(x)), angles, hidden)

    rotary = {"base": 50.0, "scaling": "yarn", "factor": 4.0, "original_length": 64}
    cfg = tiny("decoder_lm", num_kv_heads=K, head_dim=H, attention_sinks=True, position="rotary", rotary=rotary)
    arrays = {name: jnp.asarray(parameter.detach().numpy()) for name, parameter in theirs.named_parameters()}
    params = {
        ours: {
            "kernel": arrays[f"{name}_proj.weight"].T.reshape(8, heads, H),
            "bias": arrays[f"{name}_proj.bias"].reshape(heads, H),
        }
        for ours, name, heads in (("query", "q", N), ("key", "k", K), ("value", "v", K))
    }
    params["output"] = {"kernel": arrays["o_proj.weight"].T.reshape(N, H, 8), "bias": arrays["o_proj.bias"]}
    params["sinks"] = arrays["sinks"]
    position = make_attention_positions(cfg, bidirectional=False).apply({}, jnp.arange(T)[None], window=False)
    module = Attention(with_settings(cfg, attention_backend=backend))
    out, _ = apply(module, params, x, mask=Mask(causal=True), position=position)
    assert_close(out, expected.numpy(), proves=("attention_sinks", "transformers GptOssAttention"))
