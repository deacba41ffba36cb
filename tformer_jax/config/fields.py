"""Declares and validates settings: one `setting(...)` line gives the default, meaning and allowed values."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any, ClassVar


class ConfigError(ValueError):
    """A setting is invalid; the message says which one, why, and what to write instead."""


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Collection[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """Declares one setting of a `Section`.

    Args:
        default: value if a config file does not set it.
        meaning: one line of help, with the unit if there is one.
        choices: allowed values, for a tuple of each member; None: any value of the annotated type.
        low, high: smallest and largest allowed number, both inclusive.
    """
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "choices": choices, "low": low, "high": high}
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: `; did you mean 'x'?`, or the known names if none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def allowed_types(annotation: Any) -> tuple[type, ...]:
    """Returns the plain types that an annotation such as `int | None` or `tuple[int, ...]` admits."""
    if isinstance(annotation, types.UnionType):
        return tuple(kind for part in typing.get_args(annotation) for kind in allowed_types(part))
    return (typing.get_origin(annotation) or annotation,)


def coerce(annotation: Any, value: Any) -> Any:
    """Converts lists and single strings to tuples, and integers to floats, where the annotation requires it."""
    kinds = allowed_types(annotation)
    if isinstance(value, str) and tuple in kinds and str not in kinds:
        return (value,)
    if isinstance(value, list) and tuple in kinds:
        return tuple(value)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    return value


@dataclasses.dataclass(frozen=True)
class Section:
    """A frozen group of settings, validated when it is built: first each setting, then the rules between them."""

    path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        annotations = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = coerce(annotations[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            self._check_setting(field, annotations[field.name], value)
        self.check()

    def check(self) -> None:
        """Raises `ConfigError` if settings contradict each other."""

    def error(self, name: str, problem: str) -> ConfigError:
        """Returns a `ConfigError` that names the setting and shows its value."""
        return ConfigError(f"{qualified(self.path, name)}={getattr(self, name)!r}: {problem}")

    def _check_setting(self, field: dataclasses.Field, annotation: Any, value: Any) -> None:
        if dataclasses.is_dataclass(annotation):
            return
        kinds = allowed_types(annotation)
        if type(value) not in kinds:
            expected = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
            raise self.error(field.name, f"must be {expected}, not {type(value).__name__}")
        if value is None:
            return
        choices, low, high = (field.metadata[key] for key in ("choices", "low", "high"))
        for part in value if isinstance(value, tuple) else (value,):
            if choices is not None and part not in choices:
                hint = nearest(part, choices) if isinstance(part, str) else f"; known: {choices}"
                raise self.error(field.name, f"is not a known value{hint}")
            if isinstance(part, float) and not math.isfinite(part):
                raise self.error(field.name, "must be a finite number")
            if low is not None and part < low:
                raise self.error(field.name, f"must be at least {low}")
            if high is not None and part > high:
                raise self.error(field.name, f"must be at most {high}")


def qualified(path: str, name: str) -> str:
    """Returns the full name of a setting, as after `--config.` on the command line, such as `model.dim`."""
    return f"{path}.{name}" if path else name
