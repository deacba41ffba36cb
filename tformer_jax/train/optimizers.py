"""Builds Optax optimizers by name, with weight-decay masks, learning rates by parameter, and clipping.

Optimizers that use statistics of a whole parameter treat each layer of a scan, each expert and each of several
fused projections as a parameter of its own, so that the layout of the parameters does not change the updates.
"""

import dataclasses
import fnmatch
import functools
import operator
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.core.meta import is_axis_metadata
from optax import contrib

from tformer_jax import axes
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.config import Config, ModelConfig, OptimConfig, kinds
from tformer_jax.models import registry
from tformer_jax.nn.module import parameter_name
from tformer_jax.train import schedules
from tformer_jax.train.parameters import STACKED_AXES, kernel_name, match_globs, matrix_axes


def build(cfg: Config, shapes: Any) -> optax.GradientTransformation:
    """Builds gradient clipping followed by the optimizer of `cfg.optim`; all of it computes in float32.

    With `cfg.train.lora_rank`, it takes only the trainable parameters (`trainable_shapes`).

    Args:
        shapes: shapes of all parameters, boxed with their logical axes (`registry.shapes`).

    Raises:
        UserError: a glob of `cfg.optim.learning_rate_factors` or `decayed` matches no parameter, weight decay is set
            but no trainable parameter decays, or as `lora.trainable_shapes`.
    """
    optim, schedule, shapes = cfg.optim, schedules.build(cfg), trainable_shapes(cfg, shapes)
    names = parameter_names(shapes)
    mask = decay_mask(optim, names)
    core = functools.partial(_kind(optim), optim, schedule)
    separate, split = _separate_shapes(cfg), split_shapes(cfg)
    clips = [optax.clip_by_global_norm(optim.clip_norm)] if optim.clip_norm else []
    if split is None:
        optimizer = core(mask, shapes)
    else:
        masks = jax.tree.map(
            lambda box, decays: np.broadcast_to(decays, box.value.shape), shapes, mask, is_leaf=is_axis_metadata
        )
        from tformer_jax.models import conversions

        masks = conversions.convert_projections(masks, cfg.model, "separate")
        optimizer = _on_separate_projections(core(jax.tree.map(np.any, masks), split), cfg.model)
    if cfg.model.width_factor != 1:
        optimizer = _scaled(optimizer, width_factors(cfg, shapes), but_decay=True)
    if optim.adaptive_clip:
        clip = _adaptive_clip(optim.adaptive_clip, shapes if separate is None else separate)
        clip = clip if separate is None else _on_separate_projections(clip, cfg.model)
        clips.append(clip)
    if optim.learning_rate_factors:
        optimizer = _scaled(optimizer, _factors(optim, names))
    return _in_float32(optax.chain(_without_state(clips), optimizer))


def trainable_shapes(cfg: Config, shapes: Any) -> Any:
    """Returns the boxed shapes of the trainable parameters: all `shapes`, or with LoRA `lora.trainable_shapes`."""
    if not cfg.train.lora_rank:
        return shapes
    from tformer_jax.train import lora

    return lora.trainable_shapes(cfg.train, shapes)


def digest(optimizer: optax.GradientTransformation, cfg: Config, shapes: Any) -> int:
    """Returns a checksum of what an optimizer of Python computes, with its constants; see `trace_update`."""
    program = trace_update(optimizer, cfg, shapes)
    constants = [np.asarray(plain_array(value)).tolist() for value in program.consts]
    return zlib.crc32(re.sub(r"0x[0-9a-f]+", "", f"{program}{constants}").encode())


def trace_update(optimizer: optax.GradientTransformation, cfg: Config, shapes: Any) -> Any:
    """Returns the program of an update of an optimizer of Python; shapes are as for `build`.

    Raises:
        UserError: a call fails, such as an update that needs the loss, or an update returns something else than the
            updates and a state of the structure that it gets.
    """
    params = nn.unbox(trainable_shapes(cfg, shapes))
    call = "init(params)"
    try:
        state = jax.eval_shape(optimizer.init, params)
        call = "update(gradients, state, params)"
        program, result = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
    except (TypeError, ValueError) as error:
        problem = f"optimizer= is called as {call}, which fails: {first_line(error)}"
        raise UserError(f"{problem}; pass an Optax transformation that needs nothing else") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError("optimizer.update returns something else than two values: return the updates and the new state")
    before: Any = jax.tree.structure(state)
    if jax.tree.structure(result[1]) != before:
        raise UserError("optimizer.update returns a state of another structure than it gets: return one like init's")
    return program


def plain_array(array: Any) -> Any:
    """Returns an array, or the data of an array of PRNG keys, as uint32."""
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _kind(optim: OptimConfig) -> Any:
    return kinds.load(kinds.OPTIMIZERS, optim.optimizer)


def decay_mask(optim: OptimConfig, names: Any) -> Any:
    """Returns a bool tree that is True for the parameters with weight decay."""
    trained = jax.tree.map(bool, _factors(optim, names))
    names = jax.tree.map(kernel_name, names)
    leaves = jax.tree.leaves(names)
    for glob in optim.decayed if "decayed" in optim.changed_settings() else ():
        match_globs(optim, "decayed", glob, leaves)
    mask = jax.tree.map(lambda name: any(fnmatch.fnmatch(name, glob) for glob in optim.decayed), names)
    if optim.weight_decay and not any(map(operator.and_, jax.tree.leaves(mask), jax.tree.leaves(trained))):
        problem = f"optim.decayed={optim.decayed} matches no trainable parameter, such as {leaves[0]!r}"
        raise optim.error("weight_decay", f"{problem}; write 0")
    return mask


def parameter_names(shapes: Any) -> Any:
    """Returns the parameter tree with each leaf replaced by its name, such as `encoder/layers_0/...`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_name(path), shapes, is_leaf=is_axis_metadata)


def split_shapes(cfg: Config) -> Any | None:
    """Returns boxed shapes with separate projections if the optimizer splits fused ones, else None."""
    return None if getattr(_kind(cfg.optim), "elementwise", False) else _separate_shapes(cfg)


def _separate_shapes(cfg: Config) -> Any | None:
    """Returns boxed shapes with separate projections if the trainable parameters have fused ones, else None."""
    if cfg.train.lora_rank or cfg.model.attention_projections == "separate":
        return None
    return registry.shapes(registry.build(dataclasses.replace(cfg.model, attention_projections="separate")))


def width_factors(cfg: Config, shapes: Any) -> Any:
    """Returns muP's learning-rate factor of each parameter (Tensor Programs V, 2022, table 8).

    With m = D / `model.base_dim`, matrices between hidden layers have the power of m that the optimizer declares as
    `width_power`. Embeddings, output heads, biases and norms have 1. The product of weight decay and learning rate does
    not depend on the width, as in the authors' implementation.
    """
    factor = cfg.model.width_factor ** _kind(cfg.optim).width_power
    return jax.tree.map(lambda box: factor if matrix_axes(box.names) else 1.0, shapes, is_leaf=is_axis_metadata)


def not_frozen(optim: OptimConfig, params: Any) -> Any:
    """Returns a bool tree that is False for the parameters that `optim.learning_rate_factors` freezes."""
    return jax.tree.map(bool, _factors(optim, parameter_names(params)))


def evaluation_params(opt_state: optax.OptState, params: Any) -> Any:
    """Returns the parameters to evaluate: the average of a schedule-free optimizer, else `params`."""
    for node in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free):
        if _is_schedule_free(node):
            average = contrib.schedule_free_eval_params(node, params)
            return jax.tree.map(lambda new, old: new.astype(old.dtype), average, params)
    return params


def build_readable(cfg: Config, shapes: Any) -> optax.GradientTransformation:
    """Returns the optimizer whose state checkpoints have; for an optimizer given in Python, one without a state."""
    return optax.identity() if cfg.optim.optimizer == "python" else build(cfg, shapes)


def needed_to_evaluate(opt_state: optax.OptState, other: Any) -> optax.OptState:
    """Returns the optimizer state with every leaf that `evaluation_params` does not use replaced by `other`."""

    def keep(node: Any) -> Any:
        replaced = jax.tree.map(lambda _: other, node)
        return replaced._replace(b1=node.b1, z=node.z) if _is_schedule_free(node) else replaced

    return jax.tree.map(keep, opt_state, is_leaf=_is_schedule_free)


def _on_separate_projections(
    optimizer: optax.GradientTransformation, model: ModelConfig
) -> optax.GradientTransformation:
    """Applies an optimizer of separate attention projections to parameters with fused ones."""
    from tformer_jax.models import conversions

    separate = dataclasses.replace(model, attention_projections="separate")
    split = functools.partial(conversions.convert_projections, cfg=model, layout="separate")
    fuse = functools.partial(conversions.convert_projections, cfg=separate, layout=model.attention_projections)

    def update(grads: Any, opt_state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        updates, opt_state = optimizer.update(split(grads), opt_state, split(params))
        return fuse(updates), opt_state

    return optax.GradientTransformation(lambda params: optimizer.init(split(params)), update)


def _adaptive_clip(bound: float, shapes: Any) -> optax.GradientTransformation:
    """Applies `optax.adaptive_grad_clip` with the inputs of one kernel output, or a whole bias, as a unit.

    The inputs are all axes but the last if that is the model width or the rank of a LoRA factor (whose name is None).
    """

    def unit(box: Any) -> tuple[int, ...]:
        inner = [axis for axis, name in enumerate(box.names) if name not in STACKED_AXES]
        ends = [box.names[axis] in (axes.EMBED, None) for axis in inner]
        if len(inner) < 2 or not (ends[0] or ends[-1]):
            return tuple(inner)
        return tuple(inner[:1] if ends[0] else inner[:-1])

    def clip(box: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        clipping = optax.adaptive_grad_clip(bound, axis=unit(box))
        return clipping.update(update, clipping.init(param), param)[0]

    return optax.stateless(
        lambda updates, params: jax.tree.map(clip, shapes, updates, params, is_leaf=is_axis_metadata)
    )


def _factors(optim: OptimConfig, names: Any) -> Any:
    """Returns the learning-rate factor of each parameter."""
    entries = [entry.rpartition("=") for entry in optim.learning_rate_factors]
    leaves = jax.tree.leaves(names)
    for glob, _, _ in entries:
        every = [*dict.fromkeys([*leaves, *map(kernel_name, leaves)])]
        match_globs(optim, "learning_rate_factors", glob, every)

    def factor(name: str) -> float:
        own = {name, kernel_name(name)}
        return next((float(value) for glob, _, value in entries if any(fnmatch.filter(own, glob))), 1.0)

    factors = jax.tree.map(factor, names)
    if not any(jax.tree.leaves(factors)):
        raise optim.error("learning_rate_factors", "freezes all parameters; leave out the globs of parameters to train")
    return factors


def _without_state(transformations: list[optax.GradientTransformation]) -> optax.GradientTransformation:
    """Applies transformations without a state; the structure of the state does not depend on their number."""

    def update(updates: Any, params: Any) -> Any:
        for part in transformations:
            updates, _ = part.update(updates, part.init(params), params)
        return updates

    return optax.stateless(update)


def _scaled(
    optimizer: optax.GradientTransformation, factors: Any, *, but_decay: bool = False
) -> optax.GradientTransformation:
    """Multiplies the updates by `factors`; with `but_decay` not the weight decay, the only use of the parameters."""

    def update(grads: Any, opt_state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        read = jax.tree.map(jnp.divide, params, factors) if but_decay else params
        updates, opt_state = optimizer.update(grads, opt_state, read)
        return jax.tree.map(jnp.multiply, updates, factors), opt_state

    return optax.GradientTransformation(optimizer.init, update)


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps an optimizer so that its state and arithmetic are float32 for parameters of any dtype."""

    def init(params: Any) -> optax.OptState:
        return optimizer.init(optax.tree.cast(params, jnp.float32))

    def update(grads: Any, opt_state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        grads, params = optax.tree.cast(grads, jnp.float32), optax.tree.cast(params, jnp.float32)
        return optimizer.update(grads, opt_state, params)

    return optax.GradientTransformation(init, update)


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, contrib.ScheduleFreeState)
