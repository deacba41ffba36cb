"""Encoder and decoder stacks: layers, and the norm that may follow them."""

import dataclasses
from typing import Any

import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.nn.attention_positions import make_attention_positions
from tformer_jax.nn.decoder_cache import DecoderCache, mask_kinds
from tformer_jax.nn.kv_cache import TokenCache
from tformer_jax.nn.layers import LayerContext, TransformerLayer
from tformer_jax.nn.linear import LOW_RANK
from tformer_jax.nn.masks import Mask, check_padding_mask, lookahead_mask
from tformer_jax.nn.module import WATCHED, check_vectors, watch
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.positions import token_positions
from tformer_jax.nn.slots import BeamAncestry, Tokens


def make_layer(cfg: ModelConfig, number: int, *, cross: bool, bidirectional: bool) -> TransformerLayer:
    """Builds layer `number` of a stack, counted from 0."""
    kind = cfg.layer_pattern[number % len(cfg.layer_pattern)]
    return TransformerLayer(cfg, cross, kind, cfg.has_experts(number), bidirectional, cfg.first_norm or number > 0)


class Period(nn.Module):
    """`cfg.period` layers, after which the kinds of layers repeat."""

    cfg: ModelConfig
    cross: bool
    bidirectional: bool

    def setup(self) -> None:
        options = {"cross": self.cross, "bidirectional": self.bidirectional}
        self.layers = [make_layer(self.cfg, number, **options) for number in range(self.cfg.period)]


class Stack(nn.Module):
    """`depth` layers whose kinds repeat after `cfg.period`, as a loop or as a scan over the repetitions.

    In a scan, the layers of one repetition are `periods/layers_0`, ..., with each parameter stacked over repetitions
    along its first axis; remaining layers follow as a loop, named by their number as without a scan.
    `conversions.convert_layers` converts between the two. With `cfg.shared_layers`, the first layer is used `depth`
    times ("ALBERT", 2019).
    """

    cfg: ModelConfig
    depth: int
    cross: bool = False
    bidirectional: bool = False

    def setup(self) -> None:
        cfg, period = self.cfg, self.cfg.period
        self.repetitions = self.depth // period if cfg.scan_layers else 0
        if self.repetitions:
            self.periods = Period(cfg, self.cross, self.bidirectional)
        remaining = range(self.repetitions * period, 1 if cfg.shared_layers else self.depth)
        options = {"cross": self.cross, "bidirectional": self.bidirectional}
        self.layers = {str(number): make_layer(cfg, number, **options) for number in remaining}
        self.attention_positions = (
            None if cfg.relative.by_layer else make_attention_positions(cfg, bidirectional=self.bidirectional)
        )
        self.norm = make_norm(cfg) if cfg.has_final_norm else None

    def position_fields(self, positions: jax.Array) -> dict[str, Any]:
        """Returns the fields of `LayerContext` by which attention uses positions int [B or 1, T]."""
        if self.cfg.relative.by_layer:
            return {"token_positions": positions}
        own, kinds = self.attention_positions, mask_kinds(self.cfg)
        return {"positions": {} if own is None else {kind: own(positions, window=kind == "window") for kind in kinds}}

    def masks(self, mask: Mask) -> dict[str, Mask]:
        """Returns the masks by `mask_kind`; "window" layers attend to positions less than `cfg.window` away."""
        return {"full": mask, "window": dataclasses.replace(mask, window=self.cfg.window)}

    def full_pass(self, x: jax.Array, ctx: LayerContext, *, train: bool) -> jax.Array:
        """Applies all layers, [B, T, D] -> [B, T, D]; `cfg.remat` selects what is stored for the backward pass."""

        def apply(layer: TransformerLayer, x: jax.Array, ctx: LayerContext) -> jax.Array:
            result: jax.Array = layer(x, ctx, train=train)[0]
            return result

        if self.cfg.remat != "none":
            policy = getattr(jax.checkpoint_policies, self.cfg.remat)
            # CSE does not occur across the steps of a scan
            apply_in_scan = nn.remat(apply, policy=policy, prevent_cse=False)
            apply = nn.remat(apply, policy=policy)
        else:
            apply_in_scan = apply

        def repeat(period: Period, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, None]:
            for layer in period.layers:
                x = apply_in_scan(layer, x, ctx)
            return x, None

        if self.repetitions:
            scan = nn.scan(
                repeat,
                variable_axes={"params": 0, LOW_RANK: 0, "losses": 0, WATCHED: 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.repetitions,
                metadata_params={nn.PARTITION_NAME: axes.LAYERS},
            )
            x, _ = scan(self.periods, x, ctx)
        for layer in [*self.layers.values()] * (self.depth if self.cfg.shared_layers else 1):
            x = apply(layer, x, ctx)
        return self.finish(x)

    def finish(self, x: jax.Array) -> jax.Array:
        """Applies the norm that follows the layers, if there is one, to the residual stream [B, T, D]."""
        watch(self, stream=x)
        return self.norm(x) if self.norm else x


class Encoder(Stack):
    """Stack with bidirectional attention, to at most `cfg.lookahead` later tokens."""

    bidirectional: bool = True

    def __call__(
        self,
        x: jax.Array,
        padding_mask: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Encodes x [B, S, D] -> [B, S, D].

        Args:
            padding_mask: bool [B, S], True for tokens that are not padding; None: all.
            segments: int [B, S], segment ids of documents packed into a row; tokens attend to their own document.

        Raises:
            UserError: x is not [B, S, D], or the padding mask not bool [B, S].
        """
        check_vectors("x", x, self.cfg.dim)
        check_padding_mask("padding_mask", padding_mask, x.shape[:2])
        S, lookahead = x.shape[1], self.cfg.lookahead
        mask = Mask(
            padding_mask=padding_mask,
            segments=None if segments is None else (segments, segments),
            explicit=None if lookahead is None else lookahead_mask(S, lookahead),
            self_attention=True,
        )
        ctx = LayerContext(
            masks=self.masks(mask),
            padding_mask=padding_mask,
            segments=segments,
            **self.position_fields(token_positions(S, segments)),
        )
        return self.full_pass(x, ctx, train=train)


class Decoder(Stack):
    """Stack with causal self-attention, and cross-attention if `cross`."""

    def __call__(
        self,
        x: jax.Array,
        padding_mask: jax.Array | None = None,
        memory: jax.Array | None = None,
        memory_padding_mask: jax.Array | None = None,
        *,
        prefix: jax.Array | None = None,
        segments: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Applies all layers: x [B, T, D], memory [B, S, D] -> [B, T, D].

        Args:
            padding_mask, memory_padding_mask: bool [B, T] and [B, S], True for tokens that are not padding; None: all.
                Padding of x must be at the end of each row.
            prefix: int [B], number of leading tokens that all tokens of the row may attend to.
            segments, memory_segments: int [B, T] and [B, S], segment ids of documents packed into a row; self- and
                cross-attention stay within a document.

        Raises:
            UserError: x is not [B, T, D]; `memory` is given without `cross`, or missing with it; a padding mask is not
                bool [B, length]; or with `cross`, only one of `segments` and `memory_segments` is given.
        """
        if self.cross != (memory is not None):
            needed = "needs memory, the output of an encoder" if self.cross else "has no cross-attention to memory"
            raise UserError(f"Decoder(cross={self.cross}) {needed}")
        check_vectors("x", x, self.cfg.dim)
        check_padding_mask("padding_mask", padding_mask, x.shape[:2])
        if memory is not None:
            check_padding_mask("memory_padding_mask", memory_padding_mask, memory.shape[:2])
        if self.cross and (segments is None) != (memory_segments is None):
            raise UserError(
                "packed rows need segments of both source and target: with only one of them, "
                "cross-attention would attend to other pairs; pass both or neither"
            )
        mask = Mask(
            padding_mask=padding_mask,
            segments=None if segments is None else (segments, segments),
            prefix=prefix,
            causal=True,
            self_attention=True,
            padding_last=True,
        )
        cross_segments = None if segments is None or memory_segments is None else (segments, memory_segments)
        ctx = LayerContext(
            masks=self.masks(mask),
            padding_mask=padding_mask,
            segments=segments,
            **self.position_fields(token_positions(x.shape[1], segments)),
            memory=memory,
            cross_mask=Mask(padding_mask=memory_padding_mask, segments=cross_segments),
        )
        return self.full_pass(x, ctx, train=train)

    def step(
        self,
        x: jax.Array,
        cache: DecoderCache,
        *,
        padding_mask: jax.Array,
        positions: jax.Array,
        attended: dict[str, Tokens],
        ancestry: BeamAncestry | None = None,
    ) -> tuple[jax.Array, DecoderCache]:
        """Continues from `cache`, which has allocated slots for the tokens: x [B, T, D] -> [B, T, D].

        Args:
            padding_mask: bool [B, T], True for tokens that are not padding.
            positions, attended: results of `cache.allocate`.
            ancestry: the ancestors that each token may attend to, if the tokens are beams.

        Raises:
            UserError: the layers are scanned.
        """
        self._check_unrolled()

        def mask(keys: Tokens) -> Mask:
            explicit = None if ancestry is None else ancestry.may_attend(keys)
            return Mask(explicit=explicit, prefix=cache.prefix, positions=(positions, keys.positions), causal=True)

        ctx = LayerContext(
            masks={kind: self.masks(mask(keys))[kind] for kind, keys in attended.items()},
            padding_mask=padding_mask,
            **self.position_fields(positions),
            cross_mask=Mask(padding_mask=cache.memory_padding_mask),
            slots=cache.slots,
            parents=None if ancestry is None else ancestry.parents(positions),
        )
        layer_caches: list[Any] = []
        for layer, layer_cache in zip(self.layers.values(), cache.layers, strict=True):
            x, written = layer(x, ctx, layer_cache)
            layer_caches.append(written)
        x = self.finish(x)
        slots = {kind: layout.end_call() for kind, layout in cache.slots.items()}
        return x, dataclasses.replace(cache, layers=tuple(layer_caches), slots=slots)

    def cross_keys_values(self, memory: jax.Array) -> tuple[TokenCache, ...]:
        """Computes the cross-attention keys and values of each layer from memory [B, S, D].

        The barrier fixes their memory layout here, once: XLA would convert it again in every step of a decoding loop.

        Raises:
            UserError: the layers are scanned.
        """
        self._check_unrolled()
        result: tuple[TokenCache, ...] = jax.lax.optimization_barrier(
            tuple(layer.cross_attention.keys_values(memory) for layer in self.layers.values())
        )
        return result

    def _check_unrolled(self) -> None:
        if self.repetitions:
            raise UserError(
                "model.scan_layers=True: decoding needs unrolled layers; call `inference.layout.unroll_layers` first"
            )
