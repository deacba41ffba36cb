"""Transforms: random changes of training examples, with their settings; the kinds are in `kinds.TRANSFORMS`."""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds
from tformer_jax.config.fields import ConfigError, Section, UnknownKindError, nearest, setting

Example = Mapping[str, str]
"""A `data.corpora.Example`, whose package imports this one."""


@dataclasses.dataclass(frozen=True)
class Transform(Section):
    """A random change of training examples: an entry of `data.transforms`.

    A kind is a frozen dataclass that declares its settings, and implements `change` for texts or, with `on_ids`,
    `change_ids` for token ids. Both are pure functions: what is random comes from the generator that they are given.
    """

    path: ClassVar[str] = "data.transforms"
    on_ids: ClassVar[bool] = False
    """Whether token ids are changed, after all transforms of texts, and not examples."""
    examples: ClassVar[tuple[tuple[str, ...], ...]] = (("source", "target"), ("text",), ("text", "label"))
    """Keys of the examples that it can change."""

    kind: str = setting("", "name of the transform")
    probability: float = setting(0.1, "probability with which an example is changed", low=0, high=1)

    @classmethod
    def from_value(cls, value: Any) -> Any:
        """Builds a transform from its name, or from a dictionary of its settings with its name as `kind`.

        Raises:
            ConfigError: no kind has that name, or a setting is unknown or has an invalid value.
        """
        values = {"kind": value} if isinstance(value, str) else value
        if not isinstance(values, Mapping):
            return value
        name = str(values.get("kind"))
        if name not in kinds.TRANSFORMS:
            hint = nearest(name, kinds.TRANSFORMS)
            raise UnknownKindError(
                f"data.transforms: {name!r} is not a known kind{hint}; --import MODULE registers others"
            )
        kind: type[Self] = kinds.load(kinds.TRANSFORMS, name)
        names = [field.name for field in dataclasses.fields(kind)]
        for key in values:
            if key not in names:
                raise ConfigError(f"unknown setting {key!r} of transform {name!r}{nearest(str(key), names)}")
        return kind(**values)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files below the data folder that it reads."""
        return ()

    def check_fit(self, data: Any) -> None:
        """Raises `ConfigError` if a `DataConfig` that has the transform does not fit it."""

    def prepare(self, training: Any) -> Any:
        """Returns the function that changes examples: `change`, or `change_ids`.

        A kind that reads other data or examples overrides it; `training` is a `data.transforms.Training`.
        """
        return self.change_ids if self.on_ids else self.change

    @property
    def is_format(self) -> bool:
        """Whether sources of other splits, and inputs, are formatted, too."""
        return False

    def format_source(self, source: str) -> str:
        """Returns a source of another split, or an input, in the format of the transform."""
        raise NotImplementedError

    @property
    def documents(self) -> tuple[int, str] | None:
        """The most sentences of a document that it joins, and the separator between them; None: it joins none."""
        return None

    def change(self, example: Example, rng: random.Random, index: int) -> Example:
        """Returns the changed example; `index` is its place in the training split."""
        raise NotImplementedError

    def change_ids(self, ids: list[int], text: str, tokenizer: Any, rng: random.Random) -> list[int]:
        """Returns the changed ids of a text, without the special tokens around it."""
        raise NotImplementedError

    def error(self, name: str, problem: str) -> UserError:
        """As `Section.error`, with the name of the transform; `name` is "kind" if no setting is to blame."""
        shown = "" if name == "kind" else f".{name}={getattr(self, name)!r}"
        return ConfigError(f"data.transforms: {self.kind}{shown}: {problem}")

    def outside_kinds(self) -> Iterator[str]:
        """Yields the name of the transform if it is one of other code."""
        if kinds.is_outside(kinds.TRANSFORMS, self.kind):
            yield f"data.transforms={self.kind!r}"


def format_source(transforms: Iterable[Transform], source: str) -> str:
    """Returns a source of validation or test, or an input, in the formats of the transforms that have one."""
    for transform in transforms:
        source = transform.format_source(source) if transform.is_format else source
    return source
