"""Topics of positions: sinusoids, rotary embeddings, ALiBi and the buckets of T5."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import RelativeConfig
from tformer_jax.lab.explain.figures import Curve, Heat, Lines
from tformer_jax.lab.explain.mathml import formula, fraction, power, root
from tformer_jax.lab.explain.topic import CFG, Example, Shape, Topic, make_topic, vectors
from tformer_jax.nn.attention_ops import Operands, attention_weights
from tformer_jax.nn.attention_ops.reference import scores
from tformer_jax.nn.attention_positions import (
    AlibiBias,
    Rotary,
    Rotation,
    alibi_slopes,
    relative_bucket,
    rotary_frequencies,
)
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.positions import sinusoid, sinusoidal

DISTANCES = 64
SHIFT = 3
SHOWN_PAIR = 1
"""The pair of features whose rotation is drawn."""
ROTARY = dataclasses.replace(CFG, position="rotary")
BUCKETS = RelativeConfig(buckets=16, distance=32)


def sinusoids(example: Example) -> Topic:
    """Explains the position encodings of 2017, and that a shift rotates them."""
    T, D = len(example.source), CFG.dim
    positions = np.arange(DISTANCES)
    far, shifted, (sines, cosines) = map(np.asarray, jax.jit(_sinusoids)(positions))
    error = np.abs(shifted - far[SHIFT:]).max()
    encodings = far[:T]
    starts = (0, DISTANCES // 4, DISTANCES // 2)
    return make_topic(
        "sinusoids",
        formulas=(
            formula("PE_{p,2i} = sin ( p · r_i ) , PE_{p,2i+1} = cos ( p · r_i )"),
            formula("r_i =", power("10000", "-2 i / D"), ", PE_{p+k} = R_k PE_p"),
        ),
        shapes=(
            Shape("p", "T", positions[:T].shape, "positions"),
            Shape("PE", "T D", encodings.shape, "added to the embeddings [B, T, D]"),
        ),
        functions=(sinusoid, sinusoidal, Rotation),
        figures=(
            Heat("Encoding of each word's position", encodings, example.source, _features(D)),
            Lines(
                f"Pair {SHOWN_PAIR} on its circle",
                [Curve("position", cosines[:T], sines[:T], [f"{n} {word}" for n, word in enumerate(example.source)])],
                "cos",
                "sin",
                "Each position is one turn by the same angle further.",
                square=True,
            ),
            Lines(
                "Dot product of two positions",
                [Curve(f"from position {p}", np.arange(DISTANCES - p), far[p:] @ far[p]) for p in starts],
                "distance",
                "PE(p) · PE(p + k)",
                "The lines coincide: only the distance counts.",
            ),
            Heat(
                f"PE(p + {SHIFT}), computed by rotating PE(p)",
                shifted[:T],
                [f"{p} + {SHIFT}" for p in range(len(shifted[:T]))],
                _features(D),
                f"Largest difference from PE(p + {SHIFT}): {error:.0e}, for p below {DISTANCES - SHIFT}.",
            ),
        ),
    )


def _sinusoids(positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns PE(p), PE(p + SHIFT) computed by rotating PE(p), and the sines and cosines of `SHOWN_PAIR`.

    (sin, cos) turns clockwise with the position, so that the rotation is by `-SHIFT * frequency`.
    """
    D = CFG.dim
    encodings = sinusoidal(positions, D)
    sines, cosines = sinusoid(jnp.full((1, 1), SHIFT), D)
    turn = Rotation(cosines[:, :, None], -sines[:, :, None], interleaved=True)
    shifted = turn(encodings[None, :-SHIFT, None])[0, :, 0]
    return encodings, shifted, jnp.stack(sinusoid(positions, D))[..., SHOWN_PAIR]


def rope(example: Example) -> Topic:
    """Explains rotary position embeddings."""
    T, H = len(example.source), ROTARY.head_size
    q = vectors(example.source, H)[None, :, None]
    rotation, turned, plain, table = _rotations(q)
    frequencies = rotary_frequencies(ROTARY, window=False)
    points = [f"{n} {word}" for n, word in enumerate(example.source)]
    return make_topic(
        "rope",
        formulas=(
            formula("q_p = R_p q , k_s = R_s k , q_p k_s = q^T R_{s-p} k"),
            formula("R_p ( a , b ) = ( a cos p r_i - b sin p r_i , a sin p r_i + b cos p r_i )"),
            formula("r_i =", power("base", "-2 i / H")),
        ),
        shapes=(
            Shape("q", "B T N H", q.shape, "queries of one head"),
            Shape("cos, sin", "B T 1 H/2", rotation.cos.shape, "one angle for each position and pair"),
            Shape("R q", "B T N H", turned.shape, "rotated queries"),
        ),
        functions=(Rotary, rotary_frequencies, Rotation),
        figures=(
            Lines(
                "The vector (1, 0) of each pair, rotated",
                [
                    Curve(f"pair {i}: {frequencies[i]:.3g} rad per token", plain[:, i], plain[:, i + H // 2], points)
                    for i in range(H // 2)
                ],
                "a",
                "b",
                square=True,
            ),
            Heat(
                "Scores of one word with itself at every pair of positions",
                table,
                points,
                points,
                "Equal along each diagonal: the score depends only on the distance.",
            ),
            Lines("Score by distance", [Curve("first word", np.arange(T), table[0])], "distance", "score"),
        ),
    )


def _rotations(q: np.ndarray) -> tuple[Rotation, np.ndarray, np.ndarray, np.ndarray]:
    """Rotates queries [1, T, 1, H].

    Returns:
        The rotation, the rotated queries, the rotated vectors (1, 0) of all pairs, [T, H], and the scores of the first
        query with itself at each pair of positions, [T, T].
    """
    T, H = q.shape[1], q.shape[-1]
    first = np.broadcast_to(q[:, :1], q.shape)
    unit = np.broadcast_to(np.arange(H) < H // 2, q.shape).astype(np.float32)

    @jax.jit
    def compute(positions: jax.Array) -> tuple[Rotation, jax.Array, jax.Array, jax.Array]:
        position: Any = Rotary(ROTARY).apply({}, positions, window=False)
        rotation = position.rotation
        same = rotation(first)
        table = scores(same, same, None, Operands.pack(same, same, same).scoring)[0, 0]
        return rotation, rotation(q), rotation(unit)[0, :, 0], table

    rotation, turned, plain, table = compute(np.arange(T)[None])
    return rotation, np.asarray(turned), np.asarray(plain), np.asarray(table)


def alibi(example: Example) -> Topic:
    """Explains attention with linear biases."""
    T, N = len(example.source), CFG.num_heads
    slopes = alibi_slopes(N)

    @jax.jit
    def compute(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        bias, positions = AlibiBias(jnp.asarray(slopes, jnp.float32)), jnp.arange(DISTANCES)
        weights = attention_weights(Operands.pack(x, x, x, Mask(causal=True), bias=bias))
        return weights, bias.block(positions[:T], positions[:T]), bias.block(positions[:1], positions)[:, 0]

    weights, bias, far = compute(np.zeros((1, T, N, CFG.head_size), np.float32))
    return make_topic(
        "alibi",
        formulas=(
            formula("score_{n t s} =", fraction("q_t k_s", root("H")), "- m_n | t - s |"),
            formula("m_n =", power("2", "-8 ( n + 1 ) / N"), ", n = 0 , … , N - 1 , for N = 2^i"),
        ),
        shapes=(
            Shape("m", "N", slopes.shape, "slopes"),
            Shape("bias", "N T S", bias.shape, "added to the scores"),
            Shape("w", "B N T S", weights.shape, "weights"),
        ),
        functions=(alibi_slopes, AlibiBias),
        figures=(
            Lines(
                "Bias by distance",
                [Curve(f"head {n}, slope {slopes[n]:.3g}", np.arange(DISTANCES), far[n]) for n in range(N)],
                "distance",
                "bias",
            ),
            *(
                Heat(
                    f"Weights of head {n} for equal scores",
                    np.where(np.tri(T, dtype=bool), np.asarray(weights)[0, n], np.nan),
                    example.source,
                    example.source,
                    f"Slope {slopes[n]:.3g}.",
                )
                for n in (0, N - 1)
            ),
        ),
    )


def buckets(example: Example) -> Topic:
    """Explains the relative position biases of T5."""
    T = len(example.source)
    offsets = np.arange(-DISTANCES, DISTANCES + 1)
    positions = np.arange(T)

    @jax.jit
    def compute(offsets: jax.Array, between: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        sizes = BUCKETS.buckets, BUCKETS.distance
        both = [relative_bucket(offsets, *sizes, bidirectional=way) for way in (True, False)]
        return both, relative_bucket(between, *sizes, bidirectional=True)

    both, table = compute(offsets, positions[None] - positions[:, None])
    return make_topic(
        "t5-buckets",
        formulas=(
            formula("score_{n t s} = q_t k_s + table_{b(s-t),n}"),
            formula("decoder : b ( s - t ) = bucket ( max ( t - s , 0 ) ) , e = buckets / 2"),
            formula("encoder : b ( s - t ) = bucket ( | s - t | ) , plus buckets / 2 if s > t , e = buckets / 4"),
            formula(
                "bucket ( d ) = d for d < e , otherwise min ( e + ⌊ e",
                fraction("log ( d / e )", "log ( far / e )"),
                "⌋ , 2 e - 1 )",
            ),
        ),
        shapes=(Shape("b", "T S", table.shape, "bucket of each query and key"),),
        functions=(relative_bucket,),
        figures=(
            Lines(
                f"Bucket by offset, for {BUCKETS.buckets} buckets up to distance {BUCKETS.distance}",
                [
                    Curve(name, offsets, numbers_of_buckets)
                    for name, numbers_of_buckets in zip(("encoder", "decoder"), both, strict=True)
                ],
                "key − query",
                "bucket",
            ),
            Heat("Buckets of the sentence", np.asarray(table, np.float64), example.source, example.source),
        ),
    )


def _features(count: int) -> list[str]:
    return [str(number) for number in range(count)]
