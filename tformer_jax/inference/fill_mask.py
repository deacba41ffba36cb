"""Fills the masked tokens of texts with a masked language model."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.data.characters import is_blank
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.batching import TextProcessor, pad_rows, power_of_two, run_in_batches
from tformer_jax.inference.encoding import LongTexts, TextError, encode_with_masks
from tformer_jax.nn.sharding import replicate
from tformer_jax.parallel.placement import mesh_of, shard_batch, use_whole_mesh
from tformer_jax.special_tokens import PAD


class Fill(NamedTuple):
    """A text whose masks are filled."""

    text: str
    tokens: tuple[str, ...]
    """The token of each mask, as text."""
    probability: float
    """The product of the probabilities of the tokens, each given the text with all its masks."""


class MaskFiller(TextProcessor[str, list[int], list[Fill]]):
    """Fills masks with a `MaskedLM` model.

    Results are the `top` fills of a text, the most probable one first; none for a blank text. A text without a mask
    raises `TextError`.

    Args:
        top: number of fills per text; the n-th one has the n-th most probable token of each mask.

    Raises:
        UserError: the tokenizer has no mask token, or there are fewer than `top` tokens.
    """

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, *, top: int):
        super().__init__(cfg, model, tokenizers)
        self.top, self._tokenizer = top, tokenizers.target
        mask = self._tokenizer.mask
        if mask is None:
            raise UserError("the tokenizer of this run has no mask token")
        check_type("top", top, (int, np.integer), "a number of fills per text, such as top=5")
        if not 1 <= top <= self._tokenizer.vocab_size:
            raise UserError(f"top={top}: must be from 1 to {self._tokenizer.vocab_size}, the vocabulary size")
        self._mask, self._name = mask

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        special = self._tokenizer.special
        limit = self.cfg.model.max_length - special.added_to_text
        ids = encode_with_masks(self._tokenizer, text) if not is_blank(text) else []
        fitting = long_texts.fit(index, ids, limit, "text") or []
        if fitting and self._mask not in fitting:
            among = f" within the {limit} tokens to which it is truncated" if self._mask in ids else ""
            raise TextError(index, f"the text has no mask{among}: write {self._name} where a token is to be predicted")
        return special.wrap_text(fitting) if fitting else []

    def _compute(self, params: Any, rows: list[list[int]]) -> Iterator[list[Fill]]:
        mesh = mesh_of(params)
        masks = [[at for at, token in enumerate(row) if token == self._mask] for row in rows]
        most = power_of_two(max(map(len, masks), default=1))

        def run(indices: np.ndarray, T: int) -> Iterator[list[Fill]]:
            tokens = pad_rows([rows[index] for index in indices], len(indices), T)
            positions = np.maximum(pad_rows([masks[index] for index in indices], len(indices), most), 0)
            with use_whole_mesh(mesh):
                batch = shard_batch(mesh, {"tokens": tokens, "positions": positions})
                size = self._tokenizer.vocab_size
                best = jax.device_get(candidates(self.model, params, **batch, top=self.top, size=size))
            for index, probabilities, ids in zip(indices, *best, strict=True):
                count = len(masks[index])
                yield self._fills(rows[index], masks[index], probabilities[:count], ids[:count])

        cfg = self.cfg
        return run_in_batches(list(map(len, rows)), run, size=cfg.eval.batch_size, max_length=cfg.model.max_length)

    def _fills(self, row: list[int], masks: list[int], probabilities: np.ndarray, ids: np.ndarray) -> list[Fill]:
        """Returns the fills of a row, given the candidates of each mask, [masks, top]; none without masks."""
        special, fills = self._tokenizer.special, []
        for rank in range(self.top if masks else 0):
            filled = dict(zip(masks, ids[:, rank].tolist(), strict=True))
            tokens = [filled.get(at, token) for at, token in enumerate(row)]
            inside = tokens[len(special.before) : len(tokens) - len(special.after)]
            shown = [token for token in inside if token not in special.eos]
            text = self._tokenizer.decode(shown, unknown=special.unknown_name)
            names = tuple(special.name(token) or self._tokenizer.decode([token]) for token in filled.values())
            fills.append(Fill(text, names, float(probabilities[:, rank].prod())))
        return fills


@functools.partial(jax.jit, static_argnames=("model", "top", "size"))
def candidates(
    model: nn.Module, params: Any, tokens: jax.Array, positions: jax.Array, *, top: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the most probable of the first `size` tokens, which the tokenizer has, at some positions.

    Args:
        tokens: int [B, S] with PAD on the right.
        positions: int [B, M].

    Returns:
        Probabilities, float32 [B, M, top], in descending order, and token ids, int32 [B, M, top].
    """
    x: Any = model.apply({"params": params}, tokens, tokens != PAD, right_padded=True, method="features")
    chosen = jnp.take_along_axis(x, positions[..., None], axis=1)
    logits: Any = model.apply({"params": params}, chosen, method="logits")
    return jax.tree.map(replicate, tuple(jax.lax.top_k(jax.nn.softmax(logits, axis=-1)[..., :size], top)))
