"""The train step, a pure function."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax.base.cpu import train_step_options
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig, TrainConfig
from tformer_jax.models import cost, registry
from tformer_jax.models.losses import Guide, Sums, Teacher, batch_loss, zero_sums
from tformer_jax.nn.module import named_leaves
from tformer_jax.parallel import rules
from tformer_jax.special_tokens import PAD
from tformer_jax.train import optimizers, parameters
from tformer_jax.train.state import TrainState
from tformer_jax.train.step_metrics import StepMetrics, layer_norms, noise_estimates, pack

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
MicroBatchStats = tuple[jax.Array, jax.Array]
"""The gradient norm of each micro-batch's mean loss, and its number of labels: [accumulate] each."""
TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""(state, batch, parameters of a teacher or None) -> (state, metrics)."""


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    cfg: Config,
    *,
    vocab_size: int | None = None,
    teacher: Teacher | None = None,
) -> TrainStep:
    """Builds `train_step(state, batch, taught_by=None) -> (state, metrics)`, ready for `jax.jit`.

    The loss is a sum over labels divided once by their number in the global batch, so it does not depend on padding,
    `cfg.train.accumulate` or the number of devices. (Dropout masks and auxiliary losses of experts, which are means
    over a micro-batch, depend on `cfg.train.accumulate`.) A step whose loss or gradient is not finite updates only the
    step counters.

    Metrics are float32 scalars: `loss` (nats per label), `labels` (number of labels), `tokens` (number of non-padding
    input tokens), `grad_norm` (before clipping), `skipped` (consecutive skipped steps up to this one), with label
    smoothing or a teacher `nll` (the loss without both), with a teacher `divergence`, with experts or links
    `auxiliary_loss` (weighted, not part of `loss`), and the metrics of `step_metrics` that `cfg.train` selects.

    Args:
        vocab_size: number of the tokenizer's tokens, over which label smoothing spreads; None: all of
            `model.vocab_size`. A classifier's label smoothing spreads over its classes.
        teacher: the teacher of `cfg.train.teacher`; the step takes its parameters as the argument `taught_by`.
    """
    train, smoothed = cfg.train, None if cfg.model.model_class.classifies else vocab_size

    def train_step(state: TrainState, batch: Batch, taught_by: Any = None) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(cfg.seed), state.step)
        source = teacher and teacher._replace(params=taught_by)
        gradients = accumulated_gradients(model, state.params, batch, key, cfg, smoothed, source)
        sums, grads = gradients.sums, gradients.grads
        norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
        loss = sums.loss / jnp.maximum(sums.labels, 1)
        trainable = parameters.trainable(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, trainable)
        _check_updates(updates, trainable)
        trainable = optax.apply_updates(trainable, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        skipped = jnp.where(finite, 0, state.skipped + 1)
        new = (trainable, opt_state, updated_ema(state.ema, trainable, state.step, train.ema_decay))
        old = (parameters.trainable(state.params), state.opt_state, state.ema)
        trainable, opt_state, ema = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)
        tokens = sum((batch[name] != PAD).sum() for name in model.inputs)
        metrics = {"loss": loss, "labels": sums.labels, "tokens": tokens, "grad_norm": norm, "skipped": skipped}
        metrics |= _selected_metrics(cfg, gradients, trainable, norm, taught=teacher is not None)
        params = parameters.with_trainable(state.params, trainable)
        new_state = TrainState(step=state.step + 1, skipped=skipped, params=params, opt_state=opt_state, ema=ema)
        return new_state, {name: value.astype(jnp.float32) for name, value in metrics.items()}

    return train_step


def _check_updates(updates: Any, params: Any) -> None:
    """Raises `UserError` if an update is missing, or has another shape than its parameter; Optax would broadcast it."""
    shapes, expected = ({name: jnp.shape(leaf) for name, leaf in named_leaves(tree)} for tree in (updates, params))
    if shapes.keys() != expected.keys():
        raise UserError("the optimizer's updates have another structure than the parameters: return one for each")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(
                f"the optimizer updates {name}, {list(shape)}, with an array {list(shapes[name])}: return updates of "
                "the shapes of the parameters"
            )


def jitted(train_step: TrainStep, state: TrainState, mesh: Mesh) -> Any:
    """Jits `train_step` on a mesh; the new state keeps the shardings of `state`, so each batch shape compiles once.

    The old state is donated. The metrics are returned as `StepMetrics`. Only the shardings of `state` are read.
    """
    where = jax.tree.map(lambda leaf: leaf.sharding, state)

    def on_mesh(state: TrainState, batch: Batch, taught_by: Any = None) -> tuple[TrainState, StepMetrics]:
        with rules.use_mesh(mesh):
            new_state, metrics = train_step(state, batch, taught_by)
            return new_state, pack(metrics)

    return jax.jit(
        on_mesh,
        donate_argnums=0,
        out_shardings=(where, rules.replicated(mesh)),
        compiler_options=train_step_options(mesh.devices.flat[0].platform),
    )


@contextlib.contextmanager
def compiling(train_step: Any, state: TrainState, first_batch: Callable[[], Batch], *taught_by: Any) -> Iterator[None]:
    """Context in which another thread compiles a train step of `jitted` for the first batch.

    Most of a compilation uses one core. Errors are ignored here; the first call raises them. With several
    processes, nothing is compiled here, so that all compile their programs in the same order.

    Args:
        state: shapes, dtypes and shardings of the state.
        taught_by: the parameters of the teacher, if the step has one.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            train_step.lower(state, first_batch(), *taught_by).compile()

    thread = threading.Thread(target=run, name="compilation")
    if jax.process_count() == 1:
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


class Gradients(NamedTuple):
    """Results of the forward and backward passes of a step."""

    sums: Sums
    auxiliary_loss: jax.Array
    """float32 scalar: weighted auxiliary losses of the experts, summed over layers and averaged over micro-batches."""
    grads: Any
    """Gradient of the mean loss with the auxiliary loss."""
    stats: MicroBatchStats
    """For `train.noise_scale`."""


def _selected_metrics(cfg: Config, gradients: Gradients, params: Any, norm: jax.Array, *, taught: bool) -> Metrics:
    """Returns the metrics that only some configs have."""
    metrics, sums, train = {}, gradients.sums, cfg.train
    if train.label_smoothing or taught:
        metrics["nll"] = sums.nll / jnp.maximum(sums.labels, 1)
    if taught:
        metrics["divergence"] = sums.divergence / jnp.maximum(sums.labels, 1)
    if cfg.model.uses_experts or train.guided_alignment:
        metrics["auxiliary_loss"] = gradients.auxiliary_loss
    if train.log_norms:
        metrics |= layer_norms(gradients.grads, "grad_norm") | layer_norms(params, "param_norm")
    if train.noise_scale:
        metrics |= noise_estimates(norm, *gradients.stats)
    return metrics


def accumulated_gradients(
    model: nn.Module,
    params: Any,
    batch: Batch,
    key: jax.Array,
    cfg: Config,
    smoothed: int | None = None,
    teacher: Teacher | None = None,
) -> Gradients:
    """Computes the losses and the gradients of a step.

    The trainable parameters have gradients: all parameters, or with LoRA `parameters.Adapted.trainable`. The gradients
    of frozen parameters are zero and not computed.

    Processes `cfg.train.accumulate` micro-batches one after another, whose gradients accumulate in float32; each device
    keeps its own rows.
    """
    train, count = cfg.train, cfg.train.accumulate
    labels = batch[model.labels]
    total = jnp.maximum((labels >= 0).sum(), 1)

    trainable = parameters.trainable(params)
    not_frozen = optimizers.not_frozen(cfg.optim, trainable)
    split = _updates_apart(model, train)
    guide = _guide(cfg, batch)

    def objective(trainable: Any, micro_batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        trainable = jax.tree.map(
            lambda keep, leaf: leaf if keep else jax.lax.stop_gradient(leaf), not_frozen, trainable
        )
        full, low_rank = split(parameters.with_trainable(params, trainable))
        sums, auxiliary = batch_loss(
            model,
            full,
            micro_batch,
            label_smoothing=train.label_smoothing,
            smoothed=smoothed,
            chunk=train.loss_chunk,
            dropout_key=key,
            low_rank=low_rank,
            teacher=teacher,
            guide=guide,
        )
        return (sums.loss + train.z_loss * sums.z) / total + auxiliary / count, (sums, auxiliary / count)

    gradient = jax.grad(objective, has_aux=True)
    if count == 1:
        grads, (sums, auxiliary) = gradient(trainable, batch, key)
        return Gradients(sums, auxiliary, grads, (optax.tree.norm(grads)[None], sums.labels[None]))

    def add(carry: tuple[Sums, jax.Array, Any], inputs: tuple[Batch, jax.Array]) -> tuple[Any, MicroBatchStats]:
        micro_batch, number = inputs
        grads, (sums, auxiliary) = gradient(trainable, micro_batch, jax.random.fold_in(key, number))
        grads = optax.tree.cast(grads, jnp.float32)
        norm = optax.tree.norm(grads) * total / jnp.maximum(sums.labels, 1)
        return jax.tree.map(jnp.add, carry, (sums, auxiliary, grads)), (norm, sums.labels)

    start = zero_sums(), jnp.zeros(()), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trainable)
    (sums, auxiliary, grads), stats = jax.lax.scan(add, start, (_micro_batches(batch, count), jnp.arange(count)))
    return Gradients(sums, auxiliary, grads, stats)


def _updates_apart(model: nn.Module, train: TrainConfig) -> Callable[[Any], tuple[Any, Any]]:
    """Returns a function from parameters to those without the updates of kernels, and the updates (`lora.split`)."""
    if not train.lora_rank:
        return lambda params: (params, None)
    from tformer_jax.train import lora

    return functools.partial(lora.split, kernels=registry.linear_kernels(model))


def _micro_batches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """Returns a batch as micro-batches, [count, B / count, ...]; number i has rows i, i + count, ..."""
    return {name: rows.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1) for name, rows in batch.items()}


def _guide(cfg: Config, batch: Batch) -> Guide | None:
    """Returns the links that a cross-attention learns from the micro-batches of a batch, if it has any."""
    if not cfg.train.guided_alignment or "aligned" not in batch:
        return None
    linked = jnp.maximum((batch["aligned"] >= 0).sum(), 1)
    return Guide(cfg.decode.aligning, cfg.train.guided_alignment * cfg.train.accumulate / linked)


def updated_ema(mean: Any, params: Any, step: jax.Array, decay: float | None) -> Any:
    """Returns `mean + (1 - d) (params - mean)` with `d = min(decay, (1 + t) / (10 + t))`; None if `decay` is None.

    t is `step`. The smaller initial d, as in TensorFlow's ExponentialMovingAverage, quickly discards the random start.
    """
    if decay is None:
        return None
    d = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(optax.tree.cast(params, jnp.float32), mean, 1 - d)


def training_flops(cfg: Config, batch: Mapping[str, Any]) -> float:
    """Returns the FLOPs of the matrix products of a step on a batch; traces once per model and batch shape.

    With LoRA, kernels have no gradients, so the backward pass has one product for each product of the forward pass. The
    products of the factors are small and not counted.
    """
    shapes = tuple((name, array.shape, array.dtype) for name, array in batch.items())
    products = cost.TRAINING_FLOPS - (cfg.train.lora_rank > 0)
    return products * _forward_flops(cfg.model, shapes)


@functools.cache
def _forward_flops(cfg: ModelConfig, shapes: tuple[tuple[str, tuple[int, ...], Any], ...]) -> int:
    return cost.forward_flops(cfg, {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes})
