"""Speculative decoding: a draft model proposes tokens, and the model reads them all in one call and keeps the fitting.

"Fast Inference from Transformers via Speculative Decoding" (2023) and "Accelerating Large Language Model Decoding with
Speculative Sampling" (2023). Whatever the draft, outputs are those of the model alone: greedily the same tokens (but
where two are as probable as rounding can tell, for a call of several tokens rounds differently), and in sampling tokens
of the same distribution. Settings and rules are kept exactly; the draft follows them, too.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import ConfigError, DecodeConfig
from tformer_jax.inference.chains import Chains, log_probabilities
from tformer_jax.inference.constraints import NO_RULES, Rules
from tformer_jax.inference.generate import Begun, begin_continuation, begin_translation
from tformer_jax.inference.rows import Read
from tformer_jax.inference.sampling import RowSettings, draw, probabilities
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.kv_cache import DecoderCache
from tformer_jax.special_tokens import EOS, PAD

_compiled = functools.partial(jax.jit, static_argnames=("model", "draft", "length", "cfg", "rules"))


class Speculated(NamedTuple):
    """Outputs, and how the draft did."""

    tokens: jax.Array
    """int32 [B, length]: up to and including EOS, then PAD."""
    log_probs: jax.Array
    """float32 [B, length]: the model's log-probability of each token, before all settings and rules; 0 for PAD."""
    proposed: jax.Array
    """int32 [B]: tokens that the draft proposed."""
    accepted: jax.Array
    """int32 [B]: those of them that were kept."""


@_compiled
def translate(
    model: Seq2Seq,
    params: Any,
    draft: Seq2Seq,
    draft_params: Any,
    source: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    rules: Rules = NO_RULES,
) -> Speculated:
    """`generate.translate` with a draft, which reads the source with an encoder of its own; arguments as there.

    Raises:
        ConfigError: the draft does not fit the model, or `cfg` asks for beam search.
    """
    _check(model, draft, cfg)
    target, proposer = (
        begin_translation(of, its, source, length, cfg, ragged=True)
        for of, its in ((model, params), (draft, draft_params))
    )
    return _decode(target, proposer, keys, length, cfg, rules)


@_compiled
def continue_text(
    model: DecoderLM,
    params: Any,
    draft: DecoderLM,
    draft_params: Any,
    prompt: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    rules: Rules = NO_RULES,
) -> Speculated:
    """`generate.continue_text` with a draft; arguments as there.

    Raises:
        ConfigError: the draft does not fit the model, or `cfg` asks for beam search.
    """
    _check(model, draft, cfg)
    target, proposer = (
        begin_continuation(of, its, prompt, length, cfg, ragged=True)
        for of, its in ((model, params), (draft, draft_params))
    )
    return _decode(target, proposer, keys, length, cfg, rules)


def judge(
    p: jax.Array, q: jax.Array, tokens: jax.Array, proposed: jax.Array, settings: RowSettings, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many proposed tokens each row keeps, and the token after these, so that all are distributed as `p` says.

    Algorithm 1 of "Fast Inference from Transformers via Speculative Decoding" (2023).

    Args:
        p: float32 [B, k + 1, V], the model's probabilities after 0, ..., k of the tokens.
        q: float32 [B, k, V], the distributions that the tokens were drawn from.
        tokens: int32 [B, k].
        proposed: int32 [B], so many of them count.
        keys: [B] PRNG keys.

    Returns:
        int32 [B] and int32 [B].
    """
    k = tokens.shape[1]
    judging, choosing = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    p_of, q_of = (jnp.take_along_axis(of[:, :k], tokens[..., None], axis=2)[..., 0] for of in (p, q))
    chance = jax.vmap(lambda key: jax.random.uniform(key, (k,)))(judging)
    good = (jnp.arange(k) < proposed[:, None]) & (chance * q_of < p_of)
    accepted = jnp.cumprod(good, axis=1, dtype=jnp.int32).sum(axis=1)
    place = accepted[:, None, None]
    p_next = jnp.take_along_axis(p, place, axis=1)[:, 0]
    q_next = jnp.take_along_axis(q, jnp.minimum(place, k - 1), axis=1)[:, 0]
    rest = jnp.maximum(p_next - jnp.where((accepted < proposed)[:, None], q_next, 0), 0)
    rest = jnp.where(rest.any(axis=1, keepdims=True), rest, p_next)  # nothing is left where rounding alone refused
    return accepted, draw(rest, settings, choosing)


@flax.struct.dataclass
class _State:
    """Rows between two calls of the model."""

    rows: Chains
    target: DecoderCache
    """Holds all tokens of the rows but the last one."""
    draft: DecoderCache
    """Lacks one more where all proposed tokens were kept."""
    log_probs: jax.Array
    """Like the others, as in `Speculated`."""
    proposed: jax.Array
    accepted: jax.Array


def _decode(target: Begun, draft: Begun, keys: jax.Array, length: int, cfg: DecodeConfig, rules: Rules) -> Speculated:
    """Rounds of proposals and one call of the model, until all rows are done."""
    B, k = len(keys), max(min(cfg.draft_tokens, length - 1), 1)
    rows = Chains.start(target.prompt, target.room, keys, RowSettings.of(cfg, B), rules, length=length)
    nothing = jnp.zeros((B,), jnp.int32)
    start = _State(rows, target.cache, draft.cache, jnp.zeros((B, length)), nothing, nothing)
    end = jax.lax.while_loop(
        lambda state: ~state.rows.done.all(), lambda state: _round(target.read, draft.read, state, k), start
    )
    return Speculated(end.rows.outputs(length), end.log_probs, end.proposed, end.accepted)


def _round(target: Read, draft: Read, state: _State, k: int) -> _State:
    """One to k + 1 more tokens in every row that is not done."""
    rows = state.rows
    proposing, judging = jnp.moveaxis(
        jax.vmap(lambda key, made: jax.random.split(jax.random.fold_in(key, made)))(rows.keys, rows.made), 1, 0
    )
    ahead, tokens, q, draft_cache = _propose(draft, rows, state.draft, proposing, k)
    proposed = ahead.made - rows.made
    logits, target_cache = target(jnp.concatenate([rows.reading()[0], tokens], axis=1), state.target, last_only=False)
    known = dataclasses.replace(rows, history=ahead.history)
    p = jax.vmap(
        lambda logits, more: probabilities(known.allowed(logits, more), rows.settings), in_axes=(1, 0), out_axes=1
    )(logits, jnp.arange(k + 1))
    accepted, following = judge(p, q, tokens, proposed, rows.settings, judging)
    columns = jnp.arange(k + 1)
    kept = jnp.where(columns < accepted[:, None], jnp.pad(tokens, ((0, 0), (0, 1))), PAD)
    ended = rows.done | (kept == EOS).any(axis=1)
    many = accepted + ~ended
    chosen = jnp.where(columns == accepted[:, None], following[:, None], kept)
    places = jnp.where(columns < many[:, None], rows.made[:, None] + columns, state.log_probs.shape[1])
    new_log_probs = log_probabilities(logits, chosen)
    rows = rows.extended(chosen, many)
    return _State(
        rows,
        _before_last(target_cache, rows),
        _before_last(draft_cache, rows),
        state.log_probs.at[jnp.arange(len(many))[:, None], places].set(new_log_probs, mode="drop"),
        state.proposed + proposed,
        state.accepted + accepted,
    )


def _propose(
    read: Read, rows: Chains, cache: DecoderCache, keys: jax.Array, k: int
) -> tuple[Chains, jax.Array, jax.Array, DecoderCache]:
    """Up to k tokens of each row, up to EOS, that leave room for another one.

    Returns:
        The rows with these tokens; the tokens, int32 [B, k], then PAD; what they were drawn from, float32 [B, k, V];
        and the cache of all of them but the last.
    """
    room = rows.room - 1
    ahead = dataclasses.replace(rows, room=room, done=rows.done | (rows.made >= room))

    def choose(ahead: Chains, logits: jax.Array) -> tuple[Chains, tuple[jax.Array, jax.Array]]:
        q = probabilities(ahead.allowed(logits[:, 0]), rows.settings)
        drawn = draw(q, rows.settings, jax.vmap(jax.random.fold_in)(keys, ahead.made))
        return ahead.extended(drawn[:, None], ~ahead.done), (jnp.where(ahead.done, PAD, drawn), q)

    def step(state: tuple[Chains, DecoderCache], _: None) -> tuple[tuple[Chains, DecoderCache], Any]:
        ahead, cache = state
        logits, cache = read(ahead.reading()[0], cache)
        ahead, chosen = choose(ahead, logits)
        return (ahead, cache), chosen

    logits, cache = read(_unread(ahead, cache), cache)
    ahead, first = choose(ahead, logits)
    (ahead, cache), others = jax.lax.scan(step, (ahead, cache), length=k - 1)
    tokens, q = jax.tree.map(lambda one, more: jnp.moveaxis(jnp.concatenate([one[None], more]), 0, 1), first, others)
    return ahead, tokens, q, cache


def _unread(rows: Chains, cache: DecoderCache) -> jax.Array:
    """What the draft has not read, int32 [B, 2], PAD on the left: the last token, and that before it where it was its
    own last proposal."""
    places = rows.counts[:, None] + jnp.array([-2, -1])
    tokens = jnp.take_along_axis(rows.history, jnp.maximum(places, 0), axis=1)
    return jnp.where(rows.done[:, None] | (places < cache.lengths[:, None]), PAD, tokens)


def _before_last(cache: DecoderCache, rows: Chains) -> DecoderCache:
    """The cache of at most all tokens of the rows but the last one."""
    return cache.forget(jnp.maximum(cache.lengths - rows.counts + 1, 0))


def _check(model: Seq2Seq | DecoderLM, draft: Seq2Seq | DecoderLM, cfg: DecodeConfig) -> None:
    if cfg.strategy == "beam":
        raise cfg.error("strategy", "does not go together with a draft; write 'greedy' or 'sample'")
    for name, unit in (("vocab_size", "tokens"), ("source_vocab_size", "tokens of sources")):
        theirs, ours = getattr(draft.cfg, name), getattr(model.cfg, name)
        if theirs != ours:
            raise ConfigError(
                f"the draft knows {theirs} {unit}, and the model {ours}: take a draft with the model's own tokenizer"
            )
    if draft.cfg.max_length < model.cfg.max_length:
        raise ConfigError(
            f"the draft reads at most {draft.cfg.max_length} tokens, and the model {model.cfg.max_length}: take a "
            f"draft of model.max_length={model.cfg.max_length} or more"
        )
