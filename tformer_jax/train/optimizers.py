"""AdamW with global-norm clipping."""

from typing import Any

import jax
import optax

from tformer_jax.config import OptimConfig


def decayed(params: Any) -> Any:
    """True for the parameters that weight decay shrinks: kernels and embeddings, not biases and norm scales."""

    def is_matrix(path, _) -> bool:
        return path[-1].key in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def build(cfg: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW ("Decoupled Weight Decay Regularization", 2019)."""
    adamw = optax.adamw(
        schedule,
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        mask=decayed,
    )
    if cfg.clip_norm == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), adamw)
