"""Which keys a query may attend to."""

import flax
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Mask:
    """May query t, at index `start + t`, attend to key s, at index s? Every rule that is set must say yes.

    A rule over indices rather than an array, so that a backend may evaluate it whole or block by block.
    """

    real: jax.Array | None = None
    """bool [B, S]: keys that are no padding."""
    segments: tuple[jax.Array, jax.Array] | None = None
    """int [B, T] and [B, S]: packed documents; a query sees its own."""
    prefix: jax.Array | None = None
    """int32 [B]: so many first keys are seen by all queries of a causal row."""
    explicit: jax.Array | None = None
    """bool with four axes, broadcastable to [B, N, T, S]."""
    start: jax.Array | None = None
    """int32 scalar: the first query's index; None: 0."""
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    """A query sees its own index and those before."""
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    """A query sees indices less than `window` away."""

    def query_indices(self, first: jax.Array | int, count: int) -> jax.Array:
        """The indices of queries `first`, ..., `first + count - 1`: int32 [count]."""
        return first + jnp.arange(count) + (0 if self.start is None else self.start)

    def dense(self, T: int, S: int) -> jax.Array | None:
        """The whole mask: bool, broadcastable to [B, N, T, S]; None hides nothing."""
        return self.block(0, T, 0, S)

    def block(self, t: jax.Array | int, T: int, s: jax.Array | int, S: int) -> jax.Array | None:
        """The mask between queries t, ..., t + T - 1 and keys s, ..., s + S - 1, like `dense`."""
        rules = [self._by_distance(t, T, s, S)]
        if self.real is not None:
            rules.append(_part(self.real, s, S, 1)[:, None, None, :])
        if self.segments is not None:
            queries, keys = _part(self.segments[0], t, T, 1), _part(self.segments[1], s, S, 1)
            rules.append((queries[:, :, None] == keys[:, None, :])[:, None])
        if self.explicit is not None:
            rules.append(_part(_part(self.explicit, t, T, 2), s, S, 3))
        result = None
        for rule in rules:
            result = rule if result is None or rule is None else result & rule
        return result

    def hides_block(self, t: jax.Array | int, T: int, s: jax.Array | int, S: int) -> jax.Array:
        """bool scalar, True only if that block hides everything, found without evaluating it.

        `explicit` is not looked at.
        """
        queries = self.query_indices(t, T)
        after, before = s - queries[-1], queries[0] - (s + S - 1)
        hidden = jnp.zeros((), bool)
        if self.causal:
            beyond_prefix = True if self.prefix is None else s >= self.prefix.max()
            hidden |= (after > 0) & beyond_prefix
        if self.window is not None:
            hidden |= (before >= self.window) | (after >= self.window)
        if self.real is not None:
            hidden |= ~_part(self.real, s, S, 1).any()
        if self.segments is not None:
            mine, others = _part(self.segments[0], t, T, 1), _part(self.segments[1], s, S, 1)
            apart = (mine.max(axis=1) < others.min(axis=1)) | (mine.min(axis=1) > others.max(axis=1))
            hidden |= apart.all()
        return hidden

    def _by_distance(self, t, T, s, S) -> jax.Array | None:
        """What `causal`, `prefix` and `window` allow: bool [B or 1, 1, T, S]."""
        queries, keys = self.query_indices(t, T)[:, None], s + jnp.arange(S)[None, :]
        allowed = None
        if self.causal:
            allowed = (keys <= queries)[None, None]
            if self.prefix is not None:
                allowed = allowed | (keys < self.prefix[:, None, None])[:, None]
        if self.window is not None:
            near = (abs(queries - keys) < self.window)[None, None]
            allowed = near if allowed is None else allowed & near
        return allowed


def as_mask(mask: jax.Array | Mask | None) -> Mask:
    """A `Mask` from one, from a boolean array that broadcasts to [B, N, T, S], or from None (nothing is hidden)."""
    if isinstance(mask, Mask):
        return mask
    return Mask(explicit=mask)


def hidden_suffix(length: int, hidden: int) -> jax.Array:
    """Entry (i, j) is hidden when `length - j + i <= hidden`: bool [1, 1, T, T].

    Position i + 1 sees one key more than position i, and the first one does not see the last `hidden` keys.
    `hidden = length - 1` is the causal mask; 0 hides nothing.
    """
    i, j = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    return (length - j + i > hidden)[None, None]


def _part(array: jax.Array, start: jax.Array | int, size: int, axis: int) -> jax.Array:
    """A slice along one axis, or the array where that axis is broadcast."""
    if array.shape[axis] == 1 or (isinstance(start, int) and start == 0 and array.shape[axis] == size):
        return array
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)
