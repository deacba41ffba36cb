"""How probable given outputs are: the log-probability of each of their tokens, from one pass over all of them."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora.corpus import KEYS
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.batching import in_batches, in_chunks, pad_rows
from tformer_jax.inference.encoding import encode_one
from tformer_jax.models import registry
from tformer_jax.nn.sharding import whole
from tformer_jax.parallel.placement import everywhere, mesh_of, shard_batch
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD

POSITIONS_AT_ONCE = 64
"""Positions of a row whose logits are held at once."""


class Row(NamedTuple):
    """What a model reads in order to predict an output, and that output."""

    inputs: dict[str, list[int]]
    """Token ids by the key of a batch (`registry`)."""
    labels: list[int]
    """As many as the decoder reads; IGNORED ones are not scored."""


class Scored(NamedTuple):
    """The tokens of an output that are scored."""

    tokens: list[int]
    log_probabilities: list[float]
    """Natural logarithms, computed in float32."""

    @property
    def total(self) -> float:
        """The log-probability of the output."""
        return math.fsum(self.log_probabilities)


class Scorer:
    """Scores pairs of source and target with a `Seq2Seq` model, or texts with a `DecoderLM` model.

    Of a target, all tokens and the EOS after them are scored. Of a text, all tokens but the first are: training
    predicts each token from those before it, and nothing stands before the first. The EOS that may follow a text is
    not scored, since a text may be a part of a document.
    """

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        self.cfg, self.model, self.tokenizers = cfg, model, tokenizers

    def stream(self, params: Any, examples: Iterable[Sequence[str]], *, skip: int = 0) -> Iterator[Scored]:
        """The scores of each (source, target) or (text,), in order, for any number of them; `skip` as of `in_chunks`.

        Raises:
            ConfigError: a text is longer than the model reads, after all before it.
        """

        def run(rows: list[Row], _: int) -> list[Scored]:
            labels = [[label for label in row.labels if label != IGNORED] for row in rows]
            found = log_probabilities(self.model, params, rows, self.cfg.eval.batch_size)
            return [Scored(tokens, values) for tokens, values in zip(labels, found, strict=True)]

        return in_chunks(examples, self._read, run, skip=skip)

    def _read(self, place: int, example: Sequence[str]) -> Row:
        family, max_length = self.cfg.model.family, self.cfg.model.max_length
        names = [f"{key} {place + 1}" for key in KEYS[family]]
        if family == "decoder_lm":
            ids = encode_one(self.tokenizers.target, example[0], max_length + 1, names[0])
            return text_row(ids)
        source = encode_one(self.tokenizers.source, example[0], max_length - 1, names[0])
        target = encode_one(self.tokenizers.target, example[1], max_length - 1, names[1])
        return pair_row([*source, EOS], [*target, EOS])


def pair_row(source: list[int], target: list[int]) -> Row:
    """The row that scores all of `target`; both as training has them, ended by EOS (or cut)."""
    return Row({"source": source, "target_in": [BOS, *target[:-1]]}, target)


def text_row(ids: list[int], given: int = 1) -> Row:
    """The row that scores the tokens after the `given` first ones, at least one."""
    return Row({"tokens": ids[:-1]}, [IGNORED] * (given - 1) + ids[given:])


def log_probabilities(model: nn.Module, params: Any, rows: Sequence[Row], batch_size: int) -> list[list[float]]:
    """For each row, ln p of its labels that are not IGNORED."""

    mesh = mesh_of(params)

    def run(lengths: np.ndarray, places: np.ndarray) -> list[list[float]]:
        B, T = lengths.shape
        chosen = [rows[place] for place in places]
        labels = pad_rows([row.labels for row in chosen], B, T)
        labels = np.where(labels == PAD, IGNORED, labels)
        batch = {key: pad_rows([row.inputs[key] for row in chosen], B, T) for key in chosen[0].inputs}
        batch[registry.FAMILIES[model.cfg.family].labels] = labels
        with everywhere(mesh):
            found = np.asarray(_of_labels(model, params, shard_batch(mesh, batch)))
        return [row[mine != IGNORED].tolist() for row, mine in zip(found, labels, strict=True)]

    longest = [range(max(map(len, row.inputs.values()))) for row in rows]
    return in_batches(longest, run, size=batch_size, max_length=model.cfg.max_length)


@functools.partial(jax.jit, static_argnames="model")
def _of_labels(model: nn.Module, params: Any, batch: registry.Batch) -> jax.Array:
    """A batch as of `registry.forward` -> float32 [B, T], ln p of its labels; 0 for IGNORED ones."""
    features, labels, _ = registry.forward(model, params, batch, method="features")

    def at(position: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, label = position
        logits: Any = model.apply({"params": params}, x, method="logits")
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(log_p, jnp.maximum(label, 0)[:, None], axis=-1)[:, 0]
        return jnp.where(label == IGNORED, 0, chosen)

    found = jax.lax.map(at, (features.swapaxes(0, 1), labels.swapaxes(0, 1)), batch_size=POSITIONS_AT_ONCE)
    return whole(found.swapaxes(0, 1))
