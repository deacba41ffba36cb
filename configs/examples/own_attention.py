"""Changes attention: a gate for each head, trained beside the usual one: python configs/examples/own_attention.py

Needs no files and no network; flags such as --config.train.steps=100 change settings.
"""

import sys
from pathlib import Path

import jax
from flax import linen as nn

import tformer_jax as tj
from tformer_jax import axes
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import kinds
from tformer_jax.nn import sharding
from tformer_jax.nn.attention import Attention


class WeightedHeads(Attention):
    """Multiplies the output of each head by a learned number, which starts at 1."""

    def setup(self) -> None:
        """Creates the parameter next to those of the projections."""
        super().setup()
        self.head_weights = self.param(
            "head_weights", sharding.named(nn.initializers.ones, axes.HEADS), (self.cfg.num_heads,)
        )

    def transform_heads(self, heads: jax.Array, x: jax.Array) -> jax.Array:
        """Changes what the heads return for x [B, T, D]: heads [B, T, N, H] -> [B, T, N, H]."""
        return heads * self.head_weights[:, None].astype(heads.dtype)


kinds.ATTENTIONS["weighted_heads"] = WeightedHeads


def main(runs: Path, *changes: str) -> None:
    """Trains both attentions in the folder `runs`, and prints their losses and the weights of the heads."""
    for attention in ("multi_head", "weighted_heads"):
        flags = ["--import", "own_attention", f"--config.model.attention={attention}", *changes]
        run = tj.train(read_config("translate_cldr", flags), run=runs / f"attention_{attention}", overwrite=True)
        print(f"{attention}: loss {run.history['test/loss'][-1]:.4f} on the test split")
    for path, value in jax.tree_util.tree_leaves_with_path(run.params):
        if "head_weights" in (name := jax.tree_util.keystr(path, simple=True, separator="/")):
            print(name, value.round(2))


if __name__ == "__main__":
    main(Path("runs"), *sys.argv[1:])
