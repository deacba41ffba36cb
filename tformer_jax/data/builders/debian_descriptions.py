"""Debian's package descriptions in English and in the languages of its translation project.

The translations of a package are joined with the English description that has the same `Description-md5`: the title
with the title, and paragraph with paragraph if both descriptions have equally many.
"""

import collections
import dataclasses
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from tformer_jax.data.corpora import DataError
from tformer_jax.data.corpora.heldout import split_of
from tformer_jax.data.corpora.lines import COMPRESSIONS, BadLines, numbered_lines

COLUMNS = ("source_language", "target_language", "source", "target")
SPLITS = {"train": "train", "validation": "dev", "test": "test"}
"""Names of the TSV files of splits."""
INDEX = re.compile(rf"(?:.*_)?Translation-([a-z]{{2,3}}(?:_[A-Z]{{2}})?)({'|'.join(COMPRESSIONS)})?")
"""File names of apt's indexes of descriptions, with their language."""
STEM = re.compile(r"(?:lib)?(\d*[a-z]+)")
"""The start of a package's name that packages of the same software share, such as `gcc` of `libgcc-12-dev`."""
LONGEST = 400
"""Maximum number of characters of a text; longer ones are left out."""

Pair = tuple[str, str]
"""An English text and its translation."""


class DebianDescriptions(tfds.core.GeneratorBasedBuilder):
    """Titles and paragraphs in English, with their translations."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Name a folder with apt's Translation-* files, such as /var/lib/apt/lists on Debian and its derivatives, after "
        "`apt-get -o Acquire::Languages=en,de,fr update` (`apt-get indextargets` lists the files); or put files of a "
        "mirror there, such as dists/stable/main/i18n/Translation-en.xz and Translation-de.bz2; or train.tsv, dev.tsv "
        "and, if there is one, test.tsv, plain or .gz, of source language<tab>target language<tab>source<tab>target."
    )

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Descriptions of Debian's packages, translated by its volunteers.",
            homepage="https://www.debian.org/international/l10n/ddtp",
            features=tfds.features.FeaturesDict({column: tfds.features.Text() for column in COLUMNS}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        folder = Path(dl_manager.manual_dir)
        rows = read_tables(folder) or read_indexes(folder)
        return {split: self._generate_examples(rows[split]) for split in SPLITS if rows[split]}

    def _generate_examples(self, rows: list[tuple[str, ...]]) -> Iterator[tuple[int, dict[str, str]]]:
        for number, row in enumerate(rows):
            yield number, dict(zip(COLUMNS, row, strict=True))


def read_tables(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Returns the rows of the TSV files of a folder by split; {} without such files.

    Raises:
        DataError: a file is damaged, or a line does not have four columns.
    """
    rows: dict[str, list[tuple[str, ...]]] = {split: [] for split in SPLITS}
    for split, name in SPLITS.items():
        for path in (path for path in (folder / f"{name}.tsv", folder / f"{name}.tsv.gz") if path.exists()):
            for number, line in _lines(path):
                cells = tuple(line.split("\t"))
                if len(cells) != len(COLUMNS):
                    raise DataError(
                        f"{path}, line {number}: has {len(cells)} columns where {len(COLUMNS)} are expected"
                    )
                rows[split].append(cells)
    return rows if any(rows.values()) else {}


def read_indexes(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Returns the rows that apt's indexes of a folder give, by split, sorted by language and then as in the indexes.

    A hash of the stem of a package's name determines the split. If packages in several splits share an English text, it
    is only in the first of these splits.

    Raises:
        DataError: the folder has no index of English descriptions, or no other, or a file is damaged.
    """
    paths = sorted((match[1], path) for path in folder.iterdir() if (match := INDEX.fullmatch(path.name)))
    english = {text.md5: text for language, path in paths if language == "en" for text in read_descriptions(path)}
    paths = [(language, path) for language, path in paths if language != "en"]
    if not english or not paths:
        missing = f"{folder} has no Translation-* file of {'another language' if english else 'English'}"
        raise DataError(f"{missing}. {DebianDescriptions.MANUAL_DOWNLOAD_INSTRUCTIONS}")
    left_out: collections.Counter[str] = collections.Counter()
    pairs: dict[tuple[str, Pair], None] = {}
    split_numbers: dict[str, int] = {}
    for language, path in paths:
        for translation in read_descriptions(path):
            number = [*SPLITS].index(split_of(stem_of(translation.package)))
            for pair in join_descriptions(english.get(translation.md5), translation, left_out):
                if (language, pair) in pairs:
                    left_out["duplicates"] += 1
                pairs[language, pair] = None
                split_numbers[pair[0]] = min(number, split_numbers.get(pair[0], number))
    counts = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    logging.getLogger(__name__).warning("%s: %s pairs; left out: %s", folder, f"{len(pairs):,}", counts or "none")
    rows: dict[str, list[tuple[str, ...]]] = {split: [] for split in SPLITS}
    for language, pair in pairs:
        rows[[*SPLITS][split_numbers[pair[0]]]].append(("en", language, *pair))
    return rows


@dataclasses.dataclass(frozen=True)
class Description:
    """A description of a package in one language."""

    package: str
    md5: str
    """MD5 of the English description."""
    title: str
    lines: tuple[str, ...]
    """The lines below the title, each with the space at its start."""

    def paragraphs(self) -> list[str | None]:
        """Returns each paragraph as one line; None if it has lines to be shown as they are, such as lists."""
        paragraphs: list[list[str]] = [[]]
        for line in self.lines:
            if line.strip() == ".":
                paragraphs.append([])
            else:
                paragraphs[-1].append(line)
        return [
            None if any(line.startswith("  ") for line in lines) else " ".join(" ".join(lines).split())
            for lines in paragraphs
            if lines
        ]


def read_descriptions(path: Path) -> Iterator[Description]:
    """Yields the descriptions of an index; one without `Description-md5` cannot be joined, and is not yielded."""
    fields: dict[str, list[str]] = {}
    name = ""
    for _, line in itertools.chain(_lines(path), [(0, "")]):
        if line.startswith(" "):
            fields.setdefault(name, []).append(line)
        elif line:
            name, _, value = line.partition(":")
            fields[name] = [value.strip()]
        else:
            texts = [lines for name, lines in fields.items() if re.fullmatch("Description-(?!md5)\\w+", name)]
            if texts and {"Package", "Description-md5"} <= fields.keys():
                title, *lines = texts[0]
                yield Description(
                    fields["Package"][0], fields["Description-md5"][0], " ".join(title.split()), (*lines,)
                )
            fields = {}


def join_descriptions(
    english: Description | None, translation: Description, left_out: collections.Counter[str]
) -> Iterator[Pair]:
    """Yields the pairs of a description and its translation; `left_out` counts what is no pair, by the reason."""
    if english is None:
        left_out["descriptions without English"] += 1
        return
    pairs: list[tuple[str | None, str | None]] = [(english.title, translation.title)]
    sides = english.paragraphs(), translation.paragraphs()
    if len(sides[0]) == len(sides[1]):
        pairs += zip(*sides, strict=True)
    else:
        left_out["descriptions with another number of paragraphs"] += 1
    for source, target in pairs:
        if not source or not target:
            left_out["lists and examples" if None in (source, target) else "blank texts"] += 1
        elif source == target:
            left_out["identical sides"] += 1
        elif max(len(source), len(target)) > LONGEST:
            left_out[f"texts of more than {LONGEST} characters"] += 1
        else:
            yield source, target


def stem_of(package: str) -> str:
    """Returns the part of a package's name that related packages share."""
    match = STEM.match(package)
    return match[1] if match else package


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the numbered lines of a file; none is skipped, since a malformed one is an error."""
    return ((number, line or "") for number, line in numbered_lines(path, BadLines()))
