"""The layers of `torch_models` in idiomatic PyTorch: fused projections and `scaled_dot_product_attention`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tformer_jax.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


def make_norm(cfg: ModelConfig, size: int) -> nn.Module:
    """Builds LayerNorm or RMSNorm over `size` features."""
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=cfg.norm_eps)
    return nn.LayerNorm(size, eps=cfg.norm_eps, bias=cfg.norm_bias)


class Rotary(nn.Module):
    """Cosines and sines of the angles `position * base^(-2i/H)` of rotary positions ("RoFormer", 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        rates = cfg.rotary.base ** (-torch.arange(0, cfg.head_size, 2) / cfg.head_size)
        angles = torch.arange(cfg.max_length)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of the first `length` positions, float32 [T, H/2] each."""
        return self.cos[:length], self.sin[:length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates feature i with i + H/2, [B, N, T, H] -> [B, N, T, H], by angles whose cosines and sines are [T, H/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


class Attention(nn.Module):
    """Multi-head or grouped-query attention.

    Self-attention has a fused QKV projection, and cross-attention a fused KV projection.
    """

    def __init__(self, cfg: ModelConfig, *, cross: bool = False):
        super().__init__()
        N, K, H = cfg.num_heads, cfg.kv_heads, cfg.head_size
        self.heads, self.head_size = (K, K) if cross else (N, K, K), H
        self.query = nn.Linear(cfg.dim, N * H, bias="query" in cfg.attention_bias) if cross else None
        self.fused = nn.Linear(cfg.dim, sum(self.heads) * H, bias="key" in cfg.attention_bias)
        self.query_norm, self.key_norm = (make_norm(cfg, H) if cfg.qk_norm else nn.Identity() for _ in range(2))
        self.output = nn.Linear(N * H, cfg.dim, bias="output" in cfg.attention_bias)
        self.dropout, self.scale, self.grouped = cfg.attention_dropout, cfg.attention_scale, K < N

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Attends from x to itself, or to `memory` in cross-attention.

        Args:
            x: [B, T, D].
            mask: bool [B, 1, T or 1, S]; None: causal.
            rotation: cosines and sines for `rotate`; None: positions are not used.
            memory: [B, S, D].

        Returns:
            [B, T, D].
        """
        if self.query is None:
            query, key, value = self._project(self.fused, x).split(self.heads, 1)
        else:
            query, (key, value) = self._project(self.query, x), self._project(self.fused, memory).split(self.heads, 1)
        query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        y = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.grouped,
        )
        return self.output(y.transpose(1, 2).flatten(2))

    def _project(self, projection: nn.Module, x: Tensor | None) -> Tensor:
        """Projects [B, T, D] to heads [B, N, T, H]."""
        return projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FFN(nn.Module):
    """`activation(x W1) W2`, or `(activation(x Wg) * (x W1)) W2` with a fused projection if it is gated."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gated = cfg.ffn == "gated"
        self.expand = nn.Linear(cfg.dim, (1 + self.gated) * cfg.ffn_dim, bias=cfg.ffn_bias)
        self.activation, self.dropout = ACTIVATIONS[cfg.activation](), nn.Dropout(cfg.ffn_dropout)
        self.contract = nn.Linear(cfg.ffn_dim, cfg.dim, bias=cfg.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        hidden = self.expand(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        return self.contract(self.dropout(hidden))


class Layer(nn.Module):
    """Self-attention, cross-attention if `cross`, and an FFN, each with a residual connection."""

    def __init__(self, cfg: ModelConfig, *, cross: bool = False):
        super().__init__()
        self.pre = cfg.norm_placement == "pre"
        self.self_attention, self.self_attention_norm = Attention(cfg), make_norm(cfg, cfg.dim)
        self.cross_attention = Attention(cfg, cross=True) if cross else None
        self.cross_attention_norm = make_norm(cfg, cfg.dim) if cross else None
        self.ffn, self.ffn_norm = FFN(cfg), make_norm(cfg, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        x = self._join(x, self.self_attention_norm, lambda h: self.self_attention(h, mask, rotation=rotation))
        if self.cross_attention is not None:
            attend = self.cross_attention
            x = self._join(x, self.cross_attention_norm, lambda h: attend(h, memory_mask, memory=memory))
        return self._join(x, self.ffn_norm, self.ffn)

    def _join(self, x: Tensor, norm: Any, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor = x + self.dropout(sublayer(norm(x))) if self.pre else norm(x + self.dropout(sublayer(x)))
        return y


class Stack(nn.Module):
    """Layers and the final norm."""

    def __init__(self, cfg: ModelConfig, depth: int, *, cross: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(cfg, cross=cross) for _ in range(depth))
        self.norm = make_norm(cfg, cfg.dim) if cfg.has_final_norm else nn.Identity()
        self.rotary = Rotary(cfg) if cfg.position == "rotary" else None

    def forward(self, x: Tensor, mask: Tensor | None, *memory: Tensor) -> Tensor:
        """Maps [B, T, D], with the encoder's output and its mask as `memory` in a decoder, to [B, T, D]."""
        rotation = None if self.rotary is None else self.rotary(x.shape[1])
        for layer in self.layers:
            x = layer(x, mask, rotation, *memory)
        return self.norm(x)


class Input(nn.Module):
    """Token embeddings with position embeddings."""

    def __init__(self, cfg: ModelConfig, embedding: nn.Embedding):
        super().__init__()
        self.embedding, self.dropout = embedding, nn.Dropout(cfg.dropout)
        self.factor = math.sqrt(cfg.dim) if cfg.scale_embeddings else 1.0
        self.positions = nn.Embedding(cfg.max_length, cfg.dim) if cfg.position == "learned" else None
        if cfg.position == "sinusoidal":
            self.register_buffer("fixed", sinusoidal(cfg.max_length, cfg.dim), persistent=False)
        else:
            self.fixed = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens int [B, T] to [B, T, D]."""
        x = self.embedding(tokens.clamp(min=0)) * self.factor  # of PAD, any vector
        table = self.fixed if self.positions is None else self.positions.weight
        return self.dropout(x if table is None else x + table[: tokens.shape[1]])


def sinusoidal(length: int, dim: int) -> Tensor:
    """Returns sines at even and cosines at odd features, float32 [T, D] ("Attention Is All You Need", section 3.5)."""
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).float()
