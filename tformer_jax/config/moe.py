"""Settings of the mixture of experts."""

import dataclasses
from typing import ClassVar

from tformer_jax.config.fields import Section, setting


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
    groups: int = setting(1, "groups of experts, some of which a token may use (DeepSeek-V2)", low=1)
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
