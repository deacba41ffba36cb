"""Corpora in files below the data folder: plain texts, lines, and pairs of aligned lines."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.config.directions import Direction
from tformer_jax.data.corpora import splits
from tformer_jax.data.corpora.corpus import DIRECTIONS, FILE_SETTINGS, PAIRS, TEXTS, Corpus, Source, Splits
from tformer_jax.data.corpora.directions import fill
from tformer_jax.data.corpora.example import DataError, Example
from tformer_jax.data.corpora.filters import BLANK_LINE, HEADER
from tformer_jax.data.corpora.lines import BadLines, decode_lines, read_text
from tformer_jax.data.corpora.locations import locate, locate_by_wildcards

if TYPE_CHECKING:
    from tformer_jax.data.corpora.blocks import Block


@dataclasses.dataclass(frozen=True)
class FileSource(Source):
    """A format of files; an instance reads the entries of one split. A subclass defines `read_file`."""

    settings: ClassVar[tuple[str, ...]] = (*FILE_SETTINGS, *DIRECTIONS, "on_bad_line", "filters")

    cfg: DataConfig
    root: Path | None
    keys: tuple[str, ...]
    bad: BadLines
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of lines without an example, by kind."""
    directions: tuple[Direction, ...] = ()
    """The directions for which each entry is read; (): from `source_language` to `target_language`."""

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` if neither an entry nor the fields name languages although the data has several."""
        by_field = any(place in field for field in data.fields for place in ("{src}", "{tgt}"))
        if by_field and (not data.directions or data.language_fields):
            raise data.error("fields", "has {src} or {tgt}, which need data.directions, without data.language_fields")
        if not data.directions or data.language_fields or by_field:
            return
        for split in ("train", "validation", "test"):
            for name in getattr(data, split):
                if not any(place in name for place in ("{src}", "{tgt}")):
                    problem = "must contain {src} and {tgt} for data.directions, or data.fields must; or set"
                    raise data.error(split, f"{name!r} {problem} data.language_fields")

    @classmethod
    def files(cls, cfg: Config, root: Path | None) -> list[Path]:
        """Returns the files that the entries match; raises `DataError` if one matches none."""
        data = cfg.data
        return [path for split in splits.NAMES for path in splits.files_of(data, root, getattr(data, split), split)]

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Loads the splits: large ones memory-mapped, others in memory."""
        return splits.load(cls, cfg, root)

    @classmethod
    def stream(cls, cfg: Config, root: Path | None) -> Splits:
        """Opens the splits, which are read in each pass; with many languages, loads them sorted by direction."""
        return super().stream(cfg, root) if cfg.data.multilingual else splits.stream(cls, cfg, root)

    def read_entry(self, name: str) -> Iterator[Example]:
        """Yields the examples of all files that match a path or glob, in the order of the paths.

        With many languages, each has its direction.

        Raises:
            DataError: a file is missing or empty, or has a malformed line and `data.on_bad_line` is "stop".
        """
        for direction in self.directions:
            examples = dataclasses.replace(self, directions=(direction,)).read_direction(name, direction)
            if self.cfg.directions and not self.cfg.language_fields:
                written = str(direction)
                examples = ({**example, "direction": written} for example in examples)
            yield from examples

    def read_direction(self, name: str, direction: Direction) -> Iterator[Example]:
        """Yields the examples of an entry in one direction."""
        read = self._read_checked if kinds.is_outside(kinds.CORPORA, self.cfg.source) else self.read_file
        return itertools.chain.from_iterable(map(read, locate(self.root, fill(name, direction))))

    def read_blocks(self, name: str) -> Iterator["Block"]:
        """Yields the examples of an entry in blocks."""
        yield self.read_entry(name)

    def read_file(self, path: Path) -> Iterator[Example]:
        """Yields the examples of a file."""
        raise NotImplementedError

    def _read_checked(self, path: Path) -> Iterator[Example]:
        """Yields the examples of a file that other code reads; raises `DataError` if they are no texts by key."""
        for example in self.read_file(path):
            keys = example.keys() if isinstance(example, Mapping) else set()
            if not {*self.keys} <= keys <= {*self.keys, "links", "direction"} or not all(
                isinstance(text, str) for text in example.values()
            ):
                expected = f"it must yield dictionaries with the texts {', '.join(self.keys)}"
                raise DataError(f"{path}: {type(self).__name__}.read_file yields {str(example)[:200]}: {expected}")
            yield example

    def filled(self, lines: Iterable[tuple[int, str | None]]) -> Iterator[tuple[int, str]]:
        """Yields the numbered lines that are neither blank nor skipped; counts blank ones."""
        for number, line in lines:
            if line is None:
                continue
            if line.strip():
                yield number, line
            else:
                self.dropped[BLANK_LINE] += 1


class Text(FileSource):
    """One document per file."""

    examples = (TEXTS,)
    entry = "'book.txt'"

    def read_file(self, path: Path) -> Iterator[Example]:
        yield {"text": read_text(path, self.bad)}


class LineSource(FileSource):
    """A format with an example in each line, read in blocks; a subclass defines `read_file_blocks`."""

    def read_blocks(self, name: str) -> Iterator["Block"]:
        if self.cfg.multilingual:
            return super().read_blocks(name)
        (direction,) = self.directions
        return self.read_direction_blocks(name, direction)

    def read_direction(self, name: str, direction: Direction) -> Iterator[Example]:
        from tformer_jax.data.corpora.blocks import examples_of

        return itertools.chain.from_iterable(map(examples_of, self.read_direction_blocks(name, direction)))

    def read_direction_blocks(self, name: str, direction: Direction) -> Iterator["Block"]:
        """Yields the examples of an entry in one direction, in blocks."""
        return itertools.chain.from_iterable(map(self.read_file_blocks, locate(self.root, fill(name, direction))))

    def read_file_blocks(self, path: Path) -> Iterator["Block"]:
        """Yields the examples of a file, in blocks."""
        raise NotImplementedError

    def line_blocks(self, *paths: Path) -> Iterator[tuple[int, list[list[bytes]]]]:
        """Yields the lines of aligned files after their headers, in blocks with the number of their first line."""
        from tformer_jax.data.corpora.blocks import line_blocks  # loads pyarrow, a fifth of the time of --help

        for first, blocks in line_blocks(paths, self.bad):
            if first > 1 or not self.cfg.header:
                yield first, blocks
                continue
            headers = (self.decode(path, 1, block[:1]) for path, block in zip(paths, blocks, strict=True))
            self.dropped[HEADER] += sum(line is not None for _, line in itertools.chain.from_iterable(headers))
            yield 2, [block[1:] for block in blocks]

    def decode(self, path: Path, first: int, block: Sequence[bytes]) -> Iterator[tuple[int, str | None]]:
        """Yields the numbered lines of a block."""
        return decode_lines(block, path, self.bad, first=first)


class Lines(LineSource):
    """One document per line."""

    settings = (*FileSource.settings, "header")
    examples = (TEXTS,)
    entry = "'texts/*.txt.zst'"

    def read_file_blocks(self, path: Path) -> Iterator["Block"]:
        from tformer_jax.data.corpora.blocks import as_block, split_lines

        for first, (block,) in self.line_blocks(path):
            lines = self.decode(path, first, block)
            yield as_block(TEXTS, [split_lines(block)]) or ({"text": line} for _, line in lines if line is not None)


class ParallelLines(LineSource):
    """Translation pairs of two files, aligned by line; `{lang}` in a path is replaced by the language of a side.

    The files of a glob are paired by the text in place of its wildcards.
    """

    settings = (*FileSource.settings, "header", "links")
    examples = (PAIRS,)
    entry = "'train.{lang}.gz'"

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` for an entry without `{lang}`."""
        for split in ("train", "validation", "test"):
            for name in getattr(data, split):
                if "{lang}" not in name:
                    example = "multi30k/train.{lang}.gz"
                    raise data.error(split, f"{name!r} must contain {{lang}}, for example {example!r}")

    def read_direction_blocks(self, name: str, direction: Direction) -> Iterator["Block"]:
        """As `LineSource.read_direction_blocks`, of pairs of files.

        Raises:
            DataError: a file has no counterpart in the other language.
        """
        linked = self.cfg.links if name in self.cfg.train else None
        name = fill(name, direction)
        sources, targets = (locate_by_wildcards(self.root, name, language) for language in direction)
        for alone in sorted(sources.keys() ^ targets.keys()):
            path, other = (sources[alone], direction[1]) if alone in sources else (targets[alone], direction[0])
            raise DataError(
                f"{path} has no counterpart in {other!r}: each file that {name!r} matches needs one in the other "
                "language, with the same text in place of the wildcards"
            )
        links = {} if linked is None else locate_by_wildcards(self.root, name, linked)
        for key, source in sources.items():
            if linked is not None and key not in links:
                raise DataError(f"{source} has no file of links: data.links={linked!r} stands for {{lang}} in {name!r}")
            yield from self._pair_blocks([source, targets[key], *([] if linked is None else [links[key]])])

    def _pair_blocks(self, paths: Sequence[Path]) -> Iterator["Block"]:
        """Yields the pairs of two files in blocks, with their links if there is a third."""
        from tformer_jax.data.corpora.blocks import as_block, split_lines

        for first, blocks in self.line_blocks(*paths):
            regular = len(paths) == 2 and len(blocks[0]) == len(blocks[1])
            pairs = as_block(PAIRS, map(split_lines, blocks)) if regular else None
            yield pairs or self._pairs(paths, first, blocks)

    def _pairs(self, paths: Sequence[Path], first: int, blocks: Sequence[Sequence[bytes]]) -> Iterator[Example]:
        """Yields the pairs of the lines from `first` on.

        A line that is skipped in one file leaves out the same line of the others.

        Raises:
            DataError: one file has more lines, whatever `data.on_bad_line` says: no pair may be trusted then.
        """
        decoded = (self.decode(path, first, block) for path, block in zip(paths, blocks, strict=True))
        for number, lines in enumerate(itertools.zip_longest(*decoded), start=first):
            if None in lines:
                shorter = paths[lines.index(None)]
                longer = next(path for path, line in zip(paths, lines, strict=True) if line)
                end = counted(number - 1, "line")
                raise DataError(
                    f"{longer}, line {number}: has no partner, because {shorter} ends after {end}: "
                    "one of the files lacks lines, perhaps far above; look for the first misaligned pair"
                )
            texts = [text for _, text in lines if text is not None]
            if len(texts) == len(paths) and (len(texts) == 2 or self._has_links(paths[2], number, texts)):
                yield dict(zip(("source", "target", "links"), texts, strict=False))

    def _has_links(self, path: Path, number: int, texts: Sequence[str]) -> bool:
        """Returns whether a line has links of the words of its pair, and else counts it or raises `DataError`."""
        from tformer_jax.data.word_links import check_words, read_links

        source, target, links = texts
        try:
            check_words(read_links(links).sure, source, target)
        except UserError as error:
            self.bad.reject(path, number, str(error))
            return False
        return True
