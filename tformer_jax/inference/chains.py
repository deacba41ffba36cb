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
        allowed = constrain(forbid(logits[:, 0]), self.history, self.counts, self.made, self.settings, self.rules)
        tokens = choose(allowed, self.settings, jax.vmap(jax.random.fold_in)(self.keys, self.made))
        goes_on = ~self.done
        rows, made = jnp.arange(tokens.shape[0]), self.made + goes_on
        place = jnp.where(goes_on, self.counts, self.history.shape[1])
        scores = self.scores
        if self.scored:
            chosen = jnp.take_along_axis(logits[:, 0], tokens[:, None], axis=1)[:, 0]
            scores = jnp.where(goes_on, scores + chosen - jax.nn.logsumexp(logits[:, 0], axis=1), scores)
        return dataclasses.replace(
            self,
            history=self.history.at[rows, place].set(tokens, mode="drop"),
            counts=self.counts + goes_on,
            made=made,
            done=self.done | (tokens == EOS) | (made >= self.room),
            scores=scores,
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
