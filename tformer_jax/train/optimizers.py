"""AdamW with global-norm clipping."""

from typing import Any

import jax
import optax

from tformer_jax.config import Config
from tformer_jax.train import schedules


def decayed(params: Any) -> Any:
    """True for the parameters that weight decay shrinks: kernels and embeddings, not biases and norm scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(key, "key", None) in ("kernel", "embedding") for key in path), params
    )


def build(cfg: Config) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW ("Decoupled Weight Decay Regularization", 2019) on the schedule."""
    optim = cfg.optim
    adamw = optax.adamw(
        schedules.build(cfg),
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(optim.clip_norm), adamw) if optim.clip_norm else adamw
