"""Token ids with a fixed meaning: padding and ignored labels, and the special tokens of this package's tokenizers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

PAD = -1
"""Fills rows of batches; not a token of any vocabulary. It has token 0's embedding, and it is always masked."""
IGNORED = -1
"""Label of positions excluded from losses and metrics."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD_TOKEN, BOS, EOS, UNK = range(4)
"""Ids of `SPECIAL_TOKENS` in this package's tokenizers; `PAD_TOKEN` occurs only in exported checkpoints."""


def symbol_problem(text: str) -> str | None:
    """Returns why a text cannot be a symbol, a text that is always one token; None: it can."""
    if not text or " ".join(text.split()) != text or not text.isprintable():
        return "must have visible characters, and single spaces only within"
    return "is the name of a special token; choose another text" if text in SPECIAL_TOKENS else None


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a vocabulary, and where models read and write them.

    The defaults are for this package's tokenizers; a tokenizer of a published checkpoint has its own special tokens.
    """

    names: tuple[tuple[int, str], ...] = tuple(enumerate(SPECIAL_TOKENS))
    """Ids and names; decoded text omits them."""
    start: int = BOS
    """First input of the decoder of a translation."""
    eos: tuple[int, ...] = (EOS,)
    """Tokens that end an output. The first one ends sources, targets and documents."""
    bos: int | None = BOS
    """Token that begins texts, if `before` has one; None: there is none."""
    pad: int | None = PAD_TOKEN
    """Token that other libraries fill rows with; None: there is none."""
    unknown: int | None = UNK
    """Token of texts outside the vocabulary; None: there are none."""
    suppressed: tuple[int, ...] = (PAD_TOKEN, BOS)
    """Tokens that are never generated."""
    forced: tuple[int, ...] = ()
    """First tokens of each output."""
    before: tuple[int, ...] = ()
    """Tokens before each text."""
    after: tuple[int, ...] = ()
    """Tokens after each text; a source or target ends in `eos[0]` if there are none."""
    bare_sides: bool = False
    """A source ends in no token, and no token is between `start` and a target (T5Gemma)."""
    tags_last: bool = False
    """Whether language tags follow the end of a source, and a target's first tag is the decoder's first input (mBART,
    2020); else tags begin a source, and a target's tags follow `start`."""
    context: int | None = None
    """Token after which the continuation of a text is decoded; None: as at the start of a text."""

    @property
    def after_side(self) -> tuple[int, ...]:
        """Tokens after a target, and after a source without `bare_sides`."""
        return self.after or self.eos[:1]

    @property
    def after_source(self) -> tuple[int, ...]:
        """Tokens after a source."""
        return self.after if self.bare_sides else self.after_side

    @property
    def before_target(self) -> tuple[int, ...]:
        """Tokens before a target, after `start`."""
        return () if self.bare_sides else self.before

    @property
    def added_to_text(self) -> int:
        """Number of tokens that `wrap_text` adds."""
        return len(self.before) + len(self.after)

    @property
    def added_to_side(self) -> int:
        """Number of tokens that are added to a source or target, at most."""
        added = (self.before, self.after_source), (self.before_target, self.after_side)
        return max(len(before) + len(after) for before, after in added)

    @property
    def shown_unknown(self) -> int | None:
        """`unknown`, unless it has another meaning, too, as GPT-2's has; None: outputs have no unknown tokens."""
        others = {*self.eos, self.bos, self.pad}
        return None if self.unknown in others else self.unknown

    @property
    def unknown_name(self) -> str:
        """Text that stands for an unknown token."""
        return (None if self.unknown is None else self.name(self.unknown)) or SPECIAL_TOKENS[UNK]

    def count_unknown(self, ids: Sequence[int]) -> int:
        """Returns the number of unknown tokens, of a text or an output."""
        unknown = self.shown_unknown
        return 0 if unknown is None else list(ids).count(unknown)

    @property
    def used(self) -> set[int]:
        """Tokens that texts or outputs may contain even if they have no names; not `suppressed` and `pad`."""
        optional = {i for i in (self.bos, self.unknown, self.context) if i is not None}
        return {self.start, *self.eos, *self.forced, *self.before, *self.after} | optional

    def below(self, size: int) -> "SpecialTokens":
        """Returns a copy in which `names`, `suppressed` and `pad` have only ids below `size`."""
        return dataclasses.replace(
            self,
            names=tuple((i, name) for i, name in self.names if i < size),
            suppressed=tuple(i for i in self.suppressed if i < size),
            pad=None if self.pad is None or self.pad >= size else self.pad,
        )

    def renumbered(self, change: Callable[[int], int]) -> "SpecialTokens":
        """Returns a copy with other ids."""

        def changed(value: Any) -> Any:
            if isinstance(value, bool | str) or value is None:
                return value
            return change(value) if isinstance(value, int) else tuple(map(changed, value))

        return SpecialTokens(**{field.name: changed(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def wrap_text(self, ids: Sequence[int]) -> list[int]:
        """Returns a prompt, or a text to classify, as models read it."""
        return [*self.before, *ids, *self.after]

    def wrap_side(self, ids: Sequence[int], tags: Sequence[int] = ()) -> list[int]:
        """Returns a source, which may have language tags, as models read it."""
        first, last = ((), tags) if self.tags_last else (tags, ())
        return [*self.before, *first, *ids, *self.after_source, *last]

    def start_target(self, tags: tuple[T, ...]) -> tuple[T | int, tuple[T, ...]]:
        """Returns the decoder's first input and the remaining target tags."""
        return (tags[0], tags[1:]) if self.tags_last and tags else (self.start, tags)

    def name(self, token: int) -> str | None:
        """Returns the name of a special token; None for other tokens."""
        return self.name_of.get(token)

    @functools.cached_property
    def name_of(self) -> dict[int, str]:
        """The names by id."""
        return dict(self.names)


DEFAULT_SPECIAL_TOKENS = SpecialTokens()
"""Special tokens of this package's tokenizers."""
