"""Settings and values of parts of layers: kinds of attention, experts, positions, layouts; the layer pattern."""

import dataclasses
from typing import Any, ClassVar

from tformer_jax.config import kinds
from tformer_jax.config.fields import Section, setting

DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("int8_weights", "int8")
PROJECTIONS = ("query", "key", "value", "output")
FUSED = {"separate": (), "fused_qkv": ("query", "key", "value"), "fused_kv": ("key", "value")}
"""Projections that each value of `attention_projections` fuses into one."""
REMAT_POLICIES = (
    "none",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
)
NORM_PLACEMENTS = ("pre", "post", "both", "output")
MEANS = ("probabilities", "log_probabilities")
"""What an ensemble averages; the mean of log-probabilities is normalized."""


@dataclasses.dataclass(frozen=True)
class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-V2). H is the size of a query or key head without its rotary part."""

    path: ClassVar[str] = "model.mla"

    latent_dim: int = setting(512, "size of the cached latent, from which keys and values are projected", low=1)
    query_latent_dim: int | None = setting(None, "size of the query latent; None: no query latent", low=1)
    rotary_dim: int = setting(
        64, "rotary dimension: of the key that all heads share, and of the rotated part of each query", low=2
    )
    value_dim: int | None = setting(None, "size of one value head; None: H", low=1)

    def check(self) -> None:
        if self.rotary_dim % 2:
            raise self.error("rotary_dim", "must be even: pairs of features are rotated")


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig(Section):
    """Gated delta rule (Gated DeltaNet): per value head, a state [key_head_dim, value_head_dim] for keys and values."""

    path: ClassVar[str] = "model.gated_delta"

    num_heads: int | None = setting(None, "value heads, each with a state; None: model.num_heads", low=1)
    num_key_heads: int | None = setting(
        None, "query and key heads, shared by groups of value heads; None: num_heads", low=1
    )
    key_head_dim: int | None = setting(None, "size of one query or key head; None: the model's head size", low=1)
    value_head_dim: int | None = setting(None, "size of one value head; None: the model's head size", low=1)
    conv_kernel_size: int = setting(
        4, "kernel size, in tokens, of the causal convolutions of queries, keys and values", low=1
    )


@dataclasses.dataclass(frozen=True)
class MoEConfig(Section):
    """Mixture of experts."""

    path: ClassVar[str] = "model.moe"

    num_experts: int = setting(8, "[E] experts", low=1)
    experts_per_token: int = setting(2, "experts chosen per token", low=1)
    expert_gated: bool = setting(True, "experts are gated FFNs")
    expert_capacity: float | None = setting(
        None, "capacity factor: maximum tokens per expert, as a multiple of an even share; training only", above=0.0
    )
    router_normalize: bool = setting(
        True,
        "renormalize the router probabilities of the chosen experts to sum to 1; if one is chosen, only the balance "
        "loss trains the router",
    )
    router_scores: str = setting(
        "softmax", "scores of experts by their logits; sigmoid: DeepSeek-V3", choices=("softmax", "sigmoid")
    )
    router_bias: str = setting(
        "none",
        "learned bias of the logits (gpt-oss), or one that only the choice of experts adds to scores (DeepSeek-V3), "
        "which the loss does not train",
        choices=("none", "logits", "choice"),
    )
    router_factor: float = setting(1.0, "multiply the weights of the chosen experts by this number", above=0.0)
    groups: int = setting(1, "groups of experts; a token uses experts of groups_per_token groups (DeepSeek-V2)", low=1)
    groups_per_token: int = setting(1, "groups with the highest scores that a token may use", low=1)
    group_top: int = setting(
        1, "highest scores of experts whose sum is the score of a group; DeepSeek-V2: 1, DeepSeek-V3: 2", low=1
    )
    gate_limit: float | None = setting(
        None,
        "limit of the gate of an expert, and of the features that it multiplies, to which 1 is added (gpt-oss); "
        "None: neither",
        above=0.0,
    )
    every: int = setting(1, "n: the last of each n layers has experts, the others a dense FFN", low=1)
    dense_layers: int = setting(0, "leading layers of a stack that have a dense FFN instead of experts", low=0)
    dense_dim: int | None = setting(None, "FFN width of layers without experts; None: model.ffn_dim", low=1)
    shared_dim: int | None = setting(None, "FFN width of a shared expert, which every token uses; None: none", low=1)
    shared_gate: bool = setting(False, "multiply the output of the shared expert by sigmoid(w x)")
    balance_loss: float = setting(0.01, "weight of the load-balance loss", low=0.0)
    router_z_loss: float = setting(0.0, "weight of the router's z-loss", low=0.0)

    def check(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise self.error("experts_per_token", f"must be at most model.moe.num_experts={self.num_experts}")
        size = self.num_experts // self.groups
        if self.num_experts % self.groups or self.group_top > size:
            raise self.error("groups", f"must be equal groups of model.moe.group_top={self.group_top} or more experts")
        if not self.experts_per_token <= self.groups_per_token * size <= self.num_experts:
            raise self.error("groups_per_token", f"must have {self.experts_per_token} of {self.num_experts} experts")
        if self.gate_limit is not None and not self.expert_gated:
            raise self.error("gate_limit", "needs model.moe.expert_gated=True; write None")
        if self.shared_gate and self.shared_dim is None:
            raise self.error("shared_gate", "there is no shared expert; set model.moe.shared_dim, or write False")
        if self.dense_dim is not None and self.every == 1 and not self.dense_layers:
            raise self.error("dense_dim", "every layer has experts; set model.moe.every or model.moe.dense_layers")


YARN = {"scaling": ("yarn",)}


@dataclasses.dataclass(frozen=True)
class RotaryConfig(Section):
    """Rotary position embeddings."""

    path: ClassVar[str] = "model.rotary"

    pairing: str = setting(
        "halves",
        "rotate feature i with i + R/2 (of R rotated features), or with its neighbor",
        choices=("halves", "interleaved"),
    )
    base: float = setting(
        10_000.0, "base of the wavelengths (RoPE theta); the longest is about 2 pi base tokens", low=1.0
    )
    window_base: float | None = setting(
        None, "base in `window` layers, without scaling; None: as in full layers", low=1.0
    )
    fraction: float = setting(1.0, "fraction of each head that is rotated, its first features", low=0.0, high=1.0)
    scaling: str = setting("none", "scaling of long contexts", choices=("none", "linear", "llama3", "yarn"))
    factor: float = setting(1.0, "scaling factor", low=1.0)
    original_length: int = setting(
        8192, "context length before scaling, in tokens", low=1, used_by={"scaling": ("llama3", "yarn")}
    )
    beta_fast: float = setting(
        32.0, "frequencies of at least this many rotations in original_length are kept", above=0.0, used_by=YARN
    )
    beta_slow: float = setting(
        1.0,
        "frequencies of at most this many rotations in original_length are divided by factor",
        above=0.0,
        used_by=YARN,
    )
    rounded: bool = setting(
        True, "round the indices of these frequencies outward, as YaRN's authors do; gpt-oss: False", used_by=YARN
    )
    attention_factor: float | None = setting(
        None, "scale of rotated queries and of rotated keys; None: 0.1 ln(factor) + 1", above=0.0, used_by=YARN
    )

    def check(self) -> None:
        if self.scaling == "none" and self.factor != 1.0:
            raise self.error("factor", "needs model.rotary.scaling='linear', 'llama3' or 'yarn'; write 1.0")
        if self.scaling != "none" and self.factor == 1.0 and self.attention_factor is None:
            raise self.error("factor", f"must exceed 1.0 for model.rotary.scaling={self.scaling!r}")
        if self.scaling == "yarn" and self.base == 1.0:
            raise self.error("base", "must exceed 1.0 for model.rotary.scaling='yarn'")
        if self.beta_fast <= self.beta_slow:
            raise self.error("beta_fast", f"must exceed model.rotary.beta_slow={self.beta_slow}")


@dataclasses.dataclass(frozen=True)
class RelativeConfig(Section):
    """Relative position biases of T5."""

    path: ClassVar[str] = "model.relative"

    buckets: int = setting(32, "number of distance buckets", low=4)
    distance: int = setting(128, "distance, in tokens, from which all distances share a bucket", low=2)
    by_layer: bool = setting(False, "each layer has biases of its own (umT5); False: all layers of a stack share them")

    def check(self) -> None:
        if self.buckets % 4:
            raise self.error("buckets", "must be a multiple of 4")
        if self.distance <= self.buckets // 2:
            raise self.error("distance", f"must exceed half of model.relative.buckets={self.buckets}")


def check_layer_pattern(cfg: Any) -> None:
    """Raises `ConfigError` for layers that do not fit the other settings, or settings that no layer uses."""
    if not cfg.layer_pattern:
        raise cfg.error("layer_pattern", "must name at least one layer, such as ('full',)")
    for layer in {*cfg.layer_pattern} & {*kinds.ATTENTIONS}:
        if not kinds.is_recurrent(layer):
            raise cfg.error("layer_pattern", f"{layer!r} is no recurrence; write 'full', and model.attention={layer!r}")
    if cfg.attention not in cfg.attentions:
        raise cfg.error(
            "layer_pattern",
            f"no layer uses model.attention={cfg.attention!r}; set model.attention={cfg.attentions[0]!r}",
        )
    deepest = max(cfg.depths)
    if deepest and (unused := {*cfg.layer_pattern[deepest:]} - {*cfg.layer_pattern[:deepest]}):
        raise cfg.error("layer_pattern", f"no stack reaches {min(unused)!r} in {deepest} layers; shorten the pattern")
    if "window" in cfg.layer_pattern and cfg.window is None:
        raise cfg.error("window", "must be a number of tokens where model.layer_pattern has 'window' layers")
    if cfg.window is not None and "window" not in cfg.layer_pattern:
        raise cfg.error("window", "no layer uses it; write 'window' in model.layer_pattern")
    at_scores = getattr(kinds.load(kinds.POSITIONS, cfg.position), "at_scores", False)
    if "nope" in cfg.layer_pattern and not at_scores:
        raise cfg.error(
            "layer_pattern", f"'nope' has no effect with model.position={cfg.position!r}; write 'full' there"
        )
    if "nope" in cfg.layer_pattern and not {"full", "window"} & {*cfg.layer_pattern}:
        raise cfg.error(
            "layer_pattern",
            f"no layer uses model.position={cfg.position!r}; write model.position='none', and 'full' here",
        )
