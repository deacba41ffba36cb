"""Trains the vocabularies of an experiment on its training split."""

import collections
import functools
import hashlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import tokenizers as hf
from rich.console import Console
from rich.progress import track

from tformer_jax.base import user_cache
from tformer_jax.base.paths import as_path
from tformer_jax.config import DataConfig, kinds
from tformer_jax.config.directions import Direction
from tformer_jax.data import characters
from tformer_jax.data.corpora.corpus import Endless, origin_of
from tformer_jax.data.corpora.example import NO_TEXT, Example
from tformer_jax.data.tokenizers import base, normalization
from tformer_jax.data.tokenizers.base import TAG, Tokenizer
from tformer_jax.data.tokenizers.files import FORMATS, Placeholders, Tokenizers, find_class, is_saved, load_tokenizer
from tformer_jax.data.tokenizers.normalization import BY_LANGUAGE, WHITESPACE, Step, normalizer, steps_of, texts_between

SETTINGS = (
    *("tokenizer", "source_tokenizer", "target_tokenizer", "vocab_size", "tokenizer_examples"),
    *("split_digits", "shared_vocab", "clean_whitespace", "normalize", "source_language", "target_language"),
    *("character_coverage", "byte_fallback", "symbols", "placeholders", "tokenizer_temperature"),
)
"""Settings that determine a trained tokenizer; part of the cache key."""
LONG_WORD = 1000
"""Maximum number of characters of a word that a tokenizer is trained on."""
LONG_WORDS = re.compile(rf"\S{{{LONG_WORD}}}(?=\S)")
CODE = (characters, base, normalization)
"""Modules that determine every trained tokenizer."""


def train_tokenizers(cfg: DataConfig, train: Iterable[Example], root: Path | None = None) -> Tokenizers:
    """Trains tokenizers on at most `cfg.tokenizer_examples` examples, or loads `cfg.tokenizer_file`.

    The special tokens that `cfg.objective` needs are appended to the vocabulary; if examples have directions, so are
    the tags of their languages. They are cached in the user's cache folder, unless reading all examples is slow.

    Args:
        train: the training split: a sequence, or an iterable for repeated passes.
        root: the data folder, to which `cfg.tokenizer_file` is relative.

    Raises:
        UserError: the vocabulary is too small for its kind, or the tokenizer file cannot be loaded.
        DataError: the training split has no example.
    """
    tokenizers = _add_languages(cfg, _train_or_load(cfg, train, root), train)
    return _add_chat(cfg, tokenizers, root) if "messages" in next(iter(train), {}) else tokenizers


def _add_chat(cfg: DataConfig, tokenizers: Tokenizers, root: Path | None) -> Tokenizers:
    """Returns the tokenizers with the template that `cfg` names, or their own, or a plain one."""
    from tformer_jax.data.chat.template import PLAIN, read_template
    from tformer_jax.data.tokenizers.chats import ending_answers, with_chat

    tokenizer = tokenizers.target
    if tokenizer.steps:
        raise cfg.error("tokenizer_file", "normalizes texts, which would change what the chat template writes")
    if cfg.chat_template is not None:
        tokenizer = with_chat(tokenizer, read_template(Path(root or "") / cfg.chat_template))
    elif tokenizer.chat is None:
        logging.getLogger(__name__).warning(
            "the tokenizer has no chat template, so that a plain one is used ('User:', 'Assistant:' before the texts); "
            "data.chat_template names another"
        )
        tokenizer = with_chat(tokenizer, PLAIN)
    tokenizer = ending_answers(tokenizer)
    return Tokenizers(tokenizer, tokenizer)


def _train_or_load(cfg: DataConfig, train: Iterable[Example], root: Path | None) -> Tokenizers:
    if cfg.tokenizer_file is not None and (folder := tokenizer_path(cfg, root)).is_dir():
        return _load_folder(cfg, folder)
    outside = any(kind == "file" or kinds.is_outside(kinds.TOKENIZERS, kind) for kind in cfg.tokenizer_kinds)
    origin = None if outside else origin_of(train)
    if origin is None:
        made = _train_sides(cfg, train, root)
    else:
        key = {
            "examples": origin,
            "settings": {name: getattr(cfg, name) for name in SETTINGS},
            "tokenizers": hf.__version__,
            "normalization": normalization.signature(cfg.normalize),
            "code": user_cache.source_digest(sys.modules[__name__], *_code(cfg, train)),
        }
        values = user_cache.cached("tokenizers", key, lambda: _train_sides(cfg, train, root).to_json())
        made = Tokenizers.from_json(values)
    return _extend(cfg, made.source, made.target)


def _code(cfg: DataConfig, train: Iterable[Example]) -> list[ModuleType]:
    modules = [*CODE, *dict.fromkeys(sys.modules[find_class(kind).__module__] for kind in cfg.tokenizer_kinds)]
    if cfg.placeholders:
        from tformer_jax.data import placeholders

        modules.append(placeholders)
    if "messages" in next(iter(train), {}):
        from tformer_jax.data.chat import messages

        modules.append(messages)
    return modules


def _load_folder(cfg: DataConfig, folder: Path) -> Tokenizers:
    if {*cfg.tokenizer_kinds} != {"file"}:
        raise cfg.error(
            "tokenizer_file", "is a folder with the tokenizers of both sides, but only one uses 'file'; name a file"
        )
    saved = folder / "tokenizers"
    if not (saved.is_dir() or (folder / "config.json").is_file()):
        raise cfg.error("tokenizer_file", f"{folder} is not the folder of a run or of a checkpoint")
    if saved.is_dir():
        loaded = Tokenizers.load(saved)
    else:
        from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers

        loaded = load_checkpoint_tokenizers(folder)
    for tokenizer in (loaded.source, loaded.target):
        _check_normalization(cfg, tokenizer, f" for data.tokenizer_file={cfg.tokenizer_file!r}")
    return _extend(cfg, loaded.source, loaded.target)


def adopt_tokenizers(cfg: DataConfig, given: Tokenizers, train: Iterable[Example]) -> Tokenizers:
    """Returns given tokenizers for data that `cfg` describes, with the special tokens of its objective and languages.

    Raises:
        UserError: they do not normalize as `cfg` says, or have other symbols.
    """
    for tokenizer in (given.source, given.target):
        _check_normalization(cfg, tokenizer, ", as in the given tokenizers", unset=False)
        if cfg.placeholders != tokenizer.placeholders:
            raise cfg.error("placeholders", f"must be {tokenizer.placeholders!r}, as in the given tokenizers")
        if {*cfg.symbols} - {*tokenizer.symbols}:
            raise cfg.error("symbols", f"must be among {tokenizer.symbols!r}, as in the given tokenizers")
    return _add_languages(cfg, _extend(cfg, given.source, given.target), train)


def _add_languages(cfg: DataConfig, tokenizers: Tokenizers, train: Iterable[Example]) -> Tokenizers:
    """Returns the tokenizers with a tag for each language of the examples that has none, in alphabetic order."""
    if not cfg.multilingual:
        return tokenizers
    from tformer_jax.data.tokenizers.language_tags import matching_languages

    directions = {example["direction"] for example in train}
    codes = sorted({code for name in directions for code in Direction.parse(name)})
    names = [TAG.format(code) for code in codes if not matching_languages(tokenizers.target, code)]
    source = tokenizers.source.extended(names)
    return Tokenizers(source, source if tokenizers.target is tokenizers.source else tokenizers.target.extended(names))


def _extend(cfg: DataConfig, source: Tokenizer, target: Tokenizer) -> Tokenizers:
    """Returns the tokenizers with the special tokens that `cfg.objective` needs; its texts have one tokenizer."""
    if cfg.objective is None:
        return Tokenizers(source, target)
    extended = target.extended(kinds.load(kinds.OBJECTIVES, cfg.objective).added)
    return Tokenizers(extended, extended)


def _train_sides(cfg: DataConfig, train: Iterable[Example], root: Path | None) -> Tokenizers:
    first = next(iter(train), None)
    if first is None:
        from tformer_jax.data.corpora.splits import no_example

        raise no_example("train", train)
    sides = [key for key in first if key not in NO_TEXT]
    steps = steps_of(cfg, first.keys())
    target_language = cfg.target_language if BY_LANGUAGE & {*steps} else cfg.source_language
    languages = {side: target_language if side == "target" else cfg.source_language for side in sides}
    whole = _symbols(cfg)
    normalizers = {side: normalizer(steps, languages[side], whole) for side in sides}
    if cfg.shared_vocab or len(sides) == 1:
        made = [_train_kind(cfg, cfg.tokenizer_kinds[0], train, normalizers, root)] * len(sides)
    else:
        pairs = zip(cfg.tokenizer_kinds, sides, strict=True)
        made = [_train_kind(cfg, kind, train, {side: normalizers[side]}, root) for kind, side in pairs]
    if cfg.tokenizer_file is not None and is_saved(tokenizer_path(cfg, root)) and cfg.clean_whitespace is None:
        steps = cfg.normalize
    source, target = (_normalize(cfg, steps, made[n], languages[sides[n]]) for n in (0, -1))
    shared = made[0] is made[-1] and len({*languages.values()}) == 1
    return Tokenizers(source, source if shared else target)


def _train_kind(
    cfg: DataConfig, kind: str, train: Iterable[Example], normalizers: Mapping[str, Step], root: Path | None
) -> Tokenizer:
    """Trains a tokenizer on the normalized texts of the sides that `normalizers` names, or loads it."""
    if kind == "file":
        return load_tokenizer(tokenizer_path(cfg, root))
    if kind in FORMATS:
        raise cfg.error("tokenizer", "is the name of a format of files; register the kind by another name")

    whole, mask = _symbols(cfg), _mask_of(cfg)

    def texts(examples: Iterable[Example]) -> Iterator[str]:
        for example in examples:
            masked = mask(example)
            for side, change in normalizers.items():
                for text in texts_between(change(_text_of_side(masked, side)), whole):
                    yield from cut_long_words(text)

    every = _sample(train, cfg.tokenizer_examples if isinstance(train, Endless) else None)
    tokenizer = find_class(kind).train(cfg, texts(_sample_balanced(cfg, train)), texts(every))
    tokenizer.kind = kind
    return tokenizer.with_symbols(whole, cfg.placeholders) if whole else tokenizer


def cut_long_words(text: str) -> Sequence[str]:
    """Returns a text in pieces, so that no word has more than `LONG_WORD` characters.

    The time to train BPE grows with the square of the length of a word, such as a line of a script without spaces.
    """
    cuts = [match.end() for match in LONG_WORDS.finditer(text)]
    return [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]


def _text_of_side(example: Example, side: str) -> str:
    if side != "messages":
        return example[side]
    from tformer_jax.data.chat.messages import contents

    return contents(example[side])


def _symbols(cfg: DataConfig) -> tuple[str, ...]:
    if not cfg.placeholders:
        return tuple(dict.fromkeys(cfg.symbols))
    from tformer_jax.data.placeholders import NUMBERED

    return tuple(dict.fromkeys((*cfg.symbols, *NUMBERED)))


def _mask_of(cfg: DataConfig) -> Callable[[Example], Example]:
    """Returns a function that puts symbols for the placeholders of an example."""
    if not cfg.placeholders:
        return lambda example: example
    from tformer_jax.data.placeholders import mask_example

    return functools.partial(mask_example, Placeholders(cfg.placeholders, cfg.symbols))


def tokenizer_path(cfg: DataConfig, root: Path | None) -> Path:
    """Returns the location of `data.tokenizer_file`, which is in the data folder unless it is absolute or a URL."""
    name = cfg.tokenizer_file
    assert name is not None
    return as_path(name) if "://" in name else Path(root or "") / name


def _normalize(cfg: DataConfig, steps: tuple[str, ...], tokenizer: Tokenizer, language: str) -> Tokenizer:
    """Returns a tokenizer that normalizes texts by `steps`; a loaded one may have its own steps, which must agree."""
    if tokenizer.steps:
        _check_normalization(cfg, tokenizer, f" for data.tokenizer_file={cfg.tokenizer_file!r}")
        return tokenizer
    return tokenizer.normalized(steps, language) if steps else tokenizer


def _check_normalization(cfg: DataConfig, tokenizer: Tokenizer, which: str, *, unset: bool = True) -> None:
    """Raises `UserError` if `cfg` describes another normalization than a loaded tokenizer has.

    Args:
        which: end of the message: why it must agree.
        unset: whether `data.normalize=()` fits every tokenizer.
    """
    clean, others = WHITESPACE in tokenizer.steps, tuple(step for step in tokenizer.steps if step != WHITESPACE)
    if cfg.normalize != others and not (unset and cfg.normalize == ()):
        also = "() or " if unset and others else ""
        raise cfg.error("normalize", f"must be {also}{others!r}{which}")
    if cfg.clean_whitespace not in (None, clean):
        raise cfg.error("clean_whitespace", f"must be None or {clean}{which}")


def _sample_balanced(cfg: DataConfig, train: Iterable[Example]) -> Iterator[Example]:
    """Yields at most `cfg.tokenizer_examples` examples, as many of each direction as `balanced_counts` says."""
    if isinstance(train, Endless) or "direction" not in next(iter(train), {}):
        yield from _sample(train, cfg.tokenizer_examples)
        return
    sizes = collections.Counter(example["direction"] for example in train)
    counts = balanced_counts(sizes, cfg.tokenizer_examples, cfg.tokenizer_temperature)
    chosen = {name: collections.Counter(_choose_indices(size, counts[name])) for name, size in sizes.items()}
    places: collections.Counter[str] = collections.Counter()
    for example in _show_progress(train, sizes.total()):
        direction = example["direction"]
        yield from itertools.repeat(example, chosen[direction][places[direction]])
        places[direction] += 1


def balanced_counts(sizes: Mapping[str, int], limit: int, temperature: float) -> dict[str, int]:
    """Returns how many of at most `limit` examples to draw of each direction, in proportion to n^(1/temperature).

    A direction of few examples is repeated ("No Language Left Behind", 2022, section 8.1.1).

    Args:
        sizes: number n of examples of each direction.
    """
    total = min(sum(sizes.values()), limit)
    weights = {name: size ** (1 / temperature) for name, size in sizes.items()}
    shares = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    return counts | {name: counts[name] + 1 for name in by_remainder[: total - sum(counts.values())]}


def _sample(train: Iterable[Example], limit: int | None) -> Iterator[Example]:
    """Yields at most `limit` examples: a pseudorandom one of each equal part."""
    size = len(train) if isinstance(train, Sequence) else sum(1 for _ in train)
    indices = _choose_indices(size, size if limit is None else min(size, limit))
    if isinstance(train, Sequence):
        examples: Iterable[Example] = (train[index] for index in indices)
    else:
        examples = _take_examples(train, indices)
    yield from _show_progress(examples, len(indices))


def _show_progress(examples: Iterable[Example], total: int) -> Iterator[Example]:
    yield from track(
        examples,
        "reading examples for the tokenizer",
        total=total,
        console=Console(stderr=True),
        disable=sys.stderr is None or not sys.stderr.isatty(),
        transient=True,
    )


def _choose_indices(size: int, count: int) -> Sequence[int]:
    """Returns `count` of `size` indices: each one `count // size` times, then one of each of equal parts."""
    if count == size:
        return range(size)
    rounds, rest = divmod(count, size)
    parts = ((number * size // rest, (number + 1) * size // rest) for number in range(rest))
    return [index for _ in range(rounds) for index in range(size)] + [_draw_index(*part) for part in parts]


def _draw_index(start: int, stop: int) -> int:
    """Returns an index from `start` to `stop` (exclusive) by a hash, so that no period of the data is missed."""
    digest = hashlib.blake2b(f"{start} {stop}".encode(), digest_size=8).digest()
    return start + int.from_bytes(digest) % (stop - start)


def _take_examples(examples: Iterable[Example], indices: Iterable[int]) -> Iterator[Example]:
    """Yields the examples at ascending indices."""
    iterator, consumed = iter(examples), 0
    for index in indices:
        yield next(itertools.islice(iterator, index - consumed, None))
        consumed = index + 1
