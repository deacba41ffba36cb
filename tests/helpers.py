"""Small models, random parameters and comparisons that many tests use."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from tformer_jax.config import Config, ModelConfig, ParallelConfig
from tformer_jax.models import conversions, registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.parallel.placement import mesh_of
from tformer_jax.runs.start_from import load_matching
from tformer_jax.tasks.evaluators.evaluation import Evaluation
from tformer_jax.tasks.evaluators.scores import measure_texts, score_rows, text_metrics

TINY: dict[str, Any] = {
    "dim": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_heads": 4,
    "ffn_dim": 12,
    "vocab_size": 11,
    "max_length": 16,
    "dropout": 0.0,
}


def tiny(family: str, **changes: Any) -> ModelConfig:
    """Returns the config of a model with a few hundred parameters."""
    sizes = {"seq2seq": {"source_vocab_size": 11}, "classifier": {"num_classes": 3}}.get(family, {})
    return ModelConfig(**with_own_stacks(family, {**TINY, "family": family, **sizes, **changes}))


def with_own_stacks(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings without the depths of stacks that a family does not have."""
    missing = {"seq2seq": (), "decoder_lm": ("encoder_layers",)}.get(family, ("decoder_layers",))
    return {name: value for name, value in settings.items() if name not in missing}


def randomized(shapes: Any, seed: int = 0, scale: float = 0.5) -> Any:
    """Draws parameters of the given shapes from N(0, scale^2), so that no bias is zero and no norm is the identity."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype), nn.unbox(shapes))


def load_into(fresh: Any, model: ModelConfig, run: Path, group: ProcessGroup = SINGLE, **of_run: Any) -> Any:
    """Calls `load_matching` with `fresh` as the new parameters, on their mesh."""
    every = flatten_dict(conversions.unrolled(model, fresh)[1], sep="/")
    mesh = mesh_of(fresh) or make_mesh(ParallelConfig(data=1), jax.local_devices()[:1])
    return load_matching(lambda names: {name: every[name] for name in names}, model, run, mesh, group, **of_run)


def build(cfg: ModelConfig, seed: int = 0, scale: float = 0.5) -> tuple[Any, Any]:
    """Returns a model and random parameters for it."""
    model = registry.build(cfg)
    return model, randomized(registry.shapes(model), seed, scale)


def init_module(module: Any, *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """Returns random parameters of any module."""
    return randomized(shapes_of(module, *arguments, **options), seed)


def shapes_of(module: Any, *arguments: Any, **options: Any) -> Any:
    """Returns the parameter shapes of any module, boxed with their logical axis names."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *arguments, **options))["params"]


def apply(module: Any, params: Any, *arguments: Any, **options: Any) -> Any:
    """Calls `module.apply` under `jit`."""
    return jax.jit(lambda params, arguments: module.apply({"params": params}, *arguments, **options))(params, arguments)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Draws float32 values from N(0, 1)."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@contextlib.contextmanager
def on_platform(name: str) -> Iterator[None]:
    """Context in which programs are traced for a device of the given platform."""
    device = jax.sharding.AbstractDevice(device_kind=name, num_cores=None, platform=name)
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def equations(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """Yields the equations of one primitive in a jaxpr, inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, primitive)


def slope(function: Any, x: Any, step: float = 1e-5) -> np.ndarray:
    """Returns the gradient of a scalar function of one float64 array, by central differences."""
    x = np.array(x, np.float64)
    actual = np.empty_like(x)
    for at in np.ndindex(x.shape):
        here = x[at]
        x[at] = here + step
        above = function(x)
        x[at] = here - step
        actual[at] = (above - function(x)) / (2 * step)
        x[at] = here
    return actual


def rest_slow(cases: Any, fast: int) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`, all but the first ones marked as slow.

    The cases of a dictionary are named by its keys.
    """
    named = cases.items() if isinstance(cases, dict) else ((None, case) for case in cases)
    return [
        pytest.param(case, id=name, marks=() if number < fast else pytest.mark.slow)
        for number, (name, case) in enumerate(named)
    ]


EQUIVALENCES: dict[tuple[str, str], float] = {}
"""(option, oracle) -> largest difference so far; `tests.programs.equivalences` writes it."""


def assert_close(
    actual: Any, expected: Any, tolerance: float = 1e-5, *, proves: tuple[str | list[str], str] | None = None
) -> None:
    """Asserts that the largest difference is at most `tolerance` times the largest expected value (or 1).

    `proves` names the option (or options) and the oracle, for the table of equivalences.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all()
    scale = max(np.abs(expected).max(initial=0), 1)
    difference = np.abs(actual - expected).max(initial=0) / scale
    assert difference <= tolerance, f"relative difference {difference:.2e} exceeds {tolerance:.0e}"
    if proves is not None:
        options, oracle = proves
        for option in [options] if isinstance(options, str) else options:
            EQUIVALENCES[option, oracle] = max(EQUIVALENCES.get((option, oracle), 0.0), float(difference))


def with_settings(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns a copy of the config with some settings changed."""
    return dataclasses.replace(cfg, **changes)


def score_texts(outputs, references, cfg: Config, language: str) -> Evaluation:
    """Returns BLEU, chrF, exact match and the metrics of a config of outputs in a language."""
    metrics, sources = text_metrics(cfg, language), [""] * len(outputs)
    rows = measure_texts({language: metrics}, [language] * len(outputs), sources, outputs, references)
    return score_rows(rows, metrics, references)
