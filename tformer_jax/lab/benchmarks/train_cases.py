"""Cases of `scripts/benchmark.py train`: configs with known sizes, and the shapes of their batches."""

import dataclasses
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tformer_jax import presets
from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig
from tformer_jax.config.sizes import with_sizes
from tformer_jax.data.rows import bucket_sizes
from tformer_jax.special_tokens import SPECIAL_TOKENS

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LEARNING_RATE = 3e-5
"""Small enough that rounding errors do not grow within the steps with compared losses.

With 1e-4, GPT-2's loss of repeated random batches rises and falls from step 10 on, and differs between systems.
"""


class BuiltIn(NamedTuple):
    """A shipped config with batches of a fixed size."""

    config: str
    rows: int
    length: int
    vocab_size: int
    dropout: bool = True
    """Whether the config's own dropout applies."""


BUILT_IN = {
    "lm_small": BuiltIn("lm_tiny_shakespeare.py:cpu", 12, 64, 65),
    "lm_large": BuiltIn("lm_tiny_shakespeare.py:gpu", 8, 256, 65, dropout=False),
    "multi30k": BuiltIn("translate_multi30k.py:baseline", 128, 16, 6000),
    "cldr": BuiltIn("translate_cldr.py", 256, 12, 1000),
    "shakespeare": BuiltIn("lm_tiny_shakespeare.py:gpu", 64, 256, 65, dropout=False),
}
CPU_CASES = ("lm_small", "lm_large", "multi30k", "cldr")
"""The cases of `--case` by default: a step takes less than a second or two on a CPU. The others are sized for a GPU."""


class Published(NamedTuple):
    """A published architecture without dropout, with batches of a fixed size."""

    settings: Mapping[str, Any]
    rows: int
    length: int


GPT2 = presets.settings("gpt2")
PUBLISHED = {
    "gpt2": Published(GPT2, 16, 1024),
    "qwen3": Published(
        {name: GPT2[name] for name in ("family", "max_length", "dim", "decoder_layers", "num_heads")}
        | {"vocab_size": 50_304, "num_kv_heads": 4, "ffn_dim": 2048, "scale_embeddings": False, "initializer": "normal"}
        | presets.LAYERS_OF_QWEN3,
        16,
        1024,
    ),
    "transformer_base": Published(presets.settings("vaswani2017_base"), 128, 64),
}
"""GPT-2, a language model of its width and depth with the layers of Qwen3, and the 2017 Transformer."""
NAMES = (*BUILT_IN, *PUBLISHED)


@dataclasses.dataclass(frozen=True)
class Case:
    """A config, with batches of `rows` rows of `length` random tokens, on each side for translation."""

    name: str
    cfg: Config
    rows: int
    length: int

    @property
    def product(self) -> tuple[int, int, int]:
        """Rows, inner size and columns of the largest matrix product."""
        model = self.cfg.model
        return self.rows * self.length, model.dim, max(model.ffn_dim, model.size("vocab_size"))

    def batches(self, count: int) -> list[dict[str, np.ndarray]]:
        """Returns batches of full rows of random tokens; the same in each call."""
        rng = np.random.default_rng(self.cfg.seed)
        return [self._batch(rng) for _ in range(count)]

    def _batch(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        model = self.cfg.model

        def draw(vocab_size: int, length: int) -> np.ndarray:
            return rng.integers(len(SPECIAL_TOKENS), vocab_size, (self.rows, length), np.int32)

        text = draw(model.size("vocab_size"), self.length + 1)
        if model.model_class.classifies:
            return {"tokens": text[:, 1:], "label": rng.integers(0, model.size("num_classes"), self.rows, np.int32)}
        if not model.model_class.reads_source:
            return {"tokens": text[:, :-1], "targets": text[:, 1:]}
        source = draw(model.size("source_vocab_size"), self.length)
        return {"source": source, "target_in": text[:, :-1], "target_out": text[:, 1:]}


def built_in_case(name: str, cfg: Config) -> Case:
    """Builds the case `name` of `BUILT_IN` from its config, with AdamW, which PyTorch has in a fused form."""
    _, rows, length, vocab_size, dropout = BUILT_IN[name]
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, optimizer="adamw"))
    case = Case(name, for_timing(cfg, vocab_size), rows, length)
    return case if dropout else without_dropout(case)


def published_case(name: str) -> Case:
    """Builds the case `name` of `PUBLISHED`."""
    settings, rows, length = PUBLISHED[name]
    model = ModelConfig(**settings)
    windows = DataConfig(source="stdlib_text", batching="windows", window=length)
    cfg = Config(name=name, model=model, data=windows if model.model_class.continues else DataConfig())
    return without_dropout(Case(name, for_timing(cfg, model.size("vocab_size")), rows, length))


def config_case(cfg: Config) -> Case:
    """Builds the case of a config with its batch size; with buckets, the size of the middle bucket.

    Raises:
        UserError: the config does not determine the size of the vocabulary.
    """
    data = cfg.data
    rows, length = data.batch_size, data.window
    if data.batching == "buckets":
        length = data.bucket_lengths[len(data.bucket_lengths) // 2]
        rows = bucket_sizes(data)[length]
    model = with_sizes(cfg)
    return Case(cfg.name, for_timing(dataclasses.replace(cfg, model=model), model.size("vocab_size")), rows, length)


def for_timing(cfg: Config, vocab_size: int) -> Config:
    """Fills in the sizes that the data would determine, and sets a constant learning rate."""
    model = cfg.model
    sizes: dict[str, Any] = {"vocab_size": model.vocab_size or vocab_size}
    if model.model_class.reads_source:
        sizes["source_vocab_size"] = model.source_vocab_size or vocab_size
    if model.model_class.classifies:
        sizes["num_classes"] = model.num_classes or 2
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(model, **sizes),
        optim=dataclasses.replace(
            cfg.optim,
            schedule="constant",
            learning_rate=LEARNING_RATE,
            warmup_steps=1,
            cycles=1,
            final_fraction=OptimConfig.final_fraction,
            decay_fraction=OptimConfig.decay_fraction,
        ),
    )


def with_model(case: Case, **changes: Any) -> Case:
    """Returns the case with changed settings of the model."""
    cfg = dataclasses.replace(case.cfg, model=dataclasses.replace(case.cfg.model, **changes))
    return dataclasses.replace(case, cfg=cfg)


def without_dropout(case: Case) -> Case:
    """Returns the case without dropout."""
    return with_model(case, dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)


SUPPORTED_VALUES: dict[str, tuple[str, ...]] = {
    "family": ("seq2seq", "decoder_lm"),
    "position": ("none", "sinusoidal", "learned", "rotary"),
    "ffn": ("mlp", "gated"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_placement": ("pre", "post"),
}
"""Settings of the model with the values that the PyTorch model supports."""
SUPPORTED_SETTINGS = {
    *("vocab_size", "source_vocab_size", "num_classes", "max_length", "dim", "encoder_layers", "decoder_layers"),
    *("remat", "attention_backend", "attention_projections", "attention_scale", "num_heads", "head_dim"),
    *("num_kv_heads", "qk_norm", "rotary.base"),
    *("ffn_dim", "ffn_bias", "norm_eps", "norm_bias", "final_norm", "tie_embeddings", "scale_embeddings"),
    *("dropout", "attention_dropout", "ffn_dropout", "initializer", "init_std", "scale_residual_init", "dtype"),
    "embedding_std",
}
"""Settings of the model that it supports with any value; others must have their default."""
UNSUPPORTED_SETTINGS = {
    "optim": ("optimizer", "learning_rate_factors", "decayed", "adaptive_clip"),
    "train": ("accumulate", "z_loss", "ema_decay", "log_norms", "noise_scale"),
}
"""Settings outside the model that must have their default."""


def unsupported_settings(cfg: Config) -> list[str]:
    """Returns the settings, such as `model.ffn='moe'`, that the PyTorch model or optimizer does not support."""
    supported = SUPPORTED_SETTINGS | {*SUPPORTED_VALUES, "attention_bias"}
    unsupported = {f"model.{name}" for name in cfg.model.changed_settings() if name not in supported}
    unsupported |= {
        f"model.{name}" for name, values in SUPPORTED_VALUES.items() if getattr(cfg.model, name) not in values
    }
    if len({"query", "key", "value"} & set(cfg.model.attention_bias)) in (1, 2):
        unsupported.add("model.attention_bias")
    for section, names in UNSUPPORTED_SETTINGS.items():
        unsupported |= {f"{section}.{name}" for name in getattr(cfg, section).changed_settings() if name in names}
    return sorted(f"{name}={operator.attrgetter(name)(cfg)!r}" for name in unsupported)
