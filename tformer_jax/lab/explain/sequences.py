"""Topics of sequences: encoder and decoder, teacher forcing."""

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.data.columns import Column
from tformer_jax.data.features import FeatureConverter
from tformer_jax.lab.explain.figures import Curve, Heat, Lines
from tformer_jax.lab.explain.mathml import formula, fraction, total
from tformer_jax.lab.explain.topic import CFG, Example, Shape, Topic, make_topic, random_params, run_attention, vectors
from tformer_jax.models.losses import masked_cross_entropy
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.masks import Mask
from tformer_jax.special_tokens import BOS, SPECIAL_TOKENS

MARGINS = np.linspace(0, 12, 25, dtype=np.float32)
"""Differences of the logit of the label from the others."""


def encoder_decoder(example: Example) -> Topic:
    """Explains encoder, decoder and cross-attention."""
    module = Attention(CFG, cross=True)
    memory, x = example.x, vectors((SPECIAL_TOKENS[BOS], *example.target), CFG.dim)[None]
    params = random_params(module, x, memory)
    _, operands, weights = run_attention(module, params, x, memory)
    read = (SPECIAL_TOKENS[BOS], *example.target)
    return make_topic(
        "encoder-decoder",
        formulas=(
            formula("memory = encoder ( source )"),
            formula("p ( target | source ) = ∏_t p ( target_t | target_{<t} , memory )"),
        ),
        shapes=(
            Shape("memory", "B S D", memory.shape, "output of the encoder"),
            Shape("x", "B T D", x.shape, "input of the decoder"),
            Shape("q", "B T N H", operands.q.shape, "queries"),
            Shape("k, v", "B S K H", operands.k.shape, "keys and values"),
            Shape("w", "B N T S", weights.shape, "weights of cross-attention"),
        ),
        functions=(Seq2Seq, Attention),
        figures=[
            Heat(
                f"Cross-attention of head {n}",
                np.asarray(weights)[0, n],
                read,
                example.source,
                "The weights are random: nothing is trained.",
            )
            for n in (0, CFG.num_heads - 1)
        ],
    )


def teacher_forcing(example: Example) -> Topic:
    """Explains the shift of the target, and the loss."""
    names = [*SPECIAL_TOKENS, *sorted(set(example.target))]
    ids = [names.index(word, len(SPECIAL_TOKENS)) for word in example.target]
    features = FeatureConverter(len(ids) + 1, 1)({"source": Column.from_rows([[]]), "target": Column.from_rows([ids])})
    read, predicted = ([names[number] for number in features[key].ids] for key in ("target_in", "target_out"))
    T, V = len(read), len(names)
    seen = np.asarray(Mask(causal=True).dense(T, T))[0, 0]
    texts = [[word if visible else "" for word, visible in zip(read, row, strict=True)] for row in seen]
    return make_topic(
        "teacher-forcing",
        formulas=(
            formula(
                "loss = -", fraction("1", "labels"), total("t", "log p_t ( label_t )"), ", p_t = softmax ( logits_t )"
            ),
        ),
        shapes=(
            Shape("target_in", "B T", (1, T), "int: what the decoder reads"),
            Shape("target_out", "B T", (1, T), "int: what it must predict"),
            Shape("logits", "B T V", (1, T, V), "float32, before the softmax"),
        ),
        functions=(FeatureConverter, masked_cross_entropy),
        figures=(
            Heat(
                "What each position reads, and must predict",
                np.where(seen, 1.0, np.nan),
                [f"{t} → {word}" for t, word in enumerate(predicted)],
                [str(t) for t in range(T)],
                "Rows: positions, with the token to predict. Columns: tokens that the position may read.",
                texts,
            ),
            Lines(
                "Loss by the margin of the right logit",
                [Curve(name, MARGINS, values) for name, values in _losses(V, ids[0]).items()],
                "margin",
                "nats",
                f"V = {V}. With probabilities in place of logits, the loss cannot fall below log(1 + (V − 1) / e).",
            ),
        ),
    )


def _losses(V: int, label: int) -> dict[str, np.ndarray]:
    """Returns the losses of a label at `MARGINS`, by what a model returns."""
    target = jnp.asarray(label)

    @jax.jit
    def compute(logits: jax.Array) -> dict[str, jax.Array]:
        def losses(logits: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
            return jax.vmap(lambda row: masked_cross_entropy(row, target, label_smoothing=label_smoothing).loss)(logits)

        return {
            "logits": losses(logits),
            "logits, label smoothing 0.1": losses(logits, 0.1),
            "probabilities, by mistake": losses(jax.nn.softmax(logits)),
        }

    return {name: np.asarray(values) for name, values in compute(MARGINS[:, None] * (np.arange(V) == label)).items()}
