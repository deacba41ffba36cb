"""Beam search with a KV cache: searches for the most probable outputs instead of the most probable next tokens."""

import dataclasses
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference import sampling
from tformer_jax.inference.constraints import Constraints, constrain, forbid
from tformer_jax.inference.decoding_state import DecodingState, StepResult
from tformer_jax.inference.forced import FirstTokens, ForcedTokens
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.nn.padding import take_per_row
from tformer_jax.nn.row_slots import resize_axis
from tformer_jax.nn.slots import BeamAncestry
from tformer_jax.nn.xla import top_k
from tformer_jax.special_tokens import PAD

WORST = -1e9
"""Score of a missing hypothesis, and sum of a beam that has none; half of it is below the sum of any other."""
UNUSED = -jnp.inf
"""Score of beams beyond the width of a row."""


class Hypotheses(NamedTuple):
    """The k best outputs of each row, best first."""

    tokens: jax.Array
    """int32 [B, k, length]: up to and including the token that ends it, then PAD."""
    scores: jax.Array
    """float32 [B, k]: sums of log-probabilities, divided by the length penalty; `WORST` for missing hypotheses."""


@flax.struct.dataclass
class BeamState(DecodingState):
    """State of beam search, which extends the `cfg.beams` most probable hypotheses of each row until none can improve.

    A step has (1 + e) k candidates for e EOS tokens, so that at least k do not end ("Sequence Transduction with
    Recurrent Neural Networks", 2012). A hypothesis that ends among the k best candidates is finished. Its score is
    `sum of log p / penalty(tokens)`, with its end and without the tokens of `decode.prefix` (length penalties of GNMT,
    2016, equation 14). The k best others continue. `cfg.early_stopping` determines when a row is done:

    - `first`: it has k outputs;
    - `heuristic`: its best running hypothesis, if it ended now, would not be better than the k-th output;
    - `never`: the same, for every remaining length.

    The beams of a row are k tokens of one call that attend only to their ancestors: no cache is copied, and shared
    tokens (the prompt, the encoder output) are stored once. New tokens replace those without running descendants, so
    that a row uses few more slots than its longest output has tokens. Arrays have k = `cfg.beams` beams. A row uses the
    first `settings.beams` beams, with the same outputs as in a step compiled for that width.
    """

    prompt_end: jax.Array
    """int32 [B]: the last token of the prompt."""
    history: jax.Array
    """int32 [B, L]: the prompt, then PAD; L is 0 unless `constraints.need_history`."""
    generated: jax.Array
    """int32 [B]: number of tokens generated so far."""
    max_new_tokens: jax.Array
    """int32 [B]: maximum number of tokens to generate; 0 for padding rows."""
    done: jax.Array
    """bool [B]: rows whose finished hypotheses cannot change."""
    running: jax.Array
    """int32 [B, k, length]: running hypotheses."""
    sums: jax.Array
    """float32 [B, k]: sums of their log-probabilities."""
    ancestry: BeamAncestry
    """Ancestry of `running`."""
    finished: Hypotheses
    settings: RowSettings
    forced: ForcedTokens
    cfg: DecodeConfig = flax.struct.field(pytree_node=False)
    constraints: Constraints = flax.struct.field(pytree_node=False)

    @classmethod
    def start(
        cls,
        last: jax.Array,
        counts: jax.Array,
        max_new_tokens: jax.Array,
        settings: RowSettings,
        constraints: Constraints,
        *,
        length: int,
        cfg: DecodeConfig,
        history: jax.Array | None = None,
        forced: ForcedTokens | None = None,
        **others: Any,
    ) -> "BeamState":
        """Returns the initial state.

        Args:
            last, counts, max_new_tokens, forced, history: as in `SamplingState.start`; None: L is 0.
            length: size of the token arrays; `resized` makes them longer before an output exceeds it.
            others: fields of a subclass.
        """
        (B,), k = max_new_tokens.shape, cfg.beams
        first = jnp.arange(k) == 0
        sums = jnp.where(jnp.arange(k) < settings.beams[:, None], jnp.where(first, jnp.float32(0), WORST), UNUSED)
        no_tokens = jnp.full((B, k, length), PAD, jnp.int32)
        return cls(
            prompt_end=last,
            history=jnp.zeros((B, 0), jnp.int32) if history is None else history,
            generated=jnp.zeros((B,), jnp.int32),
            max_new_tokens=max_new_tokens,
            done=max_new_tokens <= 0,
            running=no_tokens,
            sums=sums,
            ancestry=BeamAncestry(jnp.zeros((B, k, length), jnp.int32), counts),
            finished=Hypotheses(no_tokens, jnp.full((B, k), WORST, jnp.float32)),
            settings=settings,
            forced=forced or ForcedTokens.from_rows([FirstTokens()] * B),
            cfg=cfg,
            constraints=constraints,
            **others,
        )

    def next_tokens(self) -> tuple[jax.Array, BeamAncestry]:
        """Returns the newest token of each beam, int32 [B, k], PAD for unused ones; initially the last prompt token."""
        chosen = jnp.take_along_axis(self.running, jnp.maximum(self.generated - 1, 0)[:, None, None], axis=2)[..., 0]
        alone = jnp.where(jnp.arange(self.cfg.beams) == 0, self.prompt_end[:, None], PAD)
        last = jnp.where((self.generated == 0)[:, None], alone, chosen)
        return jnp.where(self.done[:, None] | ~self._used(), PAD, last), self.ancestry

    def advance(self, logits: jax.Array) -> "BeamState":
        """Extends the beams by one token, given logits, float32 [B, k, V]; initially only the first beam is used."""
        sums, parents, tokens = self._candidates(logits)
        now = jnp.arange(self.running.shape[2]) == self.generated[:, None, None]
        grown = jnp.where(now, tokens[..., None], take_per_row(self.running, parents))
        generated = self.generated + ~self.done
        ends = sampling.among(tokens, self.constraints.eos) | (generated >= self.max_new_tokens)[:, None]
        continued, order = self._best_running(sums, ends)
        continued = jnp.where(self._used(), continued, UNUSED)
        finished = self._finish(grown, sums, ends, generated, self._may_finish(sums, ends, parents, tokens))
        can_improve = self._can_improve(continued[:, 0], finished.scores, generated)
        ancestors = take_per_row(self.ancestry.ancestors, take_per_row(parents, order))
        own = jnp.arange(self.cfg.beams)[:, None]
        return dataclasses.replace(
            self,
            generated=generated,
            done=self.done | (generated >= self.max_new_tokens) | ~can_improve,
            running=take_per_row(grown, order),
            sums=continued,
            ancestry=BeamAncestry(jnp.where(now, own, ancestors), self.ancestry.start),
            finished=finished,
            **self._carried(parents, tokens, order),
        )

    def fits(self, cache: DecoderCache) -> jax.Array:
        return (self.done | cache.has_room(self.settings.beams)).all()

    @property
    def length(self) -> int:
        return self.running.shape[2]

    def resized(self, length: int, forced: int) -> "BeamState":
        return dataclasses.replace(
            self,
            running=resize_axis(self.running, length, 2, PAD),
            ancestry=BeamAncestry(resize_axis(self.ancestry.ancestors, length, 2), self.ancestry.start),
            finished=Hypotheses(resize_axis(self.finished.tokens, length, 2, PAD), self.finished.scores),
            forced=self.forced.extended(forced),
        )

    def result(self) -> StepResult:
        newest = jnp.maximum(self.generated - 1, 0)[:, None]
        return StepResult(jnp.take_along_axis(self.running[:, 0], newest, axis=1), self.sums[:, :1], self.done)

    def _used(self) -> jax.Array:
        """Returns bool [B, k]: the beams within the width of each row."""
        return jnp.arange(self.cfg.beams) < self.settings.beams[:, None]

    def _candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the n k best continuations, n = 1 + e, best first: their sums, parent beams and tokens.

        A row of width w < k has n w continuations; the rest are `UNUSED`.
        """
        k, n = self.cfg.beams, 1 + len(self.constraints.eos)
        allowed, total = self._log_weights(logits)
        values, tokens = top_k(allowed, min(n * k, logits.shape[-1]))
        B, _, width = values.shape
        sums = (self.sums[:, :, None] + values - total).reshape(B, k * width)
        best, indices = top_k(sums, n * k)
        best = jnp.where(jnp.arange(n * k) < n * self.settings.beams[:, None], best, UNUSED)
        tokens = jnp.take_along_axis(tokens.reshape(B, k * width), indices, axis=1)
        return self._with_forced(best, indices // width, tokens)

    def _log_weights(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits, -inf for excluded tokens, and what log-probabilities are less: [B, k, V] and [B, k, 1]."""
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        allowed = self._allowed(logits, total)
        if self.cfg.renormalize:
            total = jax.nn.logsumexp(allowed, axis=-1, keepdims=True)
            total = jnp.where(jnp.isfinite(total), total, 0)  # no token is allowed
        return allowed, total

    def _best_running(self, sums: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of the k candidates that continue, best first, and their places, int [B, k]."""
        return top_k(jnp.where(ends, sums + WORST, sums), self.cfg.beams)

    def _may_finish(self, sums: jax.Array, ends: jax.Array, parents: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns which candidates are outputs if they end, bool [B, n k]."""
        return jnp.arange(ends.shape[1]) < self.settings.beams[:, None]

    def _carried(self, parents: jax.Array, tokens: jax.Array, order: jax.Array) -> dict[str, Any]:
        """Returns the new fields of a subclass, given the candidates and the places of the beams."""
        return {}

    def _with_forced(
        self, sums: jax.Array, parents: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the candidates [B, n k]; in rows with a forced next token, the beams followed by that token."""
        forced = self.forced.next(self.generated)
        if forced is None:
            return sums, parents, tokens
        free, missing = (forced == PAD)[:, None], sums.shape[1] - self.cfg.beams
        own_sums = jnp.pad(self.sums, ((0, 0), (0, missing)), constant_values=UNUSED)
        own = jnp.minimum(jnp.arange(sums.shape[1]), self.cfg.beams - 1)
        return jnp.where(free, sums, own_sums), jnp.where(free, parents, own), jnp.where(free, tokens, forced[:, None])

    def _allowed(self, logits: jax.Array, total: jax.Array) -> jax.Array:
        """Applies the constraints to logits [B, k, V]; as in Hugging Face's beam search, they see log-probabilities."""
        logits = forbid(logits, self.constraints)
        if not self.constraints.need_logits and not self.cfg.min_new_tokens:
            return logits
        B, k, V = logits.shape
        generated = jnp.repeat(self.generated, k)
        counts = jnp.repeat(self.ancestry.start, k) + generated
        settings = jax.tree.map(lambda leaf: jnp.repeat(leaf, k, axis=0), self.settings)
        log_p = (logits - total).reshape(B * k, V)
        tokens = self._read_and_generated().reshape(B * k, -1)
        return constrain(log_p, tokens, counts, generated, settings, self.constraints).reshape(B, k, V) + total

    def _read_and_generated(self) -> jax.Array:
        """Returns the prompt and the running hypothesis of each beam, then PAD, int32 [B, k, L]."""
        columns = jnp.arange(self.history.shape[1]) - self.ancestry.start[:, None, None]
        own = jnp.take_along_axis(self.running, jnp.clip(columns, 0, self.length - 1), axis=2)
        return jnp.where(columns < 0, self.history[:, None], own)

    def _finish(
        self, grown: jax.Array, sums: jax.Array, ends: jax.Array, generated: jax.Array, may_finish: jax.Array
    ) -> Hypotheses:
        """Returns the k best of the finished hypotheses and of the candidates that end in this step."""
        k = self.cfg.beams
        counts = ends & (sums > WORST / 2) & may_finish & ~self.done[:, None]
        scores = jnp.where(counts, sums / self._penalty(generated)[:, None], WORST)
        best, order = top_k(jnp.concatenate([self.finished.scores, scores], axis=1), k)
        best = jnp.where(self._used(), best, WORST)
        return Hypotheses(take_per_row(jnp.concatenate([self.finished.tokens, grown], axis=1), order), best)

    def _can_improve(self, best_sum: jax.Array, scores: jax.Array, generated: jax.Array) -> jax.Array:
        """Returns bool [B]: whether a running hypothesis with this sum may still exceed the worst finished score."""
        scores = jnp.where(self._used(), scores, jnp.inf)
        full, exists = (scores > WORST).all(axis=1), best_sum > WORST / 2
        if self.cfg.early_stopping == "first":
            return exists & ~full
        to_the_end = self.cfg.early_stopping == "never" and self.cfg.length_alpha > 0
        length = self.max_new_tokens if to_the_end else generated
        return exists & (~full | (best_sum / self._penalty(length) > scores.min(axis=1)))

    def _penalty(self, generated: jax.Array) -> jax.Array:
        """Returns `length_penalty` for int [B] generated tokens; the tokens of `decode.prefix` do not count."""
        return length_penalty(self.forced.counted(generated), self.cfg)


def length_penalty(length: jax.Array, cfg: DecodeConfig) -> jax.Array:
    """Returns the divisor of a sum of log-probabilities: `length^alpha`, or GNMT's `((5 + length) / 6)^alpha`."""
    base = (5 + length) / 6 if cfg.length_penalty == "gnmt" else length
    return jnp.asarray(base, jnp.float32) ** cfg.length_alpha
