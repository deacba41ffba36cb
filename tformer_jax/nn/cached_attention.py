"""Attention to the entries of a cache, which may be contiguous or in pages, or to new entries without a cache."""

from typing import Any, TypeVar

import jax
from flax import linen as nn

from tformer_jax.nn.attention_ops import Operands, attend
from tformer_jax.nn.attention_ops.paged import attend_pages
from tformer_jax.nn.attention_ops.select import backend_for_cache
from tformer_jax.nn.kv_cache import TokenCache
from tformer_jax.nn.masks import Mask, as_mask, check_explicit
from tformer_jax.nn.module import watch
from tformer_jax.nn.slots import Slots

Entries = TypeVar("Entries", bound=TokenCache)


def attend_with_cache(
    q: jax.Array,
    new: Entries,
    cache: Entries | None,
    slots: Slots | None,
    mask: jax.Array | Mask | None,
    *,
    dtype: str,
    backend: str,
    watched: nn.Module | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    **scoring: Any,
) -> tuple[jax.Array, Entries]:
    """Writes new entries to the cache, if there are slots, and attends to all entries.

    Args:
        q: [B, T, N, H].
        new: entries [B, K, S, ...]: of the T tokens; without slots, all entries that the queries attend to.
        cache: the entries of earlier tokens; None: no cache.
        slots: slots of `cache` for the new entries; None: nothing is written.
        mask: as in `attend`.
        dtype: floating dtype of the keys and values.
        backend: as in `attend`; with a cache, replaced as in `backend_for_cache`. Pages have one implementation.
        watched: module for which `watch` stores the operands, except with pages; None: not stored.
        dropout_rate, dropout_key: as in `attend`; there is no dropout with pages.
        scoring: `bias`, `sinks`, `scale` and `softcap`, as in `attend`.

    Returns:
        [B, T, N, H] in the dtype of q, and the updated cache; `new` without slots.
    """
    updated = attended = new
    if cache is not None and slots is not None:
        updated, attended = cache.extend(new, slots)
    mask = as_mask(mask)
    if slots is not None and slots.in_place:
        return attend_pages(q, updated, slots, mask, **scoring), updated
    k, v = attended.unpack(dtype)
    check_explicit(mask, q.shape, k.shape)
    if watched is not None:
        watch(watched, operands=Operands.pack(q, k, v, mask, **scoring))
    if cache is not None:
        backend = backend_for_cache(backend, q.shape[1], mask)
    out = attend(q, k, v, mask, **scoring, backend=backend, dropout_rate=dropout_rate, dropout_key=dropout_key)
    return out, updated
