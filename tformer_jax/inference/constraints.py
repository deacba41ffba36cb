"""Constraints on the next token that depend on earlier tokens: pure functions of logits and histories."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.data.markup import take_out
from tformer_jax.data.placeholders import NUMBERED, mask
from tformer_jax.data.tokenizers import Placeholders, Tokenizer
from tformer_jax.inference.encoding import dropped_characters
from tformer_jax.inference.forced import CONTEXTS, encode_continuation
from tformer_jax.inference.sampling import RowSettings, among
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Static constraints on outputs; a disabled constraint adds no operations to the compiled step."""

    repetition: bool = False
    """Penalize tokens of the history, with the strength `RowSettings.repetition`."""
    no_repeat_ngram: int = 0
    """Size of n-grams that must not repeat; 0 disables it."""
    forbidden: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur in an output."""
    eos: tuple[int, ...] = DEFAULT_SPECIAL_TOKENS.eos
    """Tokens that end an output."""
    suppressed: tuple[int, ...] = DEFAULT_SPECIAL_TOKENS.suppressed
    """Tokens that are never generated."""
    placeholders: tuple[int, ...] = ()
    """Symbols of placeholders by number: a row has the first `RowSettings.placeholders` of them."""
    vocab_size: int | None = None
    """Number of tokens of the tokenizer: later rows of a padded vocabulary are never generated, except `eos`."""
    phrase_sizes: tuple[int, int, int] = (0, 0, 0)
    """C, A and P of the phrases that outputs must contain; see `constrained_beam.Phrases`. 0: there are none."""
    word_edges: bytes = b""
    """As `phrases.word_edges` returns it; empty without phrases."""

    @classmethod
    def from_config(cls, cfg: DecodeConfig, tokenizer: Tokenizer) -> "Constraints":
        """Builds the constraints of a config for outputs of a tokenizer.

        Raises:
            UserError: the vocabulary cannot represent a text, normalized outputs never have a text of `stop`, or a text
                has a placeholder.
        """
        names = Placeholders(tuple(tokenizer.placeholders), tuple(tokenizer.symbols))
        for name, texts in (("stop", cfg.stop), ("forbidden", cfg.forbidden)):
            for text in texts:
                if mask(names, text).originals or (cfg.markup == "align" and take_out(text, names).marks):
                    problem = f"{text!r} has a placeholder or a tag, which outputs get from their source"
                    raise cfg.error(name, f"{problem}: leave it out")
        for text in cfg.stop:
            written = tokenizer.normalize(text)
            if written != text and text not in tokenizer.normalize(f"x{text}x"):
                instead = f"write {written!r} or leave it out" if written else "leave it out"
                raise cfg.error("stop", f"{text!r} does not occur in normalized outputs; {instead}")
        ids = tokenizer.symbol_ids
        return cls(
            repetition=cfg.repetition_penalty != 1,
            no_repeat_ngram=cfg.no_repeat_ngram,
            forbidden=_encode_forbidden(cfg, tokenizer),
            eos=tokenizer.special.eos,
            suppressed=tuple(i for i in tokenizer.special.suppressed if i < tokenizer.vocab_size),
            placeholders=tuple(ids[symbol] for symbol in NUMBERED if tokenizer.placeholders and symbol in ids),
            vocab_size=tokenizer.vocab_size,
        )

    @property
    def need_logits(self) -> bool:
        """Whether `constrain` changes logits of rows without a minimum length."""
        return self.need_history or bool(self.forbidden or self.placeholders)

    @property
    def need_history(self) -> bool:
        """Whether `constrain` needs the earlier tokens."""
        return self.repetition or self.no_repeat_ngram > 0 or any(len(ids) > 1 for ids in self.forbidden)


NO_CONSTRAINTS = Constraints()


def forbid(logits: jax.Array, constraints: Constraints) -> jax.Array:
    """Sets the logits of tokens that are never generated to -inf: [..., V] -> [..., V]."""
    tokens = jnp.arange(logits.shape[-1])
    never = among(tokens, constraints.suppressed)
    if constraints.vocab_size is not None and constraints.vocab_size < logits.shape[-1]:
        never |= (tokens >= constraints.vocab_size) & ~among(tokens, constraints.eos)
    return jnp.where(never, -jnp.inf, logits)


def constrain(
    logits: jax.Array,
    history: jax.Array,
    counts: jax.Array,
    generated: jax.Array,
    settings: RowSettings,
    constraints: Constraints,
) -> jax.Array:
    """Sets the logits (or log-probabilities) of tokens that the constraints exclude to -inf.

    If all tokens of a row are excluded, the row ends: `constraints.eos` are allowed. (Ends outside of the vocabulary,
    as of nanoGPT's character models, cannot be chosen.)

    Args:
        logits: float32 [B, V].
        history: int [B, L], tokens read and generated so far, left-aligned; [B, 0] unless `constraints.need_history`.
        counts: int [B], number of tokens in `history`; later entries are ignored.
        generated: int [B], number of output tokens so far.

    Returns:
        float32 [B, V].
    """
    if constraints.repetition:
        logits = penalize(logits, history, counts, settings.repetition)
    unconstrained = logits
    if constraints.no_repeat_ngram:
        logits = exclude_repeated(logits, history, counts, constraints.no_repeat_ngram)
    if constraints.forbidden:
        logits = exclude_sequences(logits, history, counts, constraints.forbidden)
    if constraints.placeholders:
        symbols = jnp.array(constraints.placeholders)
        missing = jnp.arange(len(symbols)) >= settings.placeholders[:, None]
        logits = logits.at[:, symbols].set(jnp.where(missing, -jnp.inf, logits[:, symbols]))
    ends = among(jnp.arange(logits.shape[-1]), constraints.eos)
    logits = jnp.where(ends & (generated < settings.min_tokens)[:, None], -jnp.inf, logits)
    if constraints.no_repeat_ngram or constraints.forbidden:
        stuck = forbid(logits, constraints).max(axis=-1) == -jnp.inf
        logits = jnp.where(ends & stuck[:, None], unconstrained, logits)
    return logits


def penalize(logits: jax.Array, history: jax.Array, counts: jax.Array, strength: jax.Array) -> jax.Array:
    """Divides the positive logits of tokens in the history by `strength`, [B], and multiplies the negative ones by it.

    "CTRL: A Conditional Transformer Language Model for Controllable Generation" (2019), section 4.1, extended to
    negative logits. The other arguments and the result are as in `constrain`.
    """
    repeated = jnp.take_along_axis(logits, history, axis=1)
    strength = strength[:, None]
    penalized = jnp.where(repeated < 0, repeated * strength, repeated / strength)
    return _set_logits(logits, history, _is_token(history, counts), penalized)


def exclude_repeated(logits: jax.Array, history: jax.Array, counts: jax.Array, n: int) -> jax.Array:
    """Excludes tokens that would complete an n-gram which the history already contains."""
    windows = history.shape[1] - n + 1
    if windows <= 0:
        return logits
    last = history[:, n - 1 :]
    same = _is_token(history, counts)[:, n - 1 :]
    for offset, token in enumerate(_last_tokens(history, counts, n - 1)):
        same &= history[:, offset : offset + windows] == token[:, None]
    return _set_logits(logits, last, same, -jnp.inf)


def exclude_sequences(
    logits: jax.Array, history: jax.Array, counts: jax.Array, sequences: tuple[tuple[int, ...], ...]
) -> jax.Array:
    """Excludes tokens that would complete one of the sequences at the end of the history."""
    rows = logits.shape[0]
    for length, group in itertools.groupby(sorted(sequences, key=len), key=len):
        ids = jnp.array(list(group), jnp.int32)
        complete = jnp.broadcast_to((counts >= length - 1)[:, None], (rows, len(ids)))
        for offset, token in enumerate(_last_tokens(history, counts, length - 1)):
            complete &= ids[:, offset] == token[:, None]
        logits = _set_logits(logits, jnp.broadcast_to(ids[:, -1], complete.shape), complete, -jnp.inf)
    return logits


def _is_token(history: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns bool [B, L]: True where `history` has tokens."""
    return jnp.arange(history.shape[1]) < counts[:, None]


def _last_tokens(history: jax.Array, counts: jax.Array, length: int) -> list[jax.Array]:
    """Returns the last `length` tokens of each history, each int [B]; undefined for shorter histories."""
    indices = jnp.maximum(counts[:, None] - length + jnp.arange(length), 0)
    return list(jnp.take_along_axis(history, indices, axis=1).T) if length else []


def _set_logits(logits: jax.Array, tokens: jax.Array, where: jax.Array, values: jax.Array | float) -> jax.Array:
    """Sets logits [B, V] of `tokens`, int [B, n], to `values` (scalar or [B, n]) if `where`, bool [B, n], is True."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, jnp.where(where, tokens, logits.shape[1])].set(values, mode="drop")


def _after_space(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Returns the tokens of a text after a space, also if the tokenizer drops spaces at the beginning."""
    written = f" {text}"
    if tokenizer.normalize(written) != tokenizer.normalize(text):
        return tuple(tokenizer.encode(written))
    contexts = filter(tokenizer.encode, CONTEXTS)
    within = (encode_continuation(tokenizer, written, context) for context in contexts)
    return next(filter(None, within), tuple(tokenizer.encode(text)))


def _encode_forbidden(cfg: DecodeConfig, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Encodes each text with and without a leading space; drops sequences that end in another sequence."""
    sequences: dict[tuple[int, ...], None] = {}
    for text in cfg.forbidden:
        ids = tokenizer.encode(text)
        if set(ids) <= {tokenizer.special.unknown} or dropped_characters(tokenizer, text):
            raise cfg.error("forbidden", f"{text!r} cannot be encoded with this vocabulary; leave it out")
        sequences.update(dict.fromkeys((tuple(ids), _after_space(tokenizer, text))))
    shorter = {ids[start:] for ids in sequences for start in range(1, len(ids))} & sequences.keys()
    return tuple(ids for ids in sequences if not any(ids != end and ids[-len(end) :] == end for end in shorter))
