"""The loss that training and evaluation share."""

import jax
import jax.numpy as jnp

from tformer_jax.special_tokens import IGNORED


def masked_cross_entropy(
    logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in nats, summed over the labels that count, and their number.

    With smoothing e the target distribution is `(1 - e) * one_hot + e / V` ("Rethinking the Inception Architecture",
    2016, section 7). The distribution is never formed: `logsumexp - (1 - e) * logit[label] - e * mean(logits)`.

    Args:
        logits: float [..., V].
        labels: int [...]; IGNORED counts for nothing.

    Returns:
        float32 scalar, int32 scalar.
    """
    logits = logits.astype(jnp.float32)
    counted = labels != IGNORED
    at_label = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - (1 - label_smoothing) * at_label
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(axis=-1)
    return jnp.where(counted, losses, 0).sum(), counted.sum(dtype=jnp.int32)
