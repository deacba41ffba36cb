"""The models of `scripts/benchmark.py train` in idiomatic PyTorch, with fused projections.

The forward pass includes the loss, so that `torch.compile` optimizes both. `train_cases.unsupported_settings` lists the
settings that they do not support.
"""

import collections
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tformer_jax.config import Config, ModelConfig
from tformer_jax.special_tokens import IGNORED, PAD

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}
FUSED = ("query", "key", "value", "gate", "expand")
"""Our projections that are parts of a fused one, in the order of its features."""
NAMES = {
    r"self_attention/(query|key|value)/": "self_attention/fused/",
    r"cross_attention/(key|value)/": "cross_attention/fused/",
    r"_residual/norm/": "_norm/",
    r"ffn/gate/": "ffn/expand/",
    r"layers_(\d+)": r"layers/\1",
    r"^embedding/": "input/embedding/",
    r"^(source|target)_embedding/": r"\1_input/embedding/",
    r"/(kernel|scale|embedding)$": "/weight",
}
"""Regular expressions that map paths of our parameters to PyTorch's, applied in order."""


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


class Model(nn.Module):
    """Base class with the output head and the loss."""

    def __init__(self, cfg: Config, tied: nn.Embedding | None):
        super().__init__()
        self.smoothing = cfg.train.label_smoothing
        self.head = nn.Linear(cfg.model.dim, cfg.model.size("vocab_size"), bias=False)
        if tied is not None:
            self.head.weight = tied.weight

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross-entropy, in nats, of features [B, T, D] for labels int [B, T]."""
        logits = self.head(x).float()
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing
        )


class DecoderLM(Model):
    """A decoder-only language model, without a padding mask."""

    def __init__(self, cfg: Config):
        embedding = nn.Embedding(cfg.model.size("vocab_size"), cfg.model.dim)
        super().__init__(cfg, embedding if cfg.model.tie_embeddings == "output" else None)
        self.input = Input(cfg.model, embedding)
        self.decoder = Stack(cfg.model, cfg.model.decoder_layers)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of a batch."""
        return self.loss(self.decoder(self.input(batch["tokens"]), None), batch["targets"])


class Seq2Seq(Model):
    """An encoder-decoder model."""

    def __init__(self, cfg: Config):
        model, tied = cfg.model, cfg.model.tie_embeddings
        target = nn.Embedding(model.size("vocab_size"), model.dim)
        super().__init__(cfg, target if tied in ("output", "all") else None)
        source = target if tied in ("inputs", "all") else nn.Embedding(model.size("source_vocab_size"), model.dim)
        self.source_input, self.target_input = Input(model, source), Input(model, target)
        self.encoder = Stack(model, model.encoder_layers)
        self.decoder = Stack(model, model.decoder_layers, cross=True)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of a batch."""
        source, target = batch["source"], batch["target_in"]
        T = target.shape[1]
        source_mask, target_mask = ((tokens != PAD)[:, None, None] for tokens in (source, target))
        causal = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        memory = self.encoder(self.source_input(source), source_mask)
        x = self.decoder(self.target_input(target), target_mask & causal, memory, source_mask)
        return self.loss(x, batch["target_out"])


def build(cfg: Config) -> Model:
    """Builds the model of a config without `train_cases.unsupported_settings`."""
    return {"decoder_lm": DecoderLM, "seq2seq": Seq2Seq}[cfg.model.family](cfg)


def load_params(model: Model, params: Mapping[str, np.ndarray]) -> None:
    """Loads our parameters, by path and with separate projections, into a PyTorch model.

    Raises:
        ValueError: the parameters of the two do not match.
    """
    parts = collections.defaultdict(list)
    for path in sorted(params, key=lambda path: next((i for i, role in enumerate(FUSED) if f"/{role}/" in path), 0)):
        parts[torch_name(path)].append(torch_layout(path, params[path]))
    state = {name: torch.cat(tensors) for name, tensors in parts.items()}
    unknown = model.load_state_dict(state, strict=False).unexpected_keys
    given, needed = (sum(tensor.numel() for tensor in tensors) for tensors in (state.values(), model.parameters()))
    if unknown or given != needed:
        raise ValueError(f"{given:,} parameters given, {needed:,} needed; unknown: {unknown}")


def torch_name(path: str) -> str:
    """Returns the name of the PyTorch parameter that contains our parameter `path`."""
    for pattern, name in NAMES.items():
        path = re.sub(pattern, name, path)
    return path.replace("/", ".")


def torch_layout(path: str, array: np.ndarray) -> Tensor:
    """Reshapes kernels to [outputs, inputs] and biases to [outputs]; other arrays are unchanged."""
    if path.endswith("/kernel"):
        inputs = array.ndim - 1 if path.endswith("/output/kernel") else 1
        array = array.reshape(math.prod(array.shape[:inputs]), -1).T
    return torch.from_numpy(array.reshape(-1) if path.endswith("/bias") else np.ascontiguousarray(array))
