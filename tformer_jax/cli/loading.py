"""Loads the trained model of a command."""

from pathlib import Path

from tformer_jax.config import ConfigError, read_mesh
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train.trained import Trained, load_trained

COMMANDS = {"seq2seq": "translate.py", "decoder_lm": "generate.py", "classifier": "classify.py"}
"""Script for a model, by its family."""


def load(run: Path, *families: str, mesh: str | None = None) -> Trained:
    """Loads the trained model of a run on the mesh given by `--mesh` (None: on the first device).

    Raises:
        ConfigError: the folder is not a run folder, its model is of another family, or the mesh does not fit it.
    """
    placed = None if mesh is None else make_mesh(read_mesh(mesh))
    trained = load_trained(run, placed)
    if placed is not None:
        rules.check(trained.cfg, placed.shape)
    kind = trained.cfg.model.family
    if kind not in families:
        raise ConfigError(f"{run} holds a {kind} model: use scripts/{COMMANDS[kind]}")
    return trained
