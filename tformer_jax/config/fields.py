"""Declares and validates settings: one `setting(...)` line gives the default, meaning and allowed values."""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from tformer_jax.base.checks import annotated_types, plain_value_hint
from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds


class Bounds(NamedTuple):
    """Bounds of a number: `low` and `high` are allowed, `above` and `below` are not; None: no bound."""

    low: float | None
    high: float | None
    above: float | None
    below: float | None

    def problem(self, value: Any) -> str | None:
        """Returns what is wrong with a number, if it is outside of the bounds or not finite."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.low is not None and value < self.low:
            return f"must be at least {self.low}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below}"
        return None


INT32_MAX = 2**31 - 1
"""Largest number of steps or tokens, which are counted in int32 on devices."""

UsedBy = Mapping[str, Collection[Any]]
SAME_TRAINING = "same"
"""A resumed run may change the setting: training then gives the same, up to rounding and the masks of dropout."""
OTHER_TRAINING = "other"
"""A resumed run may change the setting: training continues differently, and the result names the change."""


class ConfigError(UserError):
    """A setting of a config is invalid; the message names it."""


class UnknownKindError(ConfigError):
    """A config names a kind that no imported module registers."""


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Collection[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    used_by: UsedBy | str | None = None,
    resumable: str | None = None,
) -> Any:
    """Declares one setting of a `Section`.

    Args:
        default: value if a config file does not set it.
        meaning: one line of help, with the unit if there is one.
        choices: allowed values, for a tuple of each member; None: any value of the annotated type.
        low, high: smallest and largest allowed number.
        above, below: exclusive bounds.
        used_by: values of another setting that use this one, such as `{"scaling": ("yarn",)}`; or only the name of a
            setting with kinds, which declare what they use; None: all do. The other setting is in this section or in
            the section that holds it.
        resumable: `SAME_TRAINING` or `OTHER_TRAINING` if a resumed run may change it; None: as `Section.resumable`.
    """
    metadata = {"meaning": meaning, "choices": choices, "bounds": Bounds(low, high, above, below)}
    metadata |= {"used_by": used_by or {}, "resumable": resumable}
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type["Section"], *, used_by: UsedBy | str | None = None) -> Any:
    """Declares a section within another one; `used_by` is as for `setting`."""
    return dataclasses.field(default_factory=kind, metadata={"used_by": used_by or {}})


class Unused(NamedTuple):
    """A setting that was changed and has no effect."""

    name: str
    switch: str
    """The setting whose value does not use it."""
    chosen: Any
    users: Collection[Any]
    """Values of `switch` that use it."""


def nearest(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Returns a hint for an unknown name: `; did you mean 'PREFIXx'?`, or all `names` if none is close."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {prefix + close[0]!r}?" if close else f"; known: {', '.join(sorted(names))}"


def allowed_types(annotation: Any) -> tuple[type, ...]:
    """Returns the plain types that an annotation such as `int | None` or `tuple[int, ...]` admits."""
    if isinstance(annotation, types.UnionType):
        return tuple(kind for part in typing.get_args(annotation) for kind in allowed_types(part))
    return (typing.get_origin(annotation) or annotation,)


def _type_name(kind: type) -> str:
    return "None" if kind is types.NoneType else kind.__name__


def _is_member(value: Any, members: tuple[type, ...]) -> bool:
    return isinstance(value, members) if isinstance(value, Section) else type(value) in members


def member_types(annotation: Any) -> tuple[type, ...]:
    """Returns the types of the members that `tuple[int, ...]` admits; () for any type, and other annotations."""
    if typing.get_origin(annotation) is not tuple:
        return ()
    return tuple(kind for kind in typing.get_args(annotation) if kind not in (Any, Ellipsis))


def separated(text: str) -> str:
    """Returns a hint for a text that may be meant as several values, such as `a,b`, else ""."""
    pieces = tuple(piece.strip() for piece in text.split(","))
    return f"; separate values are written {pieces}" if len(pieces) > 1 else ""


def coerce(annotation: Any, value: Any) -> Any:
    """Converts a value to the annotated type: lists and strings to tuples, integers to floats, dicts to sections."""
    admitted, members = allowed_types(annotation), member_types(annotation)
    if members and isinstance(members[0], type) and issubclass(members[0], Section):
        value = (value,) if isinstance(value, str | Mapping) else value
        return tuple(map(members[0].from_value, value)) if isinstance(value, list | tuple) else value
    if isinstance(value, list | tuple) and members == (float,):
        return tuple(float(part) if type(part) is int else part for part in value)
    if isinstance(value, Mapping) and issubclass(admitted[0], Section):
        return admitted[0].from_dict(value)
    if isinstance(value, str) and tuple in admitted and str not in admitted:
        return (value,)
    if isinstance(value, list) and tuple in admitted:
        return tuple(value)
    if type(value) is int and float in admitted and int not in admitted:
        return float(value)
    return value


@dataclasses.dataclass(frozen=True)
class Section:
    """A frozen group of settings, validated when it is built: first each setting, then the rules between them.

    A setting without effect is an error, unless it depends on one of `selectable`, whose value a flag may change later;
    `without_effect` then only reports it.
    """

    path: ClassVar[str] = ""
    selectable: ClassVar[tuple[str, ...]] = ()
    resumable: ClassVar[str | None] = None
    """The `resumable` of settings that do not state it; None: a resumed run may not change them."""

    def __init_subclass__(cls) -> None:
        """Gives each section the short `__repr__`, which `dataclass` would replace."""
        super().__init_subclass__()
        cls.__repr__ = Section.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = {name.partition(".")[0]: None for name in self.changed_settings()}
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _repr_html_(self) -> str:
        from tformer_jax.base.html_table import describe_html

        return describe_html({name: operator.attrgetter(name)(self) for name in self.changed_settings()})

    @classmethod
    def resume_effect(cls, name: str) -> str | None:
        """Returns the `resumable` of a setting, such as `steps`, or `optim.learning_rate` of the whole config."""
        first, _, below = name.partition(".")
        if below:
            return cls.nested()[first].resume_effect(below)
        (field,) = (field for field in dataclasses.fields(cls) if field.name == first)
        return field.metadata.get("resumable") or cls.resumable

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds the section from nested plain dictionaries; missing settings take their defaults.

        Raises:
            ConfigError: a key is unknown, a value has the wrong type or range, or settings contradict each other.
        """
        for key in values:
            cls.check_name(key)
        return cls(**values)

    @classmethod
    def from_value(cls, value: Any) -> Any:
        """Builds a section of a list from what a config writes for it; other values are returned as they are."""
        return cls.from_dict(value) if isinstance(value, Mapping) else value

    @classmethod
    def check_name(cls, name: str) -> None:
        """Checks that `name` is a setting, such as `dim` or `rotary.base` in `model`.

        Raises:
            ConfigError: it is not; the message names the nearest setting.
        """
        first, _, below = name.partition(".")
        names = [field.name for field in dataclasses.fields(cls)]
        if first not in names:
            nested = cls.nested_name(name)
            hint = nearest(nested or first, [nested] if nested else names, prefix=qualified(cls.path, ""))
            raise ConfigError(f"unknown setting {qualified(cls.path, name)!r}{hint}")
        if below and first not in cls.nested():
            raise ConfigError(
                f"unknown setting {qualified(cls.path, name)!r}; did you mean {qualified(cls.path, first)!r}?"
            )
        if below:
            cls.nested()[first].check_name(below)

    @classmethod
    def nested(cls) -> dict[str, type["Section"]]:
        """Returns the sections within this one, by name."""
        hints = annotated_types(cls).items()
        return {name: kind for name, kind in hints if isinstance(kind, type) and issubclass(kind, Section)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Returns all defaults as nested dictionaries; unlike a section with them, it loads no kinds."""
        hints, nested = annotated_types(cls), cls.nested()
        return {
            field.name: nested[field.name].defaults()
            if field.name in nested
            else coerce(hints[field.name], field.default)
            for field in dataclasses.fields(cls)
        }

    @classmethod
    def nested_name(cls, name: str) -> str | None:
        """Finds a setting of a nested section, such as `moe.num_experts`, by `num_experts` or `moe_num_experts`."""
        for group, section in cls.nested().items():
            for field in dataclasses.fields(section):
                if name in (field.name, f"{group}_{field.name}"):
                    return f"{group}.{field.name}"
        return None

    def __post_init__(self) -> None:
        annotations = annotated_types(type(self))
        for field in dataclasses.fields(self):
            value = coerce(annotations[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            self._check_setting(field, annotations[field.name], value)
        for unused in self.unused():
            if unused.switch not in self.selectable:
                users = " or ".join(map(repr, unused.users))
                problem = f"is used only by {qualified(self.path, unused.switch)}={users}, not {unused.chosen!r}"
                default = operator.attrgetter(unused.name)(type(self)())
                raise self.error(unused.name, f"{problem}; leave it out, or write {default!r}")
        for user in (self, *(value for name in self.nested() if isinstance(value := getattr(self, name), Section))):
            self.check_limits(user)
        self.check()
        for _, _, kind in self.kinds_in_use():
            getattr(kind, "check", lambda _: None)(self)

    def check(self) -> None:
        """Raises `ConfigError` if settings contradict each other."""

    def check_limits(self, user: "Section") -> None:
        """Raises `ConfigError` for a setting of this section that a kind in use by `user` does not support."""
        path = qualified(self.path, "")
        for switch, name, kind in user.kinds_in_use():
            for setting, allowed, reason, lifted in getattr(kind, "limits", ()):
                if not setting.startswith(path) or (lifted and name != getattr(user, switch)):
                    continue
                own = setting.removeprefix(path)
                if operator.attrgetter(own)(self) not in allowed:
                    written = " or ".join(map(repr, allowed))
                    raise self.error(own, f"is not supported by {switch} {name!r}: {reason}; write {written}")

    def kinds_in_use(self) -> Iterator[tuple[str, str, Any]]:
        """Yields `(switch, name, kind)` of each kind that a setting of this section, the switch, names."""
        for switch, choices, name in self._kind_names():
            yield switch, name, kinds.load(choices, name)

    def outside_kinds(self) -> Iterator[str]:
        """Yields each setting that names a kind of other code, as `model.norm='own'`, in nested sections too."""
        for switch, choices, name in self._kind_names():
            if kinds.is_outside(choices, name):
                yield f"{qualified(self.path, switch)}={name!r}"
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                yield from part.outside_kinds() if isinstance(part, Section) else ()

    def _kind_names(self) -> Iterator[tuple[str, kinds.Kinds, str]]:
        for field in dataclasses.fields(self):
            if isinstance(choices := field.metadata.get("choices"), kinds.Kinds):
                for value in self.values_of(field.name):
                    names = value if isinstance(value, tuple) else (value,)
                    yield from ((field.name, choices, name) for name in names if name is not None)

    def changed_settings(self) -> Iterator[str]:
        """Yields the names of all settings that differ from their defaults, such as `dim` and `rotary.base`."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Section):
                yield from (f"{field.name}.{name}" for name in value.changed_settings())
            elif value != field.default:
                yield field.name

    @classmethod
    def used_by(cls, name: str) -> UsedBy:
        """Returns the settings of this section that `name`, such as `dim` or `rotary.base`, depends on; see `setting`.

        An unknown name depends on none.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        first, _, below = name.partition(".")
        inner = {field.name: field for field in dataclasses.fields(cls.nested()[first])} if below else {}
        users: dict[str, Collection[Any]] = {}
        for field in (fields.get(first), inner.get(below)):
            used_by = {} if field is None else field.metadata.get("used_by", {})
            if isinstance(used_by, str):
                switch = fields.get(used_by)
                used_by = {} if switch is None else {used_by: kinds.Users(switch.metadata["choices"], first)}
            users |= {switch: values for switch, values in used_by.items() if switch in fields}
        return users

    def values_of(self, switch: str) -> tuple[Any, ...]:
        """Returns the values of a switch, a setting that `used_by` names; a subclass may know several, of parts."""
        return (getattr(self, switch),)

    def unused(self) -> Iterator[Unused]:
        """Yields the settings that differ from their defaults and have no effect, nested ones included."""
        for name in self.changed_settings():
            for switch, users in self.used_by(name).items():
                values = self.values_of(switch)
                if values and not any(value in users for value in values):
                    yield Unused(name, switch, values[0], users)

    def without_effect(self) -> list[str]:
        """Returns one sentence for each setting that was changed and has no effect, in nested sections, too."""
        sections = (value for name in self.nested() if isinstance(value := getattr(self, name), Section))
        return [
            f"{qualified(self.path, name)}={operator.attrgetter(name)(self)!r} has no effect "
            f"with {qualified(self.path, switch)}={chosen!r}"
            for name, switch, chosen, _ in self.unused()
        ] + [sentence for section in sections for sentence in section.without_effect()]

    def error(self, name: str, problem: str) -> UserError:
        """Returns a `ConfigError` that names the setting, such as `dim` or `moe.num_experts`, and shows its value."""
        return ConfigError(f"{qualified(self.path, name)}={operator.attrgetter(name)(self)!r}: {problem}")

    def _check_setting(self, field: dataclasses.Field, annotation: Any, value: Any) -> None:
        admitted = allowed_types(annotation)
        is_section = isinstance(value, Section) and isinstance(value, admitted)
        if type(value) not in admitted and not is_section:
            expected = " or ".join(map(_type_name, admitted))
            plain = plain_value_hint(value, field.metadata.get("choices"))
            hint = "; write ()" if value is None and tuple in admitted else plain
            raise self.error(field.name, f"must be {expected}, not {_type_name(type(value))}{hint}")
        if value is None or isinstance(value, Section):
            return
        members = member_types(annotation)
        if wrong := [part for part in value if not _is_member(part, members)] if members else []:
            expected = " or ".join(map(_type_name, members))
            hint = f"; write {tuple(map(str, value))}" if members == (str,) and None not in value else ""
            raise self.error(field.name, f"must hold {expected}, not {_type_name(type(wrong[0]))}{hint}")
        if "choices" not in field.metadata:
            raise TypeError(f"{type(self).__name__}.{field.name}: write it as setting(DEFAULT, MEANING)")
        choices, bounds = field.metadata["choices"], field.metadata["bounds"]
        for part in value if isinstance(value, tuple) else (value,):
            if choices is not None and part not in choices:
                hint = nearest(part, choices) if isinstance(part, str) else f"; known: {choices}"
                if isinstance(value, tuple) and isinstance(part, str):
                    hint = separated(part) or hint
                error = self.error(field.name, f"is not a known value{hint}")
                registered = isinstance(choices, kinds.Kinds) or choices is kinds.LAYERS
                raise UnknownKindError(f"{error}; --import MODULE registers others") if registered else error
            if problem := bounds.problem(part):
                raise self.error(field.name, problem)


def flag(name: str) -> str:
    """Returns the command-line flag of an option, such as `--top-k` of `top_k`."""
    return f"--{name.replace('_', '-')}"


def qualified(path: str, name: str) -> str:
    """Returns the full name of a setting, as after `--config.` on the command line, such as `model.dim`."""
    return f"{path}.{name}" if path else name
