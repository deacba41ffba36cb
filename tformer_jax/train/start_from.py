"""Initializes a run with the matching parameters of another run, for fine-tuning."""

import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from tformer_jax import axes, config
from tformer_jax.config import ConfigError, ModelConfig, TrainConfig
from tformer_jax.config.paths import resolved
from tformer_jax.data.tokenizers import Tokenizers, same_tokens
from tformer_jax.models import registry
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
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


def load_matching(params: Any, run: Path, group: ProcessGroup = SINGLE) -> tuple[Any, Report]:
    """Replaces each parameter by that of `run` with the same name and shape.

    Args:
        group: all processes that hold `params`.

    Raises:
        ConfigError: `run` holds no trained model, or no parameter matches.
    """
    other = load_trained(run, mesh_of(params), group).params
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


def check_tokenizers(train: TrainConfig, model: ModelConfig, tokenizers: Tokenizers, run: Path) -> str | None:
    """Returns a warning if `load_matching` loads embeddings or output heads of other tokens than those of `tokenizers`.

    Raises:
        ConfigError: LoRA freezes one of them.
    """
    names = _of_other_tokens(model, tokenizers, run)
    if not names:
        return None
    kept = [name for name in names if not any(fnmatch.fnmatch(name, glob) for glob in train.lora_whole)]
    other = "for other tokens than those of this run"
    remedy = f"set data.tokenizer='file' and data.tokenizer_file={str(resolved(run))!r}"
    if train.lora_rank and kept:
        raise train.error("start_from", f"{kept[0]} is {other}, and train.lora_rank freezes it: {remedy}")
    return f"{', '.join(names)} of {run} {'is' if len(names) == 1 else 'are'} {other}: {remedy}"


def _of_other_tokens(model: ModelConfig, tokenizers: Tokenizers, run: Path) -> list[str]:
    """Returns the names of the parameters along the vocabulary that match those of `run`, and have other tokens."""
    mine, theirs = map(_along_vocabulary, (model, config.load(run / "config.json").model))
    names = sorted(name for name, shape in mine.items() if theirs.get(name) == shape)
    if not names:
        return []
    others = Tokenizers.load(run / "tokenizers")
    same = {side: same_tokens(getattr(tokenizers, side), getattr(others, side)) for side in ("source", "target")}
    return [name for name in names if not same["source" if name.startswith("source_") else "target"]]


def _along_vocabulary(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that have the axis V, by name."""
    boxes = flatten_dict(registry.shapes(registry.build(model)), sep="/")
    return {name: box.value.shape for name, box in boxes.items() if axes.VOCAB in getattr(box, "names", ())}
