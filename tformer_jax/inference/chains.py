"""Greedy decoding and sampling: one output a row, one token after the other."""

import dataclasses

import flax
import jax
import jax.numpy as jnp

from tformer_jax.inference.constraints import Rules, constrain
from tformer_jax.inference.rows import Report
from tformer_jax.inference.sampling import RowSettings, choose, forbid
from tformer_jax.special_tokens import EOS, PAD


@flax.struct.dataclass
class Chains:
    """Rows that go on from the token they chose last; see `rows.Rows`."""

    history: jax.Array
    """int32 [B, L]: the tokens that count for `rules`, then PAD. The chosen ones are the last of them."""
    counts: jax.Array
    """int32 [B]: tokens in `history`."""
    made: jax.Array
    """int32 [B]: tokens that were chosen."""
    room: jax.Array
    """int32 [B]: the most that are."""
    done: jax.Array
    """bool [B]."""
    scores: jax.Array
    """float32 [B]: the sum of the chosen tokens' log-probabilities, where `scored`."""
    keys: jax.Array
    """[B] PRNG keys; greedy choice ignores them."""
    settings: RowSettings
    rules: Rules = flax.struct.field(pytree_node=False)
    scored: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def start(
        cls,
        prompt: jax.Array,
        room: jax.Array,
        keys: jax.Array,
        settings: RowSettings,
        rules: Rules,
        *,
        length: int,
        scored: bool = False,
    ) -> "Chains":
        """Rows that have chosen nothing yet.

        Args:
            prompt: int32 [B, P], P > 0, PAD on the left; it counts for `rules`.
            room: int32 [B], the most tokens that are chosen; 0 for a row that only fills up the batch.
            length: at least the largest room.
        """
        counts = (prompt != PAD).sum(axis=1, dtype=jnp.int32)
        aligned = jax.vmap(jnp.roll)(prompt, counts)
        nothing = jnp.zeros_like(counts)
        return cls(
            history=jnp.pad(aligned, ((0, 0), (0, length)), constant_values=PAD),
            counts=counts,
            made=nothing,
            room=room,
            done=room <= 0,
            scores=jnp.zeros(counts.shape),
            keys=keys,
            settings=settings,
            rules=rules,
            scored=scored,
        )

    def reading(self) -> tuple[jax.Array, None]:
        """The tokens chosen last: int32 [B, 1]."""
        return jnp.where(self.done, PAD, self._last())[:, None], None

    def advance(self, logits: jax.Array) -> "Chains":
        """One more token in each row that is not done: logits float32 [B, 1, V]."""
        tokens = choose(self.allowed(logits[:, 0]), self.settings, jax.vmap(jax.random.fold_in)(self.keys, self.made))
        scores = self.scores
        if self.scored:
            scores = jnp.where(self.done, scores, scores + log_probabilities(logits, tokens[:, None])[:, 0])
        return dataclasses.replace(self.extended(tokens[:, None], ~self.done), scores=scores)

    def allowed(self, logits: jax.Array, ahead: jax.Array | int = 0) -> jax.Array:
        """Logits of what the rules allow after `ahead` more tokens of the history: float32 [B, V] -> [B, V]."""
        counts, made = self.counts + ahead, self.made + ahead
        return constrain(forbid(logits), self.history, counts, made, self.settings, self.rules)

    def extended(self, tokens: jax.Array, many: jax.Array) -> "Chains":
        """With the first `many` (int [B]; 0 for rows that are done) of more tokens, int32 [B, T]."""
        columns = jnp.arange(tokens.shape[1])
        real = columns < many[:, None]
        places = jnp.where(real, self.counts[:, None] + columns, self.history.shape[1])
        made = self.made + many
        return dataclasses.replace(
            self,
            history=self.history.at[jnp.arange(len(tokens))[:, None], places].set(tokens, mode="drop"),
            counts=self.counts + many,
            made=made,
            done=self.done | (real & (tokens == EOS)).any(axis=1) | (made >= self.room),
        )

    def ended(self, rows: jax.Array) -> "Chains":
        """See `rows.Rows`."""
        return dataclasses.replace(self, done=self.done | rows)

    @property
    def length(self) -> int:
        """See `rows.Rows`."""
        return self.history.shape[1]

    def widened(self, length: int) -> "Chains":
        """See `rows.Rows`; the room for a history is there from the start."""
        return self

    def report(self) -> Report:
        """See `rows.Rows`."""
        return Report(self._last(), self.scores, self.done)

    def outputs(self, length: int) -> jax.Array:
        """int32 [B, length]: the chosen tokens, up to and including EOS, then PAD."""
        places = (self.counts - self.made)[:, None] + jnp.arange(length)
        return jnp.take_along_axis(jnp.pad(self.history, ((0, 0), (0, length)), constant_values=PAD), places, axis=1)

    def _last(self) -> jax.Array:
        """int32 [B]."""
        return jnp.take_along_axis(self.history, jnp.maximum(self.counts - 1, 0)[:, None], axis=1)[:, 0]


def log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Those of tokens int [B, T] by logits [B, T, V]: float32 [B, T]."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
