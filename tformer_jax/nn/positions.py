"""Where a token stands: vectors added to token embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.nn.parameters import named


def sinusoidal(positions: jax.Array, dim: int) -> jax.Array:
    """`PE(p, 2i) = sin(p / 10000^(2i/D))`, `PE(p, 2i+1) = cos(p / 10000^(2i/D))`: int [...] -> float32 [..., D].

    "Attention Is All You Need" (2017), section 3.5. Defined for every position: PE(p + k) is a rotation of PE(p).
    """
    rates = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    angles = positions[..., None].astype(jnp.float32) * rates.astype(np.float32)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, dim)


class Sinusoidal(nn.Module):
    """Fixed `sinusoidal` vectors."""

    cfg: ModelConfig

    def __call__(self, positions: jax.Array) -> jax.Array:
        """int [..., T] -> [..., T, D]."""
        return sinusoidal(positions, self.cfg.dim).astype(self.cfg.dtype)


class Learned(nn.Module):
    """One trained vector for each position below `cfg.max_length`."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        """int [..., T] -> [..., T, D]; NaN for a position that the table lacks.

        Raises:
            ConfigError: T exceeds `cfg.max_length`.
        """
        cfg = self.cfg
        if positions.shape[-1] > cfg.max_length:
            raise ConfigError(
                f"{positions.shape[-1]} positions do not fit model.max_length={cfg.max_length}; "
                "learned positions end there: shorten the input or raise it"
            )
        init = named(nn.initializers.normal(cfg.init_std), None, axes.EMBED)
        table = self.param("embedding", init, (cfg.max_length, cfg.dim), jnp.dtype(cfg.param_dtype))
        return table.at[positions].get(mode="fill").astype(cfg.dtype)


POSITIONS: dict[str, type[nn.Module]] = {"sinusoidal": Sinusoidal, "learned": Learned}


def make_positions(cfg: ModelConfig, name: str | None = None) -> nn.Module | None:
    """The module that `cfg.position` names; None for `none`."""
    kind = POSITIONS.get(cfg.position)
    return kind(cfg, name=name) if kind else None
