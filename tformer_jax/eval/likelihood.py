"""Mean loss and accuracy over a whole split."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.models import registry
from tformer_jax.models.losses import masked_cross_entropy
from tformer_jax.special_tokens import IGNORED

Batches = Callable[[], Iterable[Mapping[str, np.ndarray]]]


class Likelihood:
    """Sums over all batches, divided once: neither batch size nor padding changes the result."""

    def __init__(self, model: nn.Module, batches: Batches):
        self._batches = batches

        def sums(params, batch):
            logits, labels = registry.forward(model, params, batch)
            loss, count = masked_cross_entropy(logits, labels)
            hits = ((jnp.argmax(logits, axis=-1) == labels) & (labels != IGNORED)).sum()
            return loss, hits, count

        self._sums = jax.jit(sums)

    def __call__(self, params: Any) -> tuple[float, float]:
        """Nats a label, and the percentage of labels that are the most probable ones."""
        totals = np.zeros(3)
        for batch in self._batches():
            totals += np.array(jax.device_get(self._sums(params, batch)), np.float64)
        loss, hits, count = totals
        return loss / count, 100 * hits / count
