"""Learning-rate schedules: functions of the step, counted from 0."""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from tformer_jax.config import Config


def inverse_sqrt(peak: float, warmup_steps: int) -> optax.Schedule:
    """`peak * min(t / warmup, sqrt(warmup / t))` with t = step + 1.

    With `peak = D^-0.5 * warmup^-0.5` this is the formula of "Attention Is All You Need" (2017), section 5.3:
    `D^-0.5 * min(t^-0.5, t * warmup^-1.5)`.
    """

    def schedule(step):
        t = jnp.asarray(step, jnp.float32) + 1
        return peak * jnp.minimum(t / warmup_steps, jnp.sqrt(warmup_steps / t))

    return schedule


def cosine(peak: float, warmup_steps: int, steps: int, final_fraction: float) -> optax.Schedule:
    """Linear warm-up, then half a cosine from `peak` to `final_fraction * peak` at `steps`."""

    def schedule(step):
        t = jnp.asarray(step, jnp.float32) + 1
        progress = jnp.clip((t - warmup_steps) / max(steps - warmup_steps, 1), 0, 1)
        decayed = final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return peak * jnp.where(t < warmup_steps, t / warmup_steps, decayed)

    return schedule


def constant(peak: float, warmup_steps: int) -> optax.Schedule:
    """Linear warm-up, then `peak`."""

    def schedule(step):
        t = jnp.asarray(step, jnp.float32) + 1
        return peak * jnp.minimum(t / warmup_steps, 1.0)

    return schedule


def build(cfg: Config) -> optax.Schedule:
    """The schedule that `cfg.optim` names; `inverse_sqrt` takes the paper's peak when none is written."""
    optim, steps = cfg.optim, cfg.train.steps
    peak = (cfg.model.dim * optim.warmup_steps) ** -0.5 if optim.learning_rate is None else optim.learning_rate
    schedules: dict[str, Callable[[], optax.Schedule]] = {
        "inverse_sqrt": lambda: inverse_sqrt(peak, optim.warmup_steps),
        "cosine": lambda: cosine(peak, optim.warmup_steps, steps, optim.final_fraction),
        "constant": lambda: constant(peak, optim.warmup_steps),
    }
    return schedules[optim.schedule]()
