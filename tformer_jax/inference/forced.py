"""Forced first tokens of outputs: the checkpoint's, language tags and a prefix; they may differ between rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import DecodeConfig
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.inference.batching import MIN_LENGTH, pad_rows, power_of_two
from tformer_jax.inference.detokenization import output_decoder
from tformer_jax.inference.encoding import dropped_characters
from tformer_jax.special_tokens import PAD

CONTEXTS = ("\n", ".", "a", "0")
"""Texts after which a prefix is encoded; at least one of them is expected to form no token with it."""


class FirstTokens(NamedTuple):
    """The tokens with which an output starts."""

    ids: tuple[int, ...] = ()
    prefix: int = 0
    """Number of tokens at the end from `decode.prefix`; lengths in scores do not count them, as in transformers."""


@flax.struct.dataclass
class ForcedTokens:
    """The tokens with which the outputs of B rows start; they take precedence over all constraints."""

    ids: jax.Array
    """int32 [B, F], PAD after the tokens of a row; without any, F is 0, and decoding steps have no operation for them.
    """
    prefix: jax.Array
    """int32 [B]: as `FirstTokens.prefix`."""

    @classmethod
    def from_rows(cls, rows: Sequence[FirstTokens], width: int | None = None) -> "ForcedTokens":
        """Returns NumPy arrays with F = `width`; None: the smallest width that is compiled for these rows."""
        size = max((forced_width(len(row.ids)) for row in rows), default=0) if width is None else width
        ids: Any = pad_rows([row.ids for row in rows], len(rows), size)
        prefix: Any = np.array([row.prefix for row in rows], np.int32)
        return cls(ids, prefix)

    def next(self, generated: jax.Array) -> jax.Array | None:
        """Returns the next forced token of each row, int32 [B], or PAD if the row's tokens are not forced anymore.

        Args:
            generated: int [B], numbers of generated tokens.

        Returns None if no row has forced tokens (F is 0).
        """
        F = self.ids.shape[1]
        if F == 0:
            return None
        token = jnp.take_along_axis(self.ids, jnp.minimum(generated, F - 1)[:, None], axis=1)[:, 0]
        return jnp.where(generated < F, token, PAD)

    def counted(self, generated: jax.Array) -> jax.Array:
        """Returns the output lengths for scores, int [B]: `generated` without prefix tokens, at least 1."""
        return jnp.maximum(generated - self.prefix if self.ids.shape[1] else generated, 1)

    def extended(self, width: int) -> "ForcedTokens":
        """Pads the rows to F = `width`."""
        missing = width - self.ids.shape[1]
        return ForcedTokens(jnp.pad(self.ids, ((0, 0), (0, missing)), constant_values=PAD), self.prefix)


def forced_width(count: int) -> int:
    """Returns the width F for rows with at most `count` tokens: one of a few numbers, since each is compiled."""
    return power_of_two(max(count, MIN_LENGTH)) if count else 0


def first_tokens(
    decode: DecodeConfig, tokenizer: Tokenizer, *, continues: bool, tags: tuple[int, ...] = ()
) -> FirstTokens:
    """Returns the first tokens of an output: the forced tokens of the tokenizer's checkpoint, `tags`, and the prefix.

    Args:
        tokenizer: reads and writes outputs.
        continues: outputs continue a text (`Family.continues`).
        tags: language tags.

    Raises:
        UserError: the vocabulary cannot represent the prefix, or the prefix is too long or contains a stop or forbidden
            text.
    """
    before = (*tokenizer.special.forced, *tags)
    if not decode.prefix:
        return FirstTokens(before)
    _check_normalized(decode, tokenizer)
    prefix = _encode_prefix(decode, tokenizer, continues=continues)
    if decode.max_new_tokens is not None and len(before + prefix) > decode.max_new_tokens:
        limit = f"more than decode.max_new_tokens={decode.max_new_tokens}"
        raise decode.error("prefix", f"has {len(before + prefix)} tokens, {limit}")
    return FirstTokens(before + prefix, len(prefix))


def _check_normalized(cfg: DecodeConfig, tokenizer: Tokenizer) -> None:
    """Checks texts as a tokenizer that normalizes writes them; `DecodeConfig.check` compares them as they are."""
    prefix = tokenizer.normalize(cfg.prefix)
    for name, texts in (("stop", cfg.stop), ("forbidden", tuple(map(tokenizer.normalize, cfg.forbidden)))):
        for text in filter(None, texts):
            if text in prefix:
                raise cfg.error(
                    name, f"{text!r} occurs in the normalized decode.prefix, {prefix!r}; remove one of them"
                )


def _encode_prefix(cfg: DecodeConfig, tokenizer: Tokenizer, *, continues: bool) -> tuple[int, ...]:
    """Encodes the prefix so that outputs start with it."""
    ids = tuple(tokenizer.encode(cfg.prefix))
    if not ids or tokenizer.special.unknown in ids or dropped_characters(tokenizer, cfg.prefix):
        raise cfg.error("prefix", "cannot be encoded with this vocabulary; choose other words")
    decoder = output_decoder(tokenizer, continues=continues)
    if (written := decoder.decode(ids)).startswith(" ") and not cfg.prefix.startswith(" "):
        encoded = (encode_continuation(tokenizer, cfg.prefix, text) for text in CONTEXTS)
        ids = next((tokens for tokens in encoded if decoder.decode(tokens) == written[1:]), ())
        if not ids:
            raise cfg.error("prefix", f"outputs of this tokenizer can only start with {written!r}; write that")
    return ids


def encode_continuation(tokenizer: Tokenizer, text: str, context: str) -> tuple[int, ...]:
    """Encodes a text after another one, without the space that some tokenizers put before texts."""
    before, whole = (tuple(tokenizer.encode(joined)) for joined in (context, context + text))
    return whole[len(before) :] if whole[: len(before)] == before else ()
