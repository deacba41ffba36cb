"""One optimizer step, as a pure function."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax.config import Config
from tformer_jax.models import registry
from tformer_jax.models.losses import Sums, batch_loss, no_sums
from tformer_jax.parallel import rules
from tformer_jax.special_tokens import PAD
from tformer_jax.train import diagnostics, optimizers
from tformer_jax.train.state import TrainState
from tformer_jax.train.step_metrics import StepMetrics, pack

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(model: nn.Module, optimizer: optax.GradientTransformation, cfg: Config) -> TrainStep:
    """Builds `train_step(state, batch) -> (state, metrics)`, ready for `jax.jit`.

    The loss is a sum over labels divided once by their number in the global batch, so that neither padding, nor
    `cfg.train.accumulate`, nor the number of devices changes it. A step whose loss or gradient is not finite changes
    nothing but the counts of steps.

    Metrics are float32 scalars: `loss` (nats a label; with label smoothing, `nll` is the loss without it), `labels`
    (how many were counted), `tokens` (in the model's inputs, without padding), `grad_norm` (before clipping), `skipped`
    (steps in a row up to this one), and those of `diagnostics` that `cfg.train` asks for.
    """
    train = cfg.train

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(cfg.seed), state.step)
        sums, grads, norms = accumulated_gradients(model, state.params, batch, key, cfg)
        norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
        loss = sums.loss / jnp.maximum(sums.labels, 1)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        skipped = jnp.where(finite, 0, state.skipped + 1)
        new = (params, opt_state, moved_mean(state.ema, params, state.step, train.ema_decay))
        old = (state.params, state.opt_state, state.ema)
        params, opt_state, ema = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)
        tokens = sum((batch[key] != PAD).sum() for key in registry.FAMILIES[cfg.model.family].inputs)
        metrics = {"loss": loss, "labels": sums.labels, "tokens": tokens, "grad_norm": norm, "skipped": skipped}
        if train.label_smoothing:
            metrics["nll"] = sums.nll / jnp.maximum(sums.labels, 1)
        if train.layer_norms:
            metrics |= diagnostics.layer_norms(grads, "grad_norm") | diagnostics.layer_norms(params, "param_norm")
        if train.noise_scale:
            metrics |= diagnostics.noise_parts(norm, norms, sums.labels / train.accumulate, sums.labels)
        new_state = TrainState(step=state.step + 1, skipped=skipped, params=params, opt_state=opt_state, ema=ema)
        return new_state, {name: value.astype(jnp.float32) for name, value in metrics.items()}

    return train_step


def compiled(train_step: TrainStep, state: TrainState, mesh: Mesh) -> Any:
    """`jax.jit(train_step)` on a mesh, whose new state lives where `state` does, so that each shape is compiled once.

    The memory of the old state is used again. The metrics come as one array.
    """
    where = jax.tree.map(lambda leaf: leaf.sharding, state)

    def on_mesh(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        with rules.on(mesh):
            new_state, metrics = train_step(state, batch)
            return new_state, pack(metrics)

    return jax.jit(on_mesh, donate_argnums=0, out_shardings=(where, rules.replicated(mesh)))


def accumulated_gradients(
    model: nn.Module, params: Any, batch: Batch, key: jax.Array, cfg: Config
) -> tuple[Sums, Any, jax.Array]:
    """The sums of the loss, the gradient of its mean, and the norms of the gradients of each part's own mean.

    The batch is computed in `cfg.train.accumulate` parts, one after another: part i has the rows i, i + accumulate,
    ..., so that each device keeps its own rows. Gradients add up in float32; those of frozen parameters are zero.
    """
    train, parts = cfg.train, cfg.train.accumulate
    labels = batch[registry.FAMILIES[cfg.model.family].labels]
    total = jnp.maximum((labels >= 0).sum(), 1)

    trained = optimizers.trained(cfg.optim, params)

    def objective(params: Any, part: Batch, key: jax.Array) -> tuple[jax.Array, Sums]:
        params = jax.tree.map(lambda keep, leaf: leaf if keep else jax.lax.stop_gradient(leaf), trained, params)
        sums, auxiliary = batch_loss(
            model, params, part, label_smoothing=train.label_smoothing, chunk=train.loss_chunk, dropout_key=key
        )
        return (sums.loss + train.z_loss * sums.z) / total + auxiliary / parts, sums

    gradient = jax.grad(objective, has_aux=True)
    if parts == 1:
        grads, sums = gradient(params, batch, key)
        return sums, grads, optax.tree.norm(grads)[None]

    def add(carry: tuple[Sums, Any], inputs: tuple[Batch, jax.Array]) -> tuple[tuple[Sums, Any], jax.Array]:
        part, number = inputs
        grads, sums = gradient(params, part, jax.random.fold_in(key, number))
        grads = optax.tree.cast(grads, jnp.float32)
        norm = optax.tree.norm(grads) * total / jnp.maximum(sums.labels, 1)
        return jax.tree.map(jnp.add, carry, (sums, grads)), norm

    split = jax.tree.map(lambda rows: rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1), dict(batch))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    (sums, grads), norms = jax.lax.scan(add, (no_sums(), zeros), (split, jnp.arange(parts)))
    return sums, grads, norms


def moved_mean(mean: Any, params: Any, step: jax.Array, decay: float | None) -> Any:
    """`mean + (1 - d) (params - mean)` with `d = min(decay, (1 + t) / (10 + t))`, t steps before; None without a decay.

    The smaller first d let the random start be forgotten soon (as in TensorFlow's ExponentialMovingAverage).
    """
    if decay is None:
        return None
    d = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: old + (1 - d) * (new.astype(jnp.float32) - old), mean, params)
