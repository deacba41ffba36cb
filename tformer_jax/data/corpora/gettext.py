"""Messages of software in many languages: the gettext catalogues of Python packages and of folders."""

import codecs
import collections
import contextlib
import importlib.util
import io
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from babel.messages import Catalog
from babel.messages import Message as Entry
from babel.messages.mofile import read_mo
from babel.messages.pofile import PoFileError, PoFileParser

from tformer_jax.config import Config, DataConfig
from tformer_jax.config.directions import Direction, with_reverses
from tformer_jax.data.corpora.corpus import DIRECTIONS, PAIRS, Corpus, DataError, Example, Source
from tformer_jax.data.corpora.directions import group_by_direction
from tformer_jax.data.corpora.example import cleaned
from tformer_jax.data.corpora.filters import Filters
from tformer_jax.data.corpora.heldout import split_by_share
from tformer_jax.data.corpora.lines import BadLines
from tformer_jax.data.corpora.locations import locate
from tformer_jax.data.corpora.splits import NAMES, SKIP
from tformer_jax.data.languages import read_language

ENGLISH = "en"
"""The language of message ids."""
ENDS = (".mo", ".po")
"""Compiled catalogues are read where both exist: they hold what the software shows."""
DAMAGED = (PoFileError, OSError, ValueError, LookupError, struct.error)
"""Exceptions of Babel for damaged catalogues."""
WARNING = re.compile(r"WARNING: (.*)\nWARNING: Problem on line (\d+)")
"""What Babel prints of a malformed message."""
SCRIPTS = {"latin": "Latn", "cyrillic": "Cyrl", "devanagari": "Deva"}
"""ISO 15924 by modifier of locales, such as `sr@latin`."""


class Message(NamedTuple):
    """What identifies a message in all languages."""

    folder: Path
    """The folder of the locales."""
    domain: str
    context: str | None
    id: str


Messages = dict[Message, dict[str, str]]
"""The text of each message by language."""


class Gettext(Source):
    """Messages of catalogues; an entry of `data.train` is an installed Python package, a folder, or a glob of files.

    A catalogue is `LOCALE/LC_MESSAGES/DOMAIN.mo` or `.po`, or `LOCALE.po` in another folder. Two texts are a pair if
    they translate the same message (id, context, domain and folder); the English text is the id. Of equal pairs in one
    direction, only the first is read. A hash of the id determines the split: `data.validation_fraction` of the ids are
    for validation, and as many for the test. Held-out messages lose translations that a message of an earlier split
    also has, so that no text of a language is in two splits. Texts are compared as models read them.

    Without `data.directions`, these are English to and from each language with at least `ENOUGH` messages, except
    further kinds of English.
    """

    settings = (*DIRECTIONS, "train", "stages", "validation_fraction", "on_bad_line", "filters")
    examples = (PAIRS,)
    multilingual = True
    entry = "'django'"

    ENOUGH = 100
    """Minimum number of messages of a language without `data.directions`."""

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` if nothing would be left for training."""
        if data.validation_fraction >= 0.5:
            raise data.error("validation_fraction", "must be below 0.5: as many messages are held out for the test")

    @classmethod
    def files(cls, cfg: Config, root: Path | None) -> list[Path]:
        """Returns the catalogues; raises `DataError` if an entry names none."""
        return [path for name in cfg.data.train for path in find_catalogues(root, name)]

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Reads the catalogues into memory."""
        data = cfg.data
        zero_shot = list(map(Direction.parse, data.zero_shot))
        wanted = {language for direction in (*data.wanted_directions, *zero_shot) for language in direction}
        reader = CatalogueReader(BadLines(skip=data.on_bad_line == "skip", setting=SKIP), data.validation_fraction)
        messages = reader.read(root, data.train, wanted if data.directions else set())
        directions = data.wanted_directions or [each for each in _default_directions(messages) if each not in zero_shot]
        splits: dict[str, list[Example]] = {}
        for split, texts in _split_texts(data, messages, reader).items():
            filters = Filters(data, training=split == "train")
            listed = (*directions, *(zero_shot if split != "train" else ()))
            unique = (_unique_pairs(data, texts, direction, reader.left_out[split]) for direction in listed)
            splits[split] = list(filters(itertools.chain.from_iterable(unique)))
            reader.left_out[split] += filters.dropped
            if not splits[split]:
                raise DataError(f"data.train has no message for the {split} split: name more catalogues or directions")
        train, sizes = group_by_direction(data, splits["train"])
        reader.bad.report()
        reader.left_out["train"].update(reader.bad.reasons())
        return Corpus(train, splits["validation"], splits["test"], directions=sizes, left_out=reader.left_out)


class SourceCatalogue(Catalog):
    """A catalogue of a .po file, and the messages that it has again, which Babel's merges into the first."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated: list[Entry] = []

    def __setitem__(self, message_id: Any, message: Entry) -> None:
        if self.get(message_id, message.context) is None:
            super().__setitem__(message_id, message)
        else:
            self.repeated.append(message)


class CatalogueReader:
    """Reads catalogues; counts what is no example, by the split in which it would be."""

    def __init__(self, bad: BadLines, share: float):
        self.bad, self._share = bad, share
        self.left_out: dict[str, collections.Counter[str]] = {split: collections.Counter() for split in NAMES}

    def split_of(self, message_id: str) -> str:
        """Returns the split of all messages with an id, whatever its white space."""
        return split_by_share(" ".join(message_id.split()), self._share)

    def read(self, root: Path | None, names: Iterable[str], wanted: set[str]) -> Messages:
        """Returns the messages of the catalogues that entries name, in the order of their paths.

        Args:
            wanted: languages to read; all, if it is empty.

        Raises:
            DataError: a catalogue is missing, or is damaged and `data.on_bad_line` is "stop".
        """
        paths = [path for name in names for path in find_catalogues(root, name)]
        places = {path: place_of(path) for path in dict.fromkeys(paths)}
        languages = {language for _, _, language in places.values()} | {ENGLISH}
        if missing := sorted(wanted - languages):
            raise DataError(
                f"data.train has no catalogue of language {missing[0]!r}, only {', '.join(sorted(languages))}"
            )
        messages: Messages = {}
        for path, (folder, domain, language) in places.items():
            if not wanted or language in {*wanted, ENGLISH}:
                for context, message_id, text in self._texts(path):
                    message = Message(folder, domain, context, message_id)
                    messages.setdefault(message, {ENGLISH: message_id})[language] = text
        return messages

    def _texts(self, path: Path) -> Iterator[tuple[str | None, str, str]]:
        """Yields context, id and text of the messages of a catalogue that are translated."""
        for message in self._catalogue(path):
            message_id, text = message.id, message.string
            if not isinstance(message_id, str):
                reason, message_id = "plural messages", message_id[0]
            elif not message_id:
                reason = "headers of catalogues"
            elif not text:
                reason = "untranslated messages"
            elif message.fuzzy:
                reason = "fuzzy messages"
            else:
                yield message.context, message_id, str(text)
                continue
            self.left_out[self.split_of(message_id)][reason] += 1

    def _catalogue(self, path: Path) -> Catalog:
        self.bad.start(path)
        try:
            content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
            file = io.BytesIO(content)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                catalogue = read_mo(file) if path.suffix == ".mo" else read_po(file)
        except DAMAGED as error:
            self.bad.reject(path, 1, f"is no catalogue that Babel can read ({error})")
            return Catalog()
        if isinstance(catalogue, SourceCatalogue):
            for message in catalogue.repeated:
                self.bad.reject(path, message.lineno or 1, "repeats an earlier message")
            lines = enumerate(map(bytes.strip, content.split(b"\n")), start=1)
            for number, line in lines:  # Babel drops the last letter of such a line
                if line and not line.startswith(b"#") and not line.endswith(b'"'):
                    self.bad.reject(path, number, "has a quote that is not closed")
        for problem, line in WARNING.findall(printed.getvalue()):
            if "num_plurals" not in problem:
                self.bad.reject(path, int(line), problem)
        return catalogue


def read_po(file: BinaryIO) -> SourceCatalogue:
    """Reads a .po file without its obsolete messages; of a message that is there twice, the first counts."""
    catalogue = SourceCatalogue()
    PoFileParser(catalogue, ignore_obsolete=True).parse(file)
    return catalogue


def find_catalogues(root: Path | None, name: str) -> list[Path]:
    """Returns the catalogues of an entry of `data.train`, one of a locale and domain in each folder, sorted by path.

    Raises:
        DataError: the entry is neither a folder or glob of catalogues nor an installed Python package.
    """
    folders = [Path(root or "", name)] if name and (root or Path(name).is_absolute()) else []
    if not any(folder.is_dir() for folder in folders) and name.isidentifier():
        spec = importlib.util.find_spec(name)
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        if not folders:
            raise DataError(
                f"data.train: {name!r} is neither an installed Python package nor a folder below the data folder: run "
                f"pip install {name}, or name a folder or glob of catalogues, such as 'locale/*/LC_MESSAGES/*.po'"
            )
    if folders and folders[0].is_dir():
        paths = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in ENDS)
        if not paths:
            raise DataError(f"data.train: {name!r} has no .mo or .po file in {folders[0]}: name what has catalogues")
    else:
        paths = locate(root, name)
    compiled = {path.with_suffix("") for path in paths if path.suffix == ".mo"}
    return [path for path in paths if path.suffix == ".mo" or path.with_suffix("") not in compiled]


def place_of(path: Path) -> tuple[Path, str, str]:
    """Returns the folder of the locales, the domain and the language of a catalogue.

    Raises:
        DataError: the path does not name the language.
    """
    if path.parent.name == "LC_MESSAGES":
        return path.parents[2], path.stem, language_of_locale(path.parents[1].name)
    if read_language(path.stem.partition("@")[0]) is None:
        raise DataError(f"{path} is neither LOCALE/LC_MESSAGES/{path.name} nor named by its language, such as de.po")
    return path.parent, "", language_of_locale(path.stem)


def language_of_locale(locale: str) -> str:
    """Returns the language of a locale: `sr_Latn_RS` of `sr_RS@latin`.

    Other modifiers stay (`ca@valencia`), so that the texts of two catalogues are not mixed.
    """
    base, _, modifier = locale.replace("-", "_").partition("@")
    if modifier not in SCRIPTS:
        return locale.replace("-", "_")
    language, *region = base.split("_")
    return "_".join((language, SCRIPTS[modifier], *region))


def _default_directions(messages: Messages) -> list[Direction]:
    """Returns English to and from each language with enough messages."""
    counts = collections.Counter(language for texts in messages.values() for language in texts)
    others = [name for name, count in sorted(counts.items()) if count >= Gettext.ENOUGH and not _is_english(name)]
    return with_reverses(Direction(ENGLISH, other) for other in others)


def _is_english(name: str) -> bool:
    language = read_language(name.partition("@")[0])
    return language is not None and language.code == ENGLISH


def _split_texts(data: DataConfig, messages: Messages, reader: CatalogueReader) -> dict[str, list[dict[str, str]]]:
    """Returns the texts of messages by language, for each split.

    A text that an earlier split has in the same language is left out, and counted.
    """
    splits: dict[str, list[dict[str, str]]] = {split: [] for split in NAMES}
    for message, texts in messages.items():
        splits[reader.split_of(message.id)].append(texts)
    earlier: set[tuple[str, str]] = set()
    for split, members in splits.items():
        for texts in members:
            for language, _ in cleaned(data, texts).items() & earlier:
                del texts[language]
                reader.left_out[split]["texts of another split"] += 1
        earlier.update(item for texts in members for item in cleaned(data, texts).items())
    return splits


def _unique_pairs(
    data: DataConfig,
    messages: Iterable[Mapping[str, str]],
    direction: Direction,
    left_out: collections.Counter[str],
) -> Iterator[Example]:
    """Yields each different pair of a direction once, and counts the repeated pairs."""
    seen = set()
    for texts in messages:
        if direction.source not in texts or direction.target not in texts:
            continue
        pair = {"source": texts[direction.source], "target": texts[direction.target]}
        read = (*cleaned(data, pair).values(),)
        if read in seen:
            left_out["repeated pairs"] += 1
        else:
            seen.add(read)
            yield {**pair, "direction": str(direction)}
