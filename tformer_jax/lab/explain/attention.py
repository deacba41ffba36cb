"""Topics of attention: scaled dot product, heads, masks."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.lab.explain.figures import Curve, Heat, Lines
from tformer_jax.lab.explain.mathml import brackets, formula, fraction, root, total
from tformer_jax.lab.explain.topic import CFG, Example, Shape, Topic, make_topic, random_params, run_attention, vectors
from tformer_jax.nn.attention import Attention, BasicAttention
from tformer_jax.nn.attention_ops import Operands, attend, attention_weights
from tformer_jax.nn.attention_ops.reference import exponentials, scores, weighted_sum
from tformer_jax.nn.masks import Mask, lookahead_mask

HEAD_SIZES = (4, 16, 64, 256)
WINDOW = 3


def dot_product(example: Example) -> Topic:
    """Explains `softmax(q k^T / sqrt(H)) v`, and why it is scaled."""
    x = example.x[:, :, None]
    plain, weights, out = jax.jit(_three_ways)(x)
    return make_topic(
        "dot-product",
        formulas=(
            formula("out_t =", total("s", "w_{t s} v_s")),
            formula("w_{t s} = softmax_s", brackets(fraction("q_t k_s", root("H")))),
        ),
        shapes=(
            Shape("q", "B T N H", x.shape, "queries"),
            Shape("k, v", "B S K H", x.shape, "keys and values"),
            Shape("w", "B N T S", weights.shape, "weights"),
            Shape("out", "B T N H", out.shape, "output"),
        ),
        functions=(attention_weights, exponentials, scores, weighted_sum, BasicAttention),
        figures=(
            _weights("Weights of the sentence", weights[0, 0], example, "q, k and v are the embeddings themselves."),
            _weights(
                "The same without the scale",
                plain[0, 0],
                example,
                "Attention without parameters, softmax(x xᵀ): nearly every word attends to itself alone.",
            ),
            _why_scaled(example),
        ),
    )


def _three_ways(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns weights without and with the scale, [1, 1, T, T], and the output of attention to the keys x."""
    plain, scaled = Operands.pack(x, x, x, scale=1.0), Operands.pack(x, x, x)
    return attention_weights(plain), attention_weights(scaled), attend(x, x, x, backend="reference")


def _why_scaled(example: Example) -> Lines:
    """Shows the largest weight of a query by head size, for three scales."""
    tokens = list(dict.fromkeys(token.lower() for token in example.source))
    scales = {"1": lambda H: 1.0, "1 / √H": lambda H: 1 / math.sqrt(H), "1 / H": lambda H: 1 / H}
    named = [[f"{role} {token}" for token in tokens] for role in ("query", "key")]
    pairs = [[vectors(names, H)[None, :, None] for names in named] for H in HEAD_SIZES]

    @jax.jit
    def largest(pairs: list[list[jax.Array]]) -> dict[str, list[jax.Array]]:
        def mean_of_largest(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
            return attention_weights(Operands.pack(q, k, k, scale=scale)).max(-1).mean()

        return {name: [mean_of_largest(q, k, scale(q.shape[-1])) for q, k in pairs] for name, scale in scales.items()}

    weights = largest(pairs)
    return Lines(
        "Largest weight of a query, by head size",
        [Curve(f"scale {name}", HEAD_SIZES, values) for name, values in weights.items()],
        "H",
        "weight",
        f"Mean over the {len(tokens)} distinct words, with independent queries and keys. Only 1 / √H keeps the weights "
        "away from 1 (one key) and from a uniform distribution.",
        log="x",
    )


def heads(example: Example) -> Topic:
    """Explains heads, and heads that share keys and values."""
    module = Attention(CFG)
    params = random_params(module, example.x)
    out, operands, weights = run_attention(module, params, example.x)
    G = CFG.num_heads // CFG.kv_heads
    return make_topic(
        "heads",
        formulas=(
            formula("q = x W_q , k = x W_k , v = x W_v , head_n = attend ( q_n , k_{⌊n/G⌋} , v_{⌊n/G⌋} )"),
            formula("out = concat ( head_0 , … , head_{N-1} ) W_o"),
        ),
        shapes=(
            Shape("x", "B T D", example.x.shape, "input"),
            Shape("q", "B T N H", operands.q.shape, "queries"),
            Shape("k, v", "B S K H", operands.k.shape, "keys and values"),
            Shape("w", "B N T S", weights.shape, "weights"),
            Shape("W_q", "D N H", params["query"]["kernel"].shape, "projection of queries"),
            Shape("W_k, W_v", "D K H", params["key"]["kernel"].shape, "projections of keys and values"),
            Shape("W_o", "N H D", params["output"]["kernel"].shape, "output projection"),
            Shape("out", "B T D", out.shape, "output"),
        ),
        functions=(Attention, scores),
        figures=[
            _weights(f"Head {n}", weights[0, n], example, f"Reads the keys of head {n // G}.")
            for n in range(CFG.num_heads)
        ],
        values={"N": CFG.num_heads, "K": CFG.kv_heads},
    )


def masks(example: Example) -> Topic:
    """Explains masks, and rows that may attend to nothing."""
    shown = _masks(len(example.source))
    dense, weights = _masked(example, {title: mask for title, (mask, _) in shown.items()})
    figures = [_mask(title, dense[title], example, caption) for title, (_, caption) in shown.items()]
    hidden = "The first key is hidden, too: the weights of the first query are 0, not NaN and not 1 / S."
    return make_topic(
        "masks",
        formulas=(
            formula(
                "w_{t s} =",
                fraction("m_{t s} exp ( score_{t s} )", total("r", "m_{t r} exp ( score_{t r} )")),
                ", m_{t s} ∈ { 0 , 1 }",
            ),
        ),
        shapes=(
            Shape("padding_mask", "B S", (1, len(example.source)), "True for tokens that are not padding"),
            Shape("m", "B 1 T S", (1, 1, *weights.shape[2:]), "True = may attend; broadcast to N heads"),
            Shape("w", "B N T S", weights.shape, "weights"),
        ),
        functions=(Mask, lookahead_mask, exponentials),
        figures=[*figures, _weights("A query without keys", weights[0, 0], example, hidden)],
    )


def _masks(T: int) -> dict[str, tuple[Mask, str]]:
    """Returns masks of T tokens with their captions, by title."""
    half = T // 2
    real = jnp.asarray(np.arange(T)[None] < T - 1)
    segments = jnp.asarray(np.arange(T)[None] >= half, jnp.int32)
    lookahead = Mask(explicit=lookahead_mask(T, T - 1 - half))
    return {
        "Causal": (Mask(causal=True), "The lower triangle with its diagonal."),
        "Causal and padding": (Mask(causal=True, padding_mask=real), "The last token is padding."),
        "Window": (Mask(causal=True, window=WINDOW), f"Causal, and less than {WINDOW} tokens away."),
        "Packed documents": (
            Mask(causal=True, segments=(segments, segments)),
            "Documents in one row do not see each other.",
        ),
        "Prefix": (Mask(causal=True, prefix=jnp.asarray([half])), f"All attend to the first {half} tokens."),
        "Lookahead": (
            lookahead,
            f"The last {half} keys are hidden from the first query, and one fewer from each later one.",
        ),
    }


def _masked(example: Example, masks: dict[str, Mask]) -> tuple[dict[str, jax.Array | None], jax.Array]:
    """Returns masks as arrays, and the weights, [1, 1, T, T], of causal attention whose first key is hidden."""
    T = len(example.source)
    without_first = Mask(causal=True, explicit=jnp.asarray(np.arange(T) > 0)[None, None, None])

    @jax.jit
    def compute(x: jax.Array) -> tuple[dict[str, jax.Array | None], jax.Array]:
        dense = {title: mask.dense(T, T) for title, mask in masks.items()}
        return dense, attention_weights(Operands.pack(x, x, x, without_first))

    return compute(example.x[:, :, None])


def _weights(title: str, weights: jax.Array, example: Example, caption: str) -> Heat:
    return Heat(title, np.asarray(weights), example.source, example.source, caption)


def _mask(title: str, mask: jax.Array | None, example: Example, caption: str) -> Heat:
    assert mask is not None
    values = np.where(np.asarray(mask)[0, 0], 1.0, np.nan)
    return Heat(title, values, example.source, example.source, caption)
