"""Learning-rate schedules: functions of the step, counted from 0."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from tformer_jax.config import Config

ROUNDING = 2**-22
"""Relative error of a number of cycles in float32; without it, a restart may come one step late."""

Decay = Callable[[jax.Array], jax.Array]
"""Maps the fraction of the steps after warm-up that are done to the fraction of the peak learning rate."""


def inverse_sqrt(peak: float, warmup_steps: int) -> optax.Schedule:
    """Returns the schedule `peak * min(t / warmup, sqrt(warmup / t))` with t = step + 1.

    With `peak = D^-0.5 * warmup^-0.5` this is the formula of "Attention Is All You Need" (2017), section 5.3:
    `D^-0.5 * min(t^-0.5, t * warmup^-1.5)`.
    """

    def schedule(step):
        t = jnp.asarray(step, jnp.float32) + 1
        return peak * jnp.minimum(t / warmup_steps, jnp.sqrt(warmup_steps / t))

    return schedule


def constant(done: jax.Array) -> jax.Array:
    """Constant 1."""
    return jnp.ones_like(done)


def cosine(final: float) -> Decay:
    """Cosine decay from 1 to `final` (SGDR, 2017)."""
    return lambda done: final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * done))


def linear(final: float) -> Decay:
    """Linear decay from 1 to `final`."""
    return lambda done: 1 - (1 - final) * done


def warmup_stable_decay(final: float, decay_fraction: float) -> Decay:
    """Constant 1, then linear decay to `final` over the last `decay_fraction` (MiniCPM, 2024)."""
    return lambda done: 1 - (1 - final) * jnp.maximum(1 - (1 - done) / max(decay_fraction, 1e-9), 0)


def with_warmup(decay: Decay, peak: float, warmup_steps: int, steps: int, cycles: int) -> optax.Schedule:
    """Linear warm-up, then `cycles` equal repetitions of `decay` until step `steps`; then its final value."""

    def schedule(step):
        t = jnp.asarray(step, jnp.float32) + 1
        done = cycles * jnp.clip((t - warmup_steps) / max(steps - warmup_steps, 1), 0, 1)
        cycle = jnp.minimum(jnp.floor(done * (1 + ROUNDING)), cycles - 1)
        inside = jnp.maximum(done - cycle, 0)
        return peak * jnp.where(t < warmup_steps, t / warmup_steps, decay(inside))

    return schedule


def rate_change(before: Config, cfg: Config, step: int) -> str | None:
    """Returns a warning if other settings change the learning rate of a run that is resumed at `step`."""
    earlier, now = (float(build(settings)(step)) for settings in (before, cfg))
    if math.isclose(earlier, now, rel_tol=1e-3):
        return None
    continues = f"the learning rate continues with {now:.2e} instead of {earlier:.2e}"
    if before.train.steps == cfg.train.steps:
        return continues
    return f"the schedule ends at step {cfg.train.steps}, no longer at {before.train.steps}: {continues}"


def peak(cfg: Config) -> float:
    """Returns the highest learning rate of the schedule."""
    optim = cfg.optim
    return (cfg.model.fixed_dim * optim.warmup_steps) ** -0.5 if optim.learning_rate is None else optim.learning_rate


def build(cfg: Config) -> optax.Schedule:
    """Builds the schedule of `cfg.optim`; the peak of `inverse_sqrt` defaults to the 2017 paper's."""
    optim, highest = cfg.optim, peak(cfg)
    if optim.schedule == "inverse_sqrt":
        return inverse_sqrt(highest, optim.warmup_steps)
    decays: dict[str, Decay] = {
        "constant": constant,
        "cosine": cosine(optim.final_fraction),
        "linear": linear(optim.final_fraction),
        "warmup_stable_decay": warmup_stable_decay(optim.final_fraction, optim.decay_fraction),
    }
    return with_warmup(decays[optim.schedule], highest, optim.warmup_steps, cfg.train.steps, optim.cycles)
