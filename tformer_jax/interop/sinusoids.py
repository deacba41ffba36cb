"""Tables of sinusoids in checkpoints, which transformers reads, and which say what the positions of a Marian are.

Those that transformers computes for a Marian, and that CTranslate2 computes for a model of Marian-NMT, have other
wavelengths than Marian-NMT's own: they end at 10000^(1 - 2 / D) times the first, and not at 10000 times.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import Architecture, Settings, check

NAMES = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))
MARIAN_NMT: Settings = {"position": "sinusoidal_fairseq", "position_offset": 0}
"""Our settings of Marian-NMT's positions."""
STEPS = {"sinusoidal_halves": 0, "sinusoidal_fairseq": 1}
"""By how much the number of steps between the first and the last wavelength is less than D / 2."""
TOLERANCE = 0.01
"""Largest difference of a table, which may be rounded to bfloat16."""


def read(arrays: Mapping[str, Any], settings: Settings) -> Settings:
    """Returns the settings of positions whose tables are among the arrays, given those that config.json implies.

    Raises:
        UserError: a table has other positions, or two tables have different ones.
    """
    position = settings["position"]
    tables = [name for name in arrays if name.endswith(("embed_positions.weight", "embed_positions.weights"))]
    if position not in STEPS or not tables:
        return {}
    theirs = {"position": position, "position_offset": settings.get("position_offset", 0)}
    for candidate in (theirs, *([MARIAN_NMT] if position == "sinusoidal_halves" else [])):
        if all(_fits(np.asarray(arrays[name], np.float32), candidate) for name in tables):
            return candidate if candidate is MARIAN_NMT else {}
    check(False, f"{tables[0]} has other positions than sinusoids, or than another table")
    return {}


def write(cfg: ModelConfig, architecture: Architecture) -> dict[str, np.ndarray]:
    """Returns the tables of Marian-NMT's positions, which a checkpoint needs."""
    given = {name: getattr(cfg, name) for name in MARIAN_NMT}
    if not architecture.stored_sinusoids or given != MARIAN_NMT:
        return {}
    return {name: table(cfg.max_length, cfg.dim, cfg.position) for name in NAMES}


def table(rows: int, dim: int, position: str) -> np.ndarray:
    """Returns the vectors of positions 0, 1, ...: float32 [rows, D], all sines first."""
    half = dim // 2
    angles = np.arange(rows)[:, None] / 10_000 ** (np.arange(half) / max(half - STEPS[position], 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _fits(given: np.ndarray, settings: Settings) -> bool:
    """Returns whether a table has the positions of our settings; rows before the first position are not read."""
    first, (rows, dim) = settings["position_offset"], given.shape
    expected = table(rows, dim, settings["position"])
    return bool(np.abs(given - expected)[first:].max(initial=0) < TOLERANCE)
