"""The models of `scripts/benchmark.py train` in idiomatic PyTorch.

The forward pass includes the loss, so that `torch.compile` optimizes both. `train_cases.unsupported_settings` lists the
settings that they do not support.
"""

import collections
import math
import re
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tformer_jax.config import Config
from tformer_jax.lab.benchmarks.torch_layers import Input, Stack
from tformer_jax.special_tokens import IGNORED, PAD

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


class Model(nn.Module):
    """Base class with the output head and the loss."""

    def __init__(self, cfg: Config, tied: nn.Embedding | None):
        super().__init__()
        self.smoothing = cfg.train.label_smoothing
        self.head = nn.Linear(cfg.model.dim, cfg.model.known("vocab_size"), bias=False)
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
        embedding = nn.Embedding(cfg.model.known("vocab_size"), cfg.model.dim)
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
        target = nn.Embedding(model.known("vocab_size"), model.dim)
        super().__init__(cfg, target if tied in ("output", "all") else None)
        source = target if tied in ("inputs", "all") else nn.Embedding(model.known("source_vocab_size"), model.dim)
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
