"""Beam search with a KV cache: the most probable outputs instead of the most probable next tokens."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference import sampling
from tformer_jax.nn.kv_cache import DecoderCache, Lineage
from tformer_jax.special_tokens import EOS, PAD


class Read(Protocol):
    """The model: what it makes of tokens and of a cache of those before them."""

    def __call__(
        self, tokens: jax.Array, cache: DecoderCache, lineage: Lineage | None = None
    ) -> tuple[jax.Array, DecoderCache]:
        """tokens int [B, T] -> the cache that holds them, and float32 logits [B, 1, V] of the last one.

        With a `lineage`, the tokens are beams: logits [B, T, V].
        """


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
    lineage: Lineage
    """Of `running`."""
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
        cache: of B rows, with room for k tokens at each position. The beams of a row are k tokens of one call that see
            their ancestors only; nothing is copied where beams go on from one another, and what they share (the prompt,
            the encoder's output) is there once.
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
        lineage=Lineage(jnp.zeros((B, k, length), jnp.int32), cache.lengths),
        cache=cache,
    )

    def advance(state: _State) -> _State:
        logits, cache = read(state.running[:, :, state.step - 1], state.cache, state.lineage)
        return _extend(state._replace(cache=cache), logits, room, cfg)

    begun = _extend(start, jnp.broadcast_to(logits, (B, k, logits.shape[-1])), room, cfg)
    return jax.lax.while_loop(lambda state: state.open.any(), advance, begun).finished


def length_penalty(length: jax.Array, cfg: DecodeConfig) -> jax.Array:
    """What a sum of log-probabilities is divided by: `length^alpha`, or GNMT's `((5 + length) / 6)^alpha`."""
    base = (5 + length) / 6 if cfg.length_penalty == "gnmt" else length
    return jnp.asarray(base, jnp.float32) ** cfg.length_alpha


def _extend(state: _State, logits: jax.Array, room: jax.Array, cfg: DecodeConfig) -> _State:
    """Chooses one more token: logits float32 [B, k, V]."""
    k = cfg.beams
    sums, parents, tokens = _candidates(state.sums, logits)
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
        lineage=_descend(state.lineage, _take(parents, order), state.step),
        cache=state.cache,
    )


def _candidates(sums: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The 2 k best ways to go on from sums [B, k], best first: new sums, the beam that goes on, and its token."""
    k = sums.shape[1]
    values, tokens = sampling.top_k(sampling.forbid(logits), 2 * k)
    log_p = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    B, width = sums.shape[0], tokens.shape[2]
    best, found = jax.lax.top_k((sums[:, :, None] + log_p).reshape(B, k * width), 2 * k)
    return best, found // width, jnp.take_along_axis(tokens.reshape(B, k * width), found, axis=1)


def _descend(lineage: Lineage, parents: jax.Array, step: jax.Array) -> Lineage:
    """The lineage of beams that go on from those of `parents`, int [B, k], and are read side by side next."""
    ancestors = _take(lineage.ancestors, parents).at[:, :, step].set(jnp.arange(parents.shape[1]))
    return Lineage(ancestors, lineage.start)


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
