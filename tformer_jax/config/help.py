"""Explains settings: their types, defaults, allowed values and meanings."""

import dataclasses
from collections.abc import Iterator

from tformer_jax.base.checks import annotated_types
from tformer_jax.config.fields import ConfigError, Section, allowed_types, member_types, qualified
from tformer_jax.config.schema import Config

BOUNDS = {"low": "at least", "high": "at most", "above": "above", "below": "below"}


def explain(name: str = "") -> str:
    """Returns one paragraph for a setting, such as `model.dim`, or for each setting of a section; "": for all.

    Raises:
        ConfigError: there is no such setting; the message names the nearest.
    """
    kind: type[Section] = Config
    if not isinstance(name, str):
        raise ConfigError(f"{name!r} is not the name of a setting: write a text, such as 'model.dim'")
    if name:
        Config.check_name(name)
        for part in name.split("."):
            if part not in kind.nested():
                return _paragraph(kind, part, name)
            kind = kind.nested()[part]
    heading = f"{name}: {(kind.__doc__ or '').splitlines()[0]}\n" if name else ""
    return heading + "\n".join(_paragraphs(kind, name))


def _paragraphs(kind: type[Section], path: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        name = qualified(path, field.name)
        if field.name in kind.nested():
            yield from _paragraphs(kind.nested()[field.name], name)
        else:
            yield _paragraph(kind, field.name, name)


def _paragraph(kind: type[Section], key: str, name: str) -> str:
    (field,) = (field for field in dataclasses.fields(kind) if field.name == key)
    annotation = annotated_types(kind)[key]
    types = " or ".join("None" if each is type(None) else each.__name__ for each in allowed_types(annotation))
    if members := member_types(annotation):
        types += f" of {' or '.join(member.__name__ for member in members)}"
    facts = [f"{types}, default {field.default!r}"]
    if choices := field.metadata["choices"]:
        facts.append(f"allowed: {', '.join(map(str, choices))}")
    bounds = field.metadata["bounds"]._asdict()
    facts += [f"{BOUNDS[side]} {value}" for side, value in bounds.items() if value is not None]
    facts += [f"used with {switch}={' or '.join(map(str, users))}" for switch, users in kind.used_by(key).items()]
    return f"{name} ({'; '.join(facts)})\n    {field.metadata['meaning']}"
