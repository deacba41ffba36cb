"""Layers with other caches equal those of transformers: values, and the gradients of the input and every parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v2 import configuration_deepseek_v2, modeling_deepseek_v2
from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

from tests.helpers import assert_close, normal, tiny
from tests.parity.test_torch_layers import arrays, randomized
from tformer_jax.nn import attention_positions
from tformer_jax.nn.gated_delta import GatedDelta
from tformer_jax.nn.latent_attention import LatentAttention
from tformer_jax.nn.masks import Mask

B, D, N = 2, 16, 4


def compare(ours, theirs, to_ours, module: torch.nn.Module, x, proves) -> None:
    """Compares `ours(params, x)` with `theirs(x)`; `to_ours` maps torch's parameters, or their gradients, to ours."""
    given = torch.tensor(np.asarray(x), requires_grad=True)
    expected, params = theirs(given), arrays(to_ours(module))
    weights = normal(*expected.shape, seed=9)
    (expected * torch.tensor(np.asarray(weights))).sum().backward()

    def total(params, x):
        out = ours(params, x)
        return (out * weights).sum(), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, x)
    assert_close(out, expected.detach(), 1e-5, proves=proves)
    for parameter in module.parameters():
        parameter.data = parameter.grad
    jax.tree.map(lambda a, b: assert_close(a, b, 3e-5), gradients[0], arrays(to_ours(module)))
    assert_close(gradients[1], given.grad, 3e-5)


@pytest.mark.parametrize("query_latent", [None, 9])
def test_latent_attention_of_deepseek_v2(query_latent):
    T, C, R, H, V = 6, 10, 4, 4, 5  # torch needs even sizes
    sizes = {"kv_lora_rank": C, "qk_rope_head_dim": R, "qk_nope_head_dim": H, "v_head_dim": V}
    config = configuration_deepseek_v2.DeepseekV2Config(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=query_latent,
        max_position_embeddings=32,
        attn_implementation="eager",
        **sizes,
    )
    module = randomized(modeling_deepseek_v2.DeepseekV2Attention(config, 0).eval())
    positions = modeling_deepseek_v2.DeepseekV2RotaryEmbedding(config)
    hidden = torch.full((T, T), -torch.inf).triu(1)[None, None]

    def theirs(x):
        turns = positions(x, torch.arange(T)[None])
        return module(x, attention_mask=hidden, position_embeddings=turns)[0]

    def to_ours(m):
        both, shared = m.kv_b_proj.weight.T.reshape(C, N, H + V), m.kv_a_proj_with_mqa.weight.T
        query = m.q_proj if query_latent is None else m.q_b_proj
        ours = {
            "query": query.weight.T.reshape(-1, N, H + R),
            "latent": shared[:, :C],
            "rotated": shared[:, C:],
            "key": both[..., :H],
            "value": both[..., H:],
            "output": m.o_proj.weight.T.reshape(N, V, D),
        }
        norms = {"latent_norm": m.kv_a_layernorm.weight}
        if query_latent is not None:
            ours["query_latent"], norms["query_latent_norm"] = m.q_a_proj.weight.T, m.q_a_layernorm.weight
        return {k: {"kernel": v} for k, v in ours.items()} | {k: {"scale": v} for k, v in norms.items()}

    cfg = tiny(
        "decoder_lm",
        dim=D,
        attention="mla",
        head_dim=H,
        mla={"latent_dim": C, "rotary_dim": R, "value_dim": V, "query_latent_dim": query_latent},
        norm="rmsnorm",
        norm_eps=1e-6,
        position="rotary",
        rotary={"pairing": "interleaved"},
    )
    position = attention_positions.make_attention_positions(cfg, bidirectional=False).apply(
        {}, jnp.arange(T)[None], window=False
    )

    def ours(params, x):
        return LatentAttention(cfg).apply({"params": params}, x, mask=Mask(causal=True), position=position)[0]

    proves = ("attention=mla", "transformers DeepseekV2Attention, values and gradients")
    compare(ours, theirs, to_ours, module, normal(B, T, D), proves)


def test_gated_delta_net_of_qwen3_next():
    T, K, H, V, W = 70, 2, 3, 5, 4  # more than a chunk
    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=D,
        num_hidden_layers=2,
        linear_num_value_heads=N,
        linear_num_key_heads=K,
        linear_key_head_dim=H,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=W,
        rms_norm_eps=1e-6,
    )
    module = randomized(modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0).eval())

    def heads(rows: torch.Tensor, size: int) -> torch.Tensor:
        return rows.reshape(-1, size, D).permute(2, 0, 1)

    def to_ours(m):
        G = N // K
        q, k, v, z = m.in_proj_qkvz.weight.reshape(K, -1, D).split([H, H, G * V, G * V], dim=1)
        b, a = m.in_proj_ba.weight.reshape(K, 2 * G, D).split([G, G], dim=1)
        kernels = m.conv1d.weight[:, 0].T.split([K * H, K * H, N * V], dim=1)
        convolved = {
            name: {"project": {"kernel": heads(rows, size)}, "conv_kernel": kernel.reshape(W, -1, size)}
            for (name, rows, size), kernel in zip(
                (("queries", q, H), ("keys", k, H), ("values", v, V)), kernels, strict=True
            )
        }
        return convolved | {
            "gate": {"kernel": heads(z, V)},
            "beta": {"kernel": b.reshape(N, D).T},
            "decay": {"kernel": a.reshape(N, D).T},
            "A_log": m.A_log,
            "dt_bias": m.dt_bias,
            "scale": m.norm.weight,
            "output": {"kernel": m.out_proj.weight.T.reshape(N, V, D)},
        }

    sizes = {"num_key_heads": K, "key_head_dim": H, "value_head_dim": V, "conv_kernel_size": W}
    cfg = tiny("decoder_lm", dim=D, attention="gated_delta", gated_delta=sizes, norm_eps=1e-6)

    def ours(params, x):
        return GatedDelta(cfg).apply({"params": params}, x)[0]

    proves = ("attention=gated_delta", "transformers Qwen3NextGatedDeltaNet, values and gradients")
    compare(ours, module, to_ours, module, normal(B, T, D), proves)
