"""What must be known of an architecture of Hugging Face's to read and write its checkpoints."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.interop.mapping import Rule

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of checkpoint, by its `model_type`."""

    name: str
    """Their class."""
    settings: Callable[[dict[str, Any]], dict[str, Any]]
    """Their config.json -> our settings, but for what the arrays tell: whether the output head is tied."""
    config: Callable[[ModelConfig], dict[str, Any]]
    """Our settings -> their config.json."""
    rules: Callable[[ModelConfig], tuple[Rule, ...]]
    ignored: tuple[str, ...] = ()
    """Patterns of their arrays that are not read: buffers, and heads of other tasks."""
    prefix: str = ""
    """What stands before the names of the base model, which checkpoints of the base model alone leave out."""
    shared: str = ""
    """Their token embedding, of which other arrays may be copies."""
    copies: tuple[str, ...] = ()
    """Their arrays that must equal `shared`, where they are present."""


def activation(name: str) -> str:
    """Our name of their activation."""
    check(name in ACTIVATIONS, f"activation {name!r} is not here; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def written(name: str) -> str:
    """Their name of our activation."""
    return next((theirs for theirs, ours in reversed(ACTIVATIONS.items()) if ours == name), name)


def check(fits: bool, problem: str) -> None:
    """Raises `ConfigError` where a checkpoint wants something that our models lack."""
    if not fits:
        raise ConfigError(f"this checkpoint cannot be read: {problem}")


def refuse(hf: dict[str, Any], **known: Any) -> None:
    """Raises `ConfigError` where a setting of theirs has another value than the one that is known."""
    for name, value in known.items():
        given = hf.get(name)
        check(given is None or given == value, f"{name}={given!r} is not supported, only {value!r} is")


def pattern_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that, repeated, gives `kinds`."""
    for period in range(1, len(kinds) + 1):
        if all(kind == kinds[place % period] for place, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return ("full",)
