"""Initializes a run with the matching parameters of another run, for fine-tuning."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from tformer_jax.config import ConfigError
from tformer_jax.parallel.placement import mesh_of
from tformer_jax.train.optimizers import parameter_names
from tformer_jax.train.trained import load_trained


@dataclasses.dataclass(frozen=True)
class Report:
    """Names of the parameters that were loaded, and of those that were not."""

    loaded: tuple[str, ...]
    other_shape: tuple[str, ...]
    """Present with another shape, as `NAME (16, 8), not (32, 8)`: newly initialized."""
    missing: tuple[str, ...]
    """Only in the new model: newly initialized."""
    unused: tuple[str, ...]
    """Only in the other run."""

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} parameters loaded"]
        for title, names in (
            ("of another shape, newly initialized", self.other_shape),
            ("not there, newly initialized", self.missing),
            ("not used", self.unused),
        ):
            if names:
                shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                parts.append(f"{len(names)} {title}: {shown}")
        return "; ".join(parts)


def load_matching(params: Any, run: Path) -> tuple[Any, Report]:
    """Replaces each parameter by that of `run` with the same name and shape.

    Raises:
        ConfigError: `run` holds no trained model, or no parameter matches.
    """
    other = load_trained(run, mesh_of(params)).params
    known = dict(zip(jax.tree.leaves(parameter_names(other)), jax.tree.leaves(other), strict=True))
    leaves, tree = jax.tree.flatten(params)
    names = jax.tree.leaves(parameter_names(params))
    loaded, other_shape, missing = [], [], []
    for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        found = known.get(name)
        if found is None:
            missing.append(name)
        elif found.shape != leaf.shape:
            other_shape.append(f"{name} {found.shape}, not {leaf.shape}")
        else:
            loaded.append(name)
            leaves[index] = jax.device_put(found.astype(leaf.dtype), leaf.sharding)
    report = Report(tuple(loaded), tuple(other_shape), tuple(missing), tuple(sorted(known.keys() - set(names))))
    if not loaded:
        raise ConfigError(f"train.start_from={str(run)!r}: no parameter fits this model ({report})")
    return jax.tree.unflatten(tree, leaves), report
