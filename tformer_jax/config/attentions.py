"""Settings of single kinds of attention."""

import dataclasses
from typing import ClassVar

from tformer_jax.config.fields import Section, setting


@dataclasses.dataclass(frozen=True)
class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-V2). The head size H is that of keys and queries without positions."""

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
    key_head_dim: int | None = setting(None, "size of one query or key head; None: that of the model's heads", low=1)
    value_head_dim: int | None = setting(None, "size of one value head; None: that of the model's heads", low=1)
    conv_kernel_size: int = setting(
        4, "kernel size, in tokens, of the causal convolutions of queries, keys and values", low=1
    )
