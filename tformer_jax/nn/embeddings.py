"""Token embeddings, input embeddings and output heads."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.nn.dropout import Dropout
from tformer_jax.nn.gathered import with_gathered
from tformer_jax.nn.linear import aligned_product, broadcast_like, kernel_initializer
from tformer_jax.nn.lookup import lookup
from tformer_jax.nn.module import Module
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.positions import make_positions
from tformer_jax.nn.sharding import constrain, mesh_axes, named
from tformer_jax.special_tokens import PAD


class TokenEmbedding(Module):
    """Table of one vector per token, [V, D], which a tied output head shares.

    Initialized with N(0, cfg.embedding_std^2). By default that is N(0, 1 / cfg.fixed_dim) under `xavier` and `fan_in`,
    so that scaled embeddings and tied logits both start near unit variance, and N(0, cfg.init_std^2) under `normal`.
    """

    cfg: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        cfg = self.cfg
        default = cfg.init_std if cfg.initializer == "normal" else cfg.fixed_dim**-0.5
        std = default if cfg.embedding_std is None else cfg.embedding_std
        init = named(nn.initializers.normal(std), axes.VOCAB, axes.EMBED)
        self.embedding = self.param("embedding", init, (self.vocab_size, cfg.dim), jnp.dtype(cfg.param_dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embeds int [B, T] -> [B, T, D], times sqrt(cfg.fixed_dim) if `cfg.scale_embeddings`.

        `cfg.embedding_multiplier` multiplies them, too.

        PAD is embedded as token 0. Another id outside [0, V) gives NaN, because compiled code cannot raise; the data
        pipeline checks ids on the host.

        Raises:
            UserError: tokens are no integers.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise UserError(f"tokens have the dtype {tokens.dtype}: token ids are integers, such as int32")
        tokens = jnp.where(tokens == PAD, 0, tokens)
        table, names = self.embedding.astype(jnp.float32), (axes.VOCAB, axes.EMBED)
        vectors = with_gathered(_vectors, tokens, table, names, dtype=self.embedding.dtype).astype(self.cfg.dtype)
        factor = self.cfg.embedding_multiplier * (math.sqrt(self.cfg.fixed_dim) if self.cfg.scale_embeddings else 1)
        return vectors if factor == 1 else vectors * factor

    def attend(self, x: jax.Array) -> jax.Array:
        """Computes the logits of a tied output head: [..., D] -> float32 [..., V]."""
        table = self.embedding.astype(self.cfg.gradient_dtype)
        return aligned_product(x, table, (axes.VOCAB, axes.EMBED), contracted=1, dtype=jnp.dtype(jnp.float32))


def _vectors(tokens: jax.Array, table: jax.Array) -> jax.Array:
    """Looks up rows of the table, with D unsharded; NaN for ids outside the table."""
    return lookup(constrain(table, axes.VOCAB, None), tokens)


class InputEmbedding(Module):
    """Adds position embeddings and token types to token embeddings, then applies the norm and dropout.

    In training, `cfg.token_dropout` zeroes the embeddings of random tokens first (word dropout, "Deep Unordered
    Composition Rivals Syntactic Methods for Text Classification", 2015, section 3.1).
    """

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.positions = make_positions(cfg)
        if cfg.token_types:
            init = named(nn.initializers.normal(cfg.init_std), None, axes.EMBED)
            self.types = self.param("types", init, (cfg.token_types, cfg.dim), jnp.dtype(cfg.param_dtype))
        self.norm = make_norm(cfg) if cfg.embedding_norm else None
        self.token_dropout = Dropout(cfg.token_dropout, whole_vectors=True)
        self.dropout = Dropout(cfg.dropout)

    def __call__(
        self,
        vectors: jax.Array,
        positions: jax.Array | None = None,
        types: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Adds positions and token types to vectors [B, T, D], then applies the norm and dropout: [B, T, D].

        `positions` int [B, T], or [B, 1] for all tokens of a row, default to 0, ..., T - 1, `types` int [B, T] to 0.
        """
        vectors = self.token_dropout(vectors, train=train)
        if self.positions is not None:
            positions = jnp.arange(vectors.shape[1]) if positions is None else positions
            if mesh_axes(axes.EMBED, self.cfg.dim):  # a lookup per row, whose gradient can be reduce-scattered
                positions = jnp.broadcast_to(positions, (vectors.shape[0], positions.shape[-1]))
            vectors = vectors + broadcast_like(self.positions(positions), vectors)
        if self.cfg.token_types:
            chosen = jnp.zeros((1, 1), jnp.int32) if types is None else types
            vectors = vectors + broadcast_like(lookup(self.types, chosen), vectors)
        if self.norm is not None:
            vectors = self.norm(vectors)
        return self.dropout(constrain(vectors, axes.BATCH, axes.LENGTH, None), train=train)


class OutputHead(Module):
    """Projects features to `size` float32 logits, with a tied embedding or a separate kernel."""

    cfg: ModelConfig
    axis: str
    size: int
    use_bias: bool

    @nn.compact
    def __call__(self, x: jax.Array, tied: TokenEmbedding | None = None) -> jax.Array:
        """Computes logits, [..., D] -> float32 [..., size].

        `cfg.scale_output` divides x by sqrt(cfg.fixed_dim), muP by `cfg.width_factor`, and `cfg.output_divisor` by
        itself; `cfg.output_softcap` soft-caps the logits.
        """
        cfg = self.cfg
        dtype, param_dtype = jnp.dtype(cfg.dtype), jnp.dtype(cfg.param_dtype)
        x = x.astype(dtype)
        if cfg.scale_output:
            x = x / math.sqrt(cfg.fixed_dim)
        divisor = cfg.width_factor * cfg.output_divisor
        x = x / divisor if divisor != 1 else x
        if tied is None:
            init = named(kernel_initializer(cfg, cfg.fixed_dim, self.size), axes.EMBED, self.axis)
            kernel = self.param("kernel", init, (cfg.dim, self.size), param_dtype)
            matrix = kernel.astype(cfg.gradient_dtype)
            logits = aligned_product(x, matrix, (axes.EMBED, self.axis), dtype=jnp.dtype(jnp.float32))
        else:
            logits = tied.attend(x)
        if self.use_bias:
            logits = logits + self.param("bias", named(nn.initializers.zeros, self.axis), (self.size,), param_dtype)
        if cfg.output_softcap is not None:
            logits = cfg.output_softcap * jnp.tanh(logits / cfg.output_softcap)
        lead = (axes.BATCH, axes.LENGTH)[: logits.ndim - 1]
        return constrain(logits, *lead, self.axis)
