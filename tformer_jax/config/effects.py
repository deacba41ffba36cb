"""Warnings about combinations of settings: some have no effect, others an unwanted one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tformer_jax.config.task import task_of
from tformer_jax.config.training import WITH_AN_END

if TYPE_CHECKING:
    from tformer_jax.config.schema import Config


def without_effect(cfg: "Config") -> list[str]:
    """Returns one sentence for each setting that has no effect, or an unwanted one, with the other settings."""
    return [*task_of(cfg).without_effect(cfg), *_model(cfg), *_schedule(cfg)]


def _model(cfg: "Config") -> Iterator[str]:
    model, moe = cfg.model, cfg.model.moe
    if model.ffn == "moe" and moe.router_normalize and moe.experts_per_token == 1 < moe.num_experts:
        yield (
            "model.moe.router_normalize=True with model.moe.experts_per_token=1 gives each expert a weight of 1, "
            "so that the loss does not train the router; write False"
        )
    if model.scan_layers and max(model.depths) < 2 * model.period:
        yield f"model.scan_layers=True has no effect, because no stack repeats its first {model.period} layers"


def _schedule(cfg: "Config") -> Iterator[str]:
    if cfg.optim.schedule in WITH_AN_END and cfg.optim.warmup_steps >= cfg.train.steps:
        yield (
            f"optim.schedule={cfg.optim.schedule!r} has no effect, because optim.warmup_steps="
            f"{cfg.optim.warmup_steps} is not below train.steps={cfg.train.steps}"
        )
