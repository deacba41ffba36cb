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
        if self.shared_gate and self.shared_dim is None:
            raise self.error("shared_gate", "there is no shared expert; set model.moe.shared_dim, or write False")
        if self.dense_dim is not None and self.every == 1 and not self.dense_layers:
            raise self.error("dense_dim", "every layer has experts; set model.moe.every or model.moe.dense_layers")
