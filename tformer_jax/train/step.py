"""One optimizer step, as a pure function."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tformer_jax.models import registry
from tformer_jax.models.losses import masked_cross_entropy
from tformer_jax.train.state import TrainState

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    label_smoothing: float,
    seed: int,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds `train_step(state, batch) -> (state, metrics)`, ready for `jax.jit`.

    The loss is a sum over labels divided once by their number in the global batch, so that neither padding nor
    the number of devices changes it. Metrics are float32 scalars: `loss` (nats a label), `labels` (how many were
    counted) and `grad_norm` (before clipping).
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)

        def mean_loss(params):
            outputs = registry.forward(model, params, batch, train=True, dropout_key=dropout_key)
            total, count = masked_cross_entropy(outputs.logits, outputs.labels, label_smoothing=label_smoothing)
            loss = total / jnp.maximum(count, 1)
            return loss + outputs.auxiliary_loss, (loss, count)

        (_, (loss, count)), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {"loss": loss, "labels": count.astype(jnp.float32), "grad_norm": optax.tree.norm(grads)}
        new_state = TrainState(
            step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state
        )
        return new_state, metrics

    return train_step
