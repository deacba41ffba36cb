"""Beam search with a KV cache: the most probable outputs instead of the most probable next tokens."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.sampling import forbid
from tformer_jax.nn.kv_cache import DecoderCache, KeyValues, LayerCache
from tformer_jax.special_tokens import EOS, PAD

Read = Callable[[jax.Array, DecoderCache], tuple[jax.Array, DecoderCache]]
"""Reads tokens int [B, T]: float32 logits [B, 1, V] of the last one, and the cache that holds them."""
WORST = -1e9
"""The score of no hypothesis."""


class Hypotheses(NamedTuple):
    """The k best outputs of each row, best first."""

    tokens: jax.Array
    """int32 [B, k, length]: up to and including EOS, then PAD."""
    scores: jax.Array
    """float32 [B, k]: sums of log-probabilities, divided by the length penalty; `WORST` where there is none."""


class _State(NamedTuple):
    step: jax.Array
    """int32 scalar: tokens chosen so far."""
    running: jax.Array
    """int32 [B, k, length]: hypotheses that go on."""
    sums: jax.Array
    """float32 [B, k]: sums of their log-probabilities."""
    finished: Hypotheses
    open: jax.Array
    """bool [B]: rows whose finished hypotheses may still change."""
    cache: DecoderCache


def search(
    read: Read, prompt: jax.Array, cache: DecoderCache, room: jax.Array, length: int, cfg: DecodeConfig
) -> Hypotheses:
    """Follows the `cfg.beams` most probable beginnings of each row until none can become a better output.

    A beginning that ends (in EOS, or for want of room) among the k best of a step is scored
    `sum of log p / penalty(tokens)`, EOS included; the others go on ("Sequence Transduction", 2012; length penalties of
    GNMT, 2016, equation 14). Of 2 k candidates at least k go on. `cfg.early_stopping` says when a row is done:
    `first`, once it has k outputs; `heuristic`, once the best of its beginnings, if it ended now, would be no better
    than the k-th output; `never`, once that holds for whatever length is left.

    Args:
        read: the model.
        prompt: int [B, T], read before the first choice.
        cache: of B rows.
        room: int [B], the most tokens of each row; 0 for a row that only fills up the batch.
    """
    B, k = prompt.shape[0], cfg.beams
    logits, cache = read(prompt, cache)
    nothing = jnp.full((B, k, length), PAD, jnp.int32)
    start = _State(
        step=jnp.zeros((), jnp.int32),
        running=nothing,
        sums=jnp.full((B, k), WORST).at[:, 0].set(0),
        finished=Hypotheses(nothing, jnp.full((B, k), WORST)),
        open=room > 0,
        cache=_repeated(cache, k),
    )

    def advance(state: _State) -> _State:
        last = state.running[:, :, state.step - 1].reshape(B * k, 1)
        return _extend(state, *read(last, state.cache), room, cfg)

    begun = _extend(start, jnp.repeat(logits, k, axis=0), start.cache, room, cfg)
    return jax.lax.while_loop(lambda state: state.open.any(), advance, begun).finished


def length_penalty(length: jax.Array, cfg: DecodeConfig) -> jax.Array:
    """What a sum of log-probabilities is divided by: `length^alpha`, or GNMT's `((5 + length) / 6)^alpha`."""
    base = (5 + length) / 6 if cfg.length_penalty == "gnmt" else length
    return jnp.asarray(base, jnp.float32) ** cfg.length_alpha


def _extend(state: _State, logits: jax.Array, cache: DecoderCache, room: jax.Array, cfg: DecodeConfig) -> _State:
    """Chooses one more token: logits float32 [B * k, 1, V]."""
    (B, k), V = state.sums.shape, logits.shape[-1]
    log_p = forbid(jax.nn.log_softmax(logits[:, 0], axis=-1)).reshape(B, k, V)
    sums, found = jax.lax.top_k((state.sums[:, :, None] + log_p).reshape(B, k * V), 2 * k)
    parents, tokens = found // V, (found % V).astype(jnp.int32)
    grown = _take(state.running, parents).at[:, :, state.step].set(tokens)
    made = state.step + 1
    ends = (tokens == EOS) | (made >= room)[:, None]

    going, order = jax.lax.top_k(jnp.where(ends, sums + WORST, sums), k)
    finished = _finish(state, grown, sums, ends, made, cfg)
    return _State(
        step=made,
        running=_take(grown, order),
        sums=going,
        finished=finished,
        open=state.open & (made < room) & _can_improve(going[:, 0], finished.scores, made, room, cfg),
        cache=_reordered(cache, _take(parents, order)),
    )


def _finish(
    state: _State, grown: jax.Array, sums: jax.Array, ends: jax.Array, made: jax.Array, cfg: DecodeConfig
) -> Hypotheses:
    """The finished hypotheses with those of the k best candidates that end now."""
    k = state.sums.shape[1]
    counts = ends & (jnp.arange(2 * k) < k) & state.open[:, None]
    scores = jnp.where(counts, sums / length_penalty(made, cfg), WORST)
    best, order = jax.lax.top_k(jnp.concatenate([state.finished.scores, scores], axis=1), k)
    return Hypotheses(_take(jnp.concatenate([state.finished.tokens, grown], axis=1), order), best)


def _can_improve(
    best_sum: jax.Array, scores: jax.Array, made: jax.Array, room: jax.Array, cfg: DecodeConfig
) -> jax.Array:
    """bool [B]: whether a beginning with this sum may still give a better hypothesis than the k-th."""
    full = (scores > WORST).all(axis=1)
    if cfg.early_stopping == "first":
        return ~full
    reached = room if cfg.early_stopping == "never" and cfg.length_alpha > 0 else made
    return ~full | (best_sum / length_penalty(reached, cfg) > scores.min(axis=1))


def _take(values: jax.Array, places: jax.Array) -> jax.Array:
    """values [B, n, ...] at places int [B, m] -> [B, m, ...]."""
    return jnp.take_along_axis(values, places.reshape(*places.shape, *[1] * (values.ndim - 2)), axis=1)


def _repeated(cache: DecoderCache, k: int) -> DecoderCache:
    """A cache of B rows as one of B * k, each row k times."""
    rows = cache.lengths.shape[0]
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, k, axis=0) if leaf.shape[:1] == (rows,) else leaf, cache)


def _reordered(cache: DecoderCache, parents: jax.Array) -> DecoderCache:
    """The cache whose rows go on from those of `parents`, int [B, k]. Beams of a row share all but what they wrote."""
    B, k = parents.shape
    rows = (jnp.arange(B)[:, None] * k + parents).reshape(B * k)
    layers = tuple(
        LayerCache(KeyValues(layer.self_attention.k[rows], layer.self_attention.v[rows]), layer.cross_attention)
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers)
