"""Writes the sharding of each parameter on eight devices, for each mesh preset: `python -m tests.programs.shardings`.

tests/parallel/test_shardings.py compares the actual shardings with shardings.json, so changed rules are noticed.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax

from tests.parallel.test_presets import MODELS, PRESETS, config
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import optimizers, state

PATH = Path(__file__).with_suffix(".json")
DEVICES = 8


def snapshot(kind: str) -> dict[str, dict[str, str]]:
    """Returns the shape and `PartitionSpec` of each parameter, and that of its moments if it differs."""
    rows: dict[str, dict[str, str]] = {}
    for preset in PRESETS:
        initial = _state(kind, preset)
        for (path, leaf), moment in zip(
            jax.tree_util.tree_leaves_with_path(initial.params), _moments(initial.opt_state), strict=True
        ):
            row = rows.setdefault("/".join(str(key.key) for key in path), {"shape": str(leaf.shape)})
            row[preset] = _text(leaf)
            if _text(moment) != _text(leaf):
                row[f"{preset}, moments"] = _text(moment)
    return rows


def _state(kind: str, preset: str) -> state.TrainState:
    cfg = config(kind, preset=preset)
    model = registry.build(cfg.model)
    mesh = make_mesh(cfg.parallel, jax.devices()[:DEVICES])
    return state.abstract(model, optimizers.build(cfg, registry.shapes(model)), cfg, mesh)


def _moments(opt_state: Any) -> list[Any]:
    """Returns Adam's first moments."""
    paths = jax.tree_util.tree_leaves_with_path(opt_state)
    return [leaf for path, leaf in paths if jax.tree_util.GetAttrKey("mu") in path]


def _text(leaf: Any) -> str:
    return ", ".join("+".join(axis) if isinstance(axis, tuple) else axis or "-" for axis in leaf.sharding.spec)


def text() -> str:
    """Returns a line for each parameter of each model."""
    models = []
    for kind in MODELS:
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in snapshot(kind).items())
        models.append(f" {json.dumps(kind)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(models) + "\n}\n"


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    PATH.write_text(text(), encoding="utf-8")
