"""Base class of encoder-only models: token embeddings and an encoder."""

import dataclasses

import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.models.family import Family
from tformer_jax.nn.embeddings import InputEmbedding, TokenEmbedding
from tformer_jax.nn.linear import Linear
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.padding import PaddingLast
from tformer_jax.nn.stacks import Encoder


class TokenEncoder(Family, nn.Module):
    """Base of models that encode tokens; their parameters have the same names, so that one can start from another."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg, narrow = self.cfg, self.cfg
        if cfg.embedding_dim:
            narrow = dataclasses.replace(cfg, dim=cfg.embedding_dim, head_dim=cfg.head_size, embedding_dim=None)
            self.projection = Linear(cfg, ((axes.MLP, narrow.dim),), ((axes.EMBED, cfg.dim),), use_bias=True)
        self.embedding = TokenEmbedding(narrow, cfg.size("vocab_size"))
        self.input = InputEmbedding(narrow)
        self.encoder = Encoder(cfg, cfg.encoder_layers)
        if cfg.head_transform:
            embed, hidden = ((axes.EMBED, cfg.dim),), ((axes.MLP, narrow.dim),)
            self.transform = Linear(self.cfg, embed, hidden, use_bias=self.cfg.transform_bias)
            self.transform_norm = make_norm(self.cfg)
        self.head_cfg = narrow if cfg.head_transform else cfg
        """The config with the width of the output head's input as `dim`."""

    def transformed(self, x: jax.Array) -> jax.Array:
        """Returns features [..., D] as the output head reads them, after `cfg.head_transform`."""
        if not self.cfg.head_transform:
            return x
        activation = kinds.load(kinds.ACTIVATIONS, self.cfg.head_activation)
        return self.transform_norm(activation(self.transform(x)))

    def features(
        self,
        tokens: jax.Array,
        padding_mask: jax.Array | None = None,
        *,
        types: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Encodes tokens int [B, S] -> [B, S, D].

        Args:
            padding_mask: bool [B, S], True for tokens that are not padding; None: all. Padding has no position.
            types: int [B, S], token types (such as first or second sentence), if `cfg.token_types` is not 0; None: 0.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        rows = PaddingLast(padding_mask, right_padded=right_padded)
        tokens, padding_mask, types = rows.sort(tokens), rows.sort(padding_mask), rows.sort(types)
        x = self.input(self.embedding(tokens), types=types, train=train)
        x = self.projection(x) if self.cfg.embedding_dim else x
        return rows.restore(self.encoder(x, padding_mask, train=train))
