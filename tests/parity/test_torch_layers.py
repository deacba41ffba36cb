"""Equality with PyTorch's own layers: values, and the gradients of the input and of every parameter, in float32.

PyTorch's parameters are drawn at random and read into ours; its masks are True where a key is hidden.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.helpers import assert_close, normal, tiny
from tformer_jax.nn import norms
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.layers import LayerContext, TransformerLayer
from tformer_jax.nn.masks import Mask

B, T, S, N, D, F = 3, 5, 7, 4, 16, 24
H = D // N
REAL = np.arange(S) < np.array([[7], [4], [1]])


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    return module


def our_norm(m) -> dict:
    return {"scale": m.weight} | ({"bias": m.bias} if getattr(m, "bias", None) is not None else {})


def our_linear(m) -> dict:
    return {"kernel": m.weight.T, "bias": m.bias}


def our_attention(m: torch.nn.MultiheadAttention) -> dict:
    """Our projections as theirs: in_proj_weight [3D, D] stacks query, key and value."""
    ours = {}
    for name, weight, bias in zip(
        ("query", "key", "value"), m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True
    ):
        ours[name] = {"kernel": weight.T.reshape(D, N, H), "bias": bias.reshape(N, H)}
    return ours | {"output": {"kernel": m.out_proj.weight.T.reshape(N, H, D), "bias": m.out_proj.bias}}


def our_layer(m) -> dict:
    """An encoder layer (two norms) or a decoder layer (three)."""
    cross = hasattr(m, "multihead_attn")
    ours = {
        "self_attention": our_attention(m.self_attn),
        "self_attention_residual": {"norm": our_norm(m.norm1)},
        "ffn": {"expand": our_linear(m.linear1), "contract": our_linear(m.linear2)},
        "ffn_residual": {"norm": our_norm(m.norm3 if cross else m.norm2)},
    }
    if cross:
        ours |= {
            "cross_attention": our_attention(m.multihead_attn),
            "cross_attention_residual": {"norm": our_norm(m.norm2)},
        }
    return ours


def arrays(tree) -> dict:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf.detach().numpy()), tree)


def parts(tree: dict) -> Iterator[np.ndarray]:
    """Yields one vector per projection and norm: the gradient of a key's bias alone is only rounding."""
    if all(isinstance(leaf, dict) for leaf in tree.values()):
        for name in sorted(tree):
            yield from parts(tree[name])
    else:
        yield np.concatenate([tree[name].ravel() for name in sorted(tree)])


def compare(ours, theirs, to_ours, module: torch.nn.Module, *inputs: np.ndarray) -> None:
    """Values and all gradients of `ours(params, *inputs)` and `theirs(*inputs)` agree to 1e-5 of the largest value.

    `to_ours` maps torch's parameters, or their gradients, to our tree: it is linear and only moves elements around.
    """
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    expected = theirs(*tensors)
    weights = normal(*expected.shape, seed=9)
    (expected * torch.tensor(np.asarray(weights))).sum().backward()

    def total(params, *inputs):
        out = ours(params, *inputs)
        return (out * weights).sum(), out

    params = arrays(to_ours(module))
    run = jax.jit(jax.grad(total, argnums=tuple(range(len(inputs) + 1)), has_aux=True))
    (param_gradients, *input_gradients), out = run(params, *inputs)
    assert_close(out, expected.detach(), 1e-5)
    for gradient, tensor in zip(input_gradients, tensors, strict=True):
        assert_close(gradient, tensor.grad, 1e-5)
    for parameter in module.parameters():
        parameter.data = parameter.grad
    for ours_part, theirs_part in zip(parts(param_gradients), parts(arrays(to_ours(module))), strict=True):
        assert_close(ours_part, theirs_part, 1e-5)


def hidden_causal() -> torch.Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_self_attention(mask):
    torch_layer = randomized(torch.nn.MultiheadAttention(D, N, batch_first=True))
    layer = Attention(tiny("decoder_lm", dim=D, num_heads=N))
    real = REAL[:, :T]
    hide = {
        "attn_mask": hidden_causal() if mask in ("causal", "both") else None,
        "key_padding_mask": torch.tensor(~real) if mask in ("padding", "both") else None,
    }
    may_attend = Mask(causal=mask in ("causal", "both"), padding_mask=real if mask in ("padding", "both") else None)
    compare(
        lambda params, x: layer.apply({"params": params}, x, mask=may_attend)[0],
        lambda x: torch_layer(x, x, x, need_weights=False, **hide)[0],
        our_attention,
        torch_layer,
        np.asarray(normal(B, T, D)),
    )


def test_attention_from_three_inputs():
    torch_layer = randomized(torch.nn.MultiheadAttention(D, N, batch_first=True))
    layer = Attention(tiny("decoder_lm", dim=D, num_heads=N), cross=True)
    compare(
        lambda params, *inputs: layer.apply({"params": params}, *inputs, mask=Mask(padding_mask=REAL))[0],
        lambda *inputs: torch_layer(*inputs, key_padding_mask=torch.tensor(~REAL), need_weights=False)[0],
        our_attention,
        torch_layer,
        *(np.asarray(normal(B, length, D, seed=seed)) for seed, length in enumerate((T, S, S))),
    )


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias):
    torch_norm = randomized(torch.nn.LayerNorm(D, bias=bias))
    norm = norms.make_norm(tiny("decoder_lm", norm_bias=bias))
    compare(
        lambda params, x: norm.apply({"params": params}, x),
        torch_norm,
        our_norm,
        torch_norm,
        np.asarray(normal(B, T, D)),
    )


def test_rms_norm():
    torch_norm = randomized(torch.nn.RMSNorm(D, eps=1e-5))
    norm = norms.make_norm(tiny("decoder_lm", norm="rmsnorm"))
    compare(
        lambda params, x: norm.apply({"params": params}, x),
        torch_norm,
        our_norm,
        torch_norm,
        np.asarray(normal(B, T, D)),
    )


def settings(placement: str, activation: str):
    ours = tiny("seq2seq", dim=D, num_heads=N, ffn_dim=F, norm_placement=placement, activation=activation)
    theirs = {
        "dim_feedforward": F,
        "dropout": 0.0,
        "activation": activation,
        "norm_first": placement == "pre",
        "batch_first": True,
    }
    return ours, theirs


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_encoder_layer(placement, activation):
    cfg, options = settings(placement, activation)
    torch_layer = randomized(torch.nn.TransformerEncoderLayer(D, N, **options))
    layer = TransformerLayer(cfg)
    compare(
        lambda params, x: layer.apply({"params": params}, x, LayerContext(masks={"full": Mask(padding_mask=REAL)}))[0],
        lambda x: torch_layer(x, src_key_padding_mask=torch.tensor(~REAL)),
        our_layer,
        torch_layer,
        np.asarray(normal(B, S, D)),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_decoder_layer(placement, activation):
    cfg, options = settings(placement, activation)
    torch_layer = randomized(torch.nn.TransformerDecoderLayer(D, N, **options))
    layer = TransformerLayer(cfg, cross=True)

    def ours(params, x, memory):
        around = LayerContext(masks={"full": Mask(causal=True)}, memory=memory, cross_mask=Mask(padding_mask=REAL))
        return layer.apply({"params": params}, x, around)[0]

    def theirs(x, memory):
        return torch_layer(x, memory, tgt_mask=hidden_causal(), memory_key_padding_mask=torch.tensor(~REAL))

    compare(ours, theirs, our_layer, torch_layer, np.asarray(normal(B, T, D)), np.asarray(normal(B, S, D, seed=1)))
