"""The gated delta rule ("Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024) as pure functions.

Each head has a state S, a matrix [H, P] that maps keys to values. Token t decays the state, reads the value that it
holds for the token's key, and corrects this value by a fraction of the error:

    S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T        o_t = S_t^T q_t

with the decay alpha in (0, 1] and the writing strength beta in [0, 1]. H is the size of queries and keys, P the size
of values.
"""

import jax
import jax.numpy as jnp

CHUNK = 64
"""Maximum number of tokens whose interactions are computed as one triangular system, a power of two. Unmeasured."""


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Updates and reads the state with one token per row.

    Args:
        q, k: float32 [B, N, H].
        v: float32 [B, N, P].
        log_decay: float32 [B, N], ln alpha.
        beta: float32 [B, N].
        state: float32 [B, N, H, P].

    Returns:
        The outputs, [B, N, P], and the new state.
    """
    decayed = jnp.exp(log_decay)[..., None, None] * state
    error = v - jnp.einsum("BNHP,BNH->BNP", decayed, k)
    state = decayed + k[..., None] * (beta[..., None] * error)[..., None, :]
    return jnp.einsum("BNHP,BNH->BNP", state, q), state


def full_pass(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the same as T calls of `step`, but in chunks: matrix products compute all tokens of a chunk.

    With D_ij the decay from token j to token i of a chunk and L = tril(beta_i D_ij k_i . k_j, -1), the corrections U
    that the chunk writes solve `(I + L) U = R`, where row i of R is `beta_i (v_i - D_i0 S^T k_i)^T` (section 3.3 of the
    paper). A token with a beta and a log decay of 0 leaves the state unchanged.

    Args:
        q, k: float32 [B, T, N, H].
        v: float32 [B, T, N, P].
        log_decay, beta: float32 [B, T, N].
        state: float32 [B, N, H, P], of the first token's segment.
        segments: int [B, T]: segment ids of documents packed into a row; each document starts with a state of zeros.
            None: one segment.

    Returns:
        The outputs, [B, T, N, P], and the state after the last token.
    """
    T, C = q.shape[1], min(CHUNK, q.shape[1])
    segments = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments

    def chunks(x: jax.Array, mode: str = "constant") -> jax.Array:
        """Splits [B, T, N, ...] -> [chunks, B, N, C, ...]."""
        x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(len(x), -1, C, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, log_decay, beta = map(chunks, (q, k, v, log_decay, beta))
    ids = chunks(segments[..., None], mode="edge")
    before = jnp.concatenate([ids[:1, ..., :1], ids[:-1, ..., -1:]])
    total = jnp.cumsum(log_decay, axis=-1)
    earlier = jnp.tril(jnp.ones((C, C), bool)) & (ids[..., :, None] == ids[..., None, :])
    between = _sums_between(log_decay)
    decay = jnp.exp(jnp.where(earlier, between, -jnp.inf))
    from_start = jnp.where(ids == before, jnp.exp(total), 0)[..., None]
    to_end = jnp.where(ids == ids[..., -1:], jnp.exp(between[..., -1, :]), 0)[..., None]
    beta_k = beta[..., None] * k
    system = decay * jnp.einsum("...ih,...jh->...ij", beta_k, k)
    right = jnp.concatenate([beta[..., None] * v, from_start * beta_k], axis=-1)
    solved = _product(_unit_inverse(_padded_to_power_of_two(jnp.tril(system, -1)))[..., :C, :C], right)
    written, forgotten = jnp.split(solved, [v.shape[-1]], axis=-1)
    within = decay * jnp.einsum("...ih,...jh->...ij", q, k)

    def chunk(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, written, forgotten, within, decay = parts
        new = written - forgotten @ state
        return decay * state + jnp.swapaxes(k, -1, -2) @ new, q @ state + within @ new

    parts = from_start * q, to_end * k, written, forgotten, within, from_start[..., -1:, :]
    state, out = jax.lax.scan(chunk, state, parts)
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(len(out), -1, *out.shape[3:])[:, :T], state


def _sums_between(x: jax.Array) -> jax.Array:
    """Sums x [..., C] over j < m <= i for each i >= j: [..., C, C].

    A difference of two cumulative sums would be inexact where they are much larger than it.
    """
    C = x.shape[-1]
    until, after = jnp.tril(jnp.ones((C, C), x.dtype)), jnp.tril(jnp.ones((C, C), x.dtype), -1)
    return jnp.einsum("im,...mj->...ij", until, x[..., None] * after, precision=jax.lax.Precision.HIGHEST)


def _unit_inverse(lower: jax.Array) -> jax.Array:
    """Inverts I + L for a strictly lower triangular L [..., C, C], with C a power of two, by matrix products only.

    The inverse of [[A, 0], [M, B]] is [[A^-1, 0], [-B^-1 M A^-1, B^-1]]. The product (I - L)(I + L^2)(I + L^4)... is
    also the inverse, but useless in float32 for similar keys: powers of L grow like binomial coefficients and cancel.
    `jax.lax.linalg.triangular_solve` calls LAPACK on CPUs, which waits for the threads of the process; with several
    virtual devices, these may wait in an all-reduce for this device, and no step ends (jaxlib 0.10.2).
    """
    half = lower.shape[-1] // 2
    if half <= 1:
        return jnp.eye(lower.shape[-1], dtype=lower.dtype) - lower
    first, second = _unit_inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_product(second, _product(lower[..., half:, :half], first))
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _padded_to_power_of_two(matrix: jax.Array) -> jax.Array:
    """Pads the last two axes [..., C, C] with zeros at the end, to the next power of two."""
    missing = (1 << (matrix.shape[-1] - 1).bit_length()) - matrix.shape[-1]
    return jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 2) + [(0, missing)] * 2)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies matrices in float32, also on devices that round the factors of products by default."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
