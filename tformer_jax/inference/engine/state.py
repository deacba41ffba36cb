"""State of a lane on the device, and functions that read and update some of its rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax
import jax

from tformer_jax import axes
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import BeamState
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.decoding_state import DecodingState, SamplingState, prng_keys
from tformer_jax.inference.forced import ForcedTokens
from tformer_jax.inference.lookup import LookupState
from tformer_jax.inference.requests import TokenConstraints
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.nn.kv_cache import LayerCache
from tformer_jax.nn.sharding import constrain


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static configuration that a lane is compiled for."""

    model: Seq2Seq | DecoderLM
    """With unrolled layers."""
    decode: DecodeConfig
    constraints: Constraints
    rows: int
    pages: int
    page_size: int
    paged: bool
    """Whether rows share a pool of pages; otherwise the cache is dense, with contiguous slots for each row."""

    @property
    def length(self) -> int:
        """Maximum number of tokens per row, including the first input of a translation's decoder."""
        return self.model.cfg.max_length + 1

    @property
    def longest_input(self) -> int:
        """Maximum number of tokens of a source or prompt."""
        return self.model.cfg.max_length

    @property
    def history(self) -> int:
        """Number of tokens per row that are stored for the constraints and drafts."""
        return self.length if self.constraints.need_history or self.decode.lookup_tokens else 0

    @property
    def pages_per_row(self) -> int:
        """Maximum number of pages per row."""
        return -(-self.length * self.decode.width // self.page_size)


@flax.struct.dataclass
class State:
    """All arrays of a lane on the device."""

    cache: DecoderCache
    rows: DecodingState


@flax.struct.dataclass
class NewRows:
    """P rows to start; padding entries have the index `Plan.rows`."""

    indices: jax.Array
    """int32 [P]: indices of the rows in the lane."""
    last: jax.Array
    """int32 [P]: last token of each prompt."""
    counts: jax.Array
    """int32 [P]: number of tokens of each prompt."""
    history: jax.Array
    """int32 [P, L]: prompts, then PAD; L is 0 unless the constraints need earlier tokens."""
    max_new_tokens: jax.Array
    """int32 [P]: maximum number of tokens to generate."""
    seeds: jax.Array
    """uint32 [P, 2]: random seed, and the number that is folded into it."""
    scored: jax.Array
    """bool [P]: whether token log-probabilities are summed."""
    tables: jax.Array
    """int32 [P, pages per row]: page tables."""
    filled: jax.Array
    """int32 [P]: number of prompt tokens that are already in the row's pages."""
    settings: RowSettings
    forced: ForcedTokens
    phrases: Any
    """`constrained_beam.Phrases`; None without."""
    sources: jax.Array | None
    """int32 [P, S]: encoder inputs, PAD on the right; None without an encoder."""


class Size(NamedTuple):
    """Lengths of arrays that grow on demand."""

    source: int
    """Maximum number of source tokens."""
    output: int
    """Maximum number of generated tokens."""
    slots: int
    """Slots per row of a dense cache: without beams as many as `output`, for BOS and all tokens but the last."""
    forced: int
    """F of `ForcedTokens`."""


def constrain_state(plan: Plan, state: State) -> State:
    """Constrains the state to be sharded over the mesh by rows, and by key/value heads, if they divide evenly."""

    def rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain(x, axes.BATCH, *[None] * (x.ndim - 1)), tree)

    def layer(own: LayerCache) -> LayerCache:
        cross = own.cross_attention and own.cross_attention.constrained(axes.BATCH)
        return LayerCache(own.self_attention.constrained(None if plan.paged else axes.BATCH), cross)

    layers = tuple(map(layer, state.cache.layers))
    other = rows(dataclasses.replace(state.cache, layers=()))
    return State(dataclasses.replace(other, layers=layers), rows(state.rows))


def phrase_arrays(plan: Plan, rows: Sequence[TokenConstraints]) -> Any:
    """Returns the phrases of rows, as NumPy arrays; None if there are none in this lane."""
    if not any(plan.constraints.phrase_sizes):
        return None
    from tformer_jax.inference.constrained_beam import Phrases

    return Phrases.from_rows(rows, plan.constraints.phrase_sizes)


def initial_rows(plan: Plan, new: NewRows, length: int) -> DecodingState:
    """Returns the initial state of rows; `length` is the size of the token arrays of beam search."""
    rules: Any = (new.settings, plan.constraints)
    options: Any = {"history": new.history, "forced": new.forced}
    if plan.decode.strategy == "beam":
        kind: type[BeamState] = BeamState
        options |= {"length": length, "cfg": plan.decode}
        if new.phrases is not None:
            from tformer_jax.inference.constrained_beam import ConstrainedBeamState

            kind, options = ConstrainedBeamState, options | {"phrases": new.phrases}
        return kind.start(new.last, new.counts, new.max_new_tokens, *rules, **options)
    options |= {"scored": new.scored}
    rows = SamplingState.start(new.last, new.counts, new.max_new_tokens, prng_keys(new.seeds), *rules, **options)
    return LookupState.from_state(rows, plan.decode.lookup_tokens) if plan.decode.lookup_tokens else rows
