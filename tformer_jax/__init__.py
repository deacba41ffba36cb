"""Transformers in JAX and Flax: translation, language models and classification driven by configs.

In Python, `train` trains a config on data of one's own, `load` opens a run, and `help("model.rotary")` explains
settings; `configs`, `models`, `nn`, `batches`, `train_step` and `save_run` are the parts for loops of one's own.
"""

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

__version__ = "0.1.0"
_CONFIG, _PARTS = "tformer_jax.config", "tformer_jax.notebook.parts"
_MODULES = {
    **dict.fromkeys(("Chat", "Request", "Run", "load"), "tformer_jax.api"),
    **dict.fromkeys(("Config", "ModelConfig", "DataConfig", "OptimConfig", "TrainConfig"), _CONFIG),
    **dict.fromkeys(("DecodeConfig", "EvalConfig", "EmbedConfig", "ParallelConfig"), _CONFIG),
    **dict.fromkeys(("batches", "init_state", "save_run", "train_step"), _PARTS),
    "configs": "tformer_jax.notebook.configs",
    "export": "tformer_jax.notebook.exports",
    "help": "tformer_jax.notebook.configs",
    "models": "tformer_jax.models",
    "nn": "tformer_jax.nn",
    "train": "tformer_jax.train",
}


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package.

    Args:
        modules: the module of each name; a name is the module itself if the last part of its path is the name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules))}")
        module = importlib.import_module(modules[name])
        return module if modules[name].rpartition(".")[2] == name else getattr(module, name)

    return get, lambda: sorted(modules)


class CallablePackage(types.ModuleType):
    """The package `train`, which is also the function `tformer_jax.notebook.training.train`."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(importlib.import_module("tformer_jax.notebook.training").train)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("tformer_jax.notebook.training").train(*args, **options)


__getattr__, _names = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    """Returns the names that are imported when they are used, without importing them."""
    return ["__version__", *_names()]
