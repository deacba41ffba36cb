"""Optimizers by name: Optax's, with decay masks, learning rates by parameter, and clipping."""

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tformer_jax import axes
from tformer_jax.config import Config, OptimConfig
from tformer_jax.train import schedules

MUON_RMS = 0.2
"""Size of Muon's updates: that of AdamW's, so that both take the same learning rate ("Muon is Scalable", 2025)."""
MATRIX_AXES = {axes.EMBED, axes.HEADS, axes.KV_HEADS, axes.HEAD_DIM, axes.MLP}
BATCH_AXES = {axes.LAYERS, axes.EXPERTS}
"""Axes along which a parameter is several matrices."""

Build = Callable[[OptimConfig, optax.Schedule, Any, Any], optax.GradientTransformation]
"""From the settings, the schedule, where weight decay works (bool tree), and the parameters' logical axes."""


def build(cfg: Config, shapes: Any) -> optax.GradientTransformation:
    """Clipping, then the optimizer that `cfg.optim` names; all of it computes in float32.

    Args:
        shapes: the parameters as shapes, boxed with their logical axes (`registry.shapes`).

    Raises:
        ConfigError: a glob of `cfg.optim` fits no parameter.
    """
    optim, schedule = cfg.optim, schedules.build(cfg)
    names = parameter_names(shapes)
    mask = jax.tree.map(lambda name: any(fnmatch.fnmatch(name, glob) for glob in optim.decayed), names)
    parts = []
    if optim.clip_norm:
        parts.append(optax.clip_by_global_norm(optim.clip_norm))
    if optim.adaptive_clip:
        parts.append(optax.adaptive_grad_clip(optim.adaptive_clip))
    parts.append(OPTIMIZERS[optim.optimizer](optim, schedule, mask, logical_axes(shapes)))
    if optim.learning_rates:
        parts.append(_scaled(_factors(optim, names)))
    return _in_float32(optax.chain(*parts))


def parameter_names(shapes: Any) -> Any:
    """The tree of parameters with `encoder/layers_0/...` in the place of each."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(key.key) for key in path), shapes, is_leaf=_is_box
    )


def logical_axes(shapes: Any) -> Any:
    """The tree of parameters with the tuple of logical axes in the place of each."""
    return jax.tree.map(lambda box: box.names, shapes, is_leaf=_is_box)


def evaluation_params(opt_state: optax.OptState, params: Any) -> Any:
    """The parameters to evaluate: `params`, or the average that a schedule-free optimizer keeps."""
    is_schedule_free = lambda node: isinstance(node, contrib.ScheduleFreeState)  # noqa: E731
    for node in jax.tree.leaves(opt_state, is_leaf=is_schedule_free):
        if is_schedule_free(node):
            average = contrib.schedule_free_eval_params(node, params)
            return jax.tree.map(lambda new, old: new.astype(old.dtype), average, params)
    return params


def matrix_axes(names: Sequence[str | None]) -> contrib.MuonDimensionNumbers | None:
    """Which axes of a parameter Muon sums over, and which it gives out; None for what is no matrix of a layer."""
    kept = [place for place, name in enumerate(names) if name not in BATCH_AXES]
    inner = [names[place] for place in kept]
    if len(inner) < 2 or not set(inner) <= MATRIX_AXES or axes.EMBED not in (inner[0], inner[-1]):
        return None
    split = 1 if inner[0] == axes.EMBED else len(kept) - 1
    return contrib.MuonDimensionNumbers(tuple(kept[:split]), tuple(kept[split:]))


def _adamw(optim, schedule, mask, _):
    return optax.adamw(
        schedule, b1=optim.beta1, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=mask
    )


def _adafactor(optim, schedule, mask, _):
    return optax.adafactor(
        schedule,
        weight_decay_rate=(lambda step: optim.weight_decay * schedule(step)) if optim.weight_decay else None,
        weight_decay_mask=mask,
    )


def _lion(optim, schedule, mask, _):
    return optax.lion(schedule, b1=optim.beta1, b2=optim.beta2, weight_decay=optim.weight_decay, mask=mask)


def _lamb(optim, schedule, mask, _):
    return optax.lamb(
        schedule, b1=optim.beta1, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=mask
    )


def _sgd(optim, schedule, mask, _):
    decay = optax.add_decayed_weights(optim.weight_decay, mask)
    return optax.chain(decay, optax.sgd(schedule, momentum=optim.beta1 or None))


def _muon(optim, schedule, mask, names):
    def choose(tree: Any, label: str) -> Any:
        return jax.tree.map(lambda leaf, found: leaf if found == label else optax.MaskedNode(), tree, labels)

    is_names = lambda node: isinstance(node, tuple)  # noqa: E731
    numbers = jax.tree.map(lambda axes: matrix_axes(axes) or optax.MaskedNode(), names, is_leaf=is_names)
    labels = jax.tree.map(lambda axes: "muon" if matrix_axes(axes) else "adamw", names, is_leaf=is_names)
    matrices = optax.chain(
        optax.trace(optim.muon_beta, nesterov=True),
        optax.stateless(lambda momentum, _: _orthogonal(momentum, numbers)),
        optax.add_decayed_weights(optim.weight_decay, choose(mask, "muon")),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": matrices, "adamw": _adamw(optim, schedule, choose(mask, "adamw"), None)}, labels)


def _orthogonal(momentum: Any, numbers: Any) -> Any:
    """The nearest matrices with orthogonal rows or columns, by Newton-Schulz iteration, in the size of AdamW's steps.

    Optax's Muon with no momentum of its own: that would weigh the first gradients otherwise than the published one.
    """
    newton_schulz = contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers)
    matrices, _ = newton_schulz.update(momentum, newton_schulz.init(momentum))

    def scaled(matrix: jax.Array, axes: contrib.MuonDimensionNumbers) -> jax.Array:
        sides = [math.prod(matrix.shape[axis] for axis in side) for side in axes]
        return MUON_RMS * math.sqrt(max(sides)) * matrix

    return jax.tree.map(scaled, matrices, numbers)


def _schedule_free_adamw(optim, schedule, mask, _):
    adamw = optax.adamw(schedule, b1=0.0, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=mask)
    return contrib.schedule_free(adamw, lambda count: schedule(count - 1), b1=optim.beta1)  # it counts from 1


OPTIMIZERS: dict[str, Build] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "lamb": _lamb,
    "sgd": _sgd,
    "muon": _muon,
    "schedule_free_adamw": _schedule_free_adamw,
}


def _factors(optim: OptimConfig, names: Any) -> Any:
    """The factor of each parameter's learning rate."""
    entries = [entry.rpartition("=") for entry in optim.learning_rates]
    for glob, _, _ in entries:
        if not any(fnmatch.fnmatch(name, glob) for name in jax.tree.leaves(names)):
            raise optim.error("learning_rates", f"{glob!r} fits no parameter; one is {jax.tree.leaves(names)[0]!r}")

    def factor(name: str) -> float:
        return next((float(value) for glob, _, value in entries if fnmatch.fnmatch(name, glob)), 1.0)

    return jax.tree.map(factor, names)


def _scaled(factors: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(lambda update, factor: factor * update, updates, factors))


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer for parameters of any dtype: its state, and what it computes, are float32."""

    def init(params: Any) -> optax.OptState:
        return optimizer.init(optax.tree.cast(params, jnp.float32))

    def update(grads: Any, opt_state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        grads, params = optax.tree.cast(grads, jnp.float32), optax.tree.cast(params, jnp.float32)
        return optimizer.update(grads, opt_state, params)

    return optax.GradientTransformation(init, update)


def _is_box(node: Any) -> bool:
    return hasattr(node, "names")
