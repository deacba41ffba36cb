"""Test sets of `scripts/evaluate.py`: files of sources and references, aligned by line or as records."""

import argparse
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tformer_jax as tj
from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.cli.common import add_path
from tformer_jax.cli.inputs import JSONL, check_text, read_record, text_in, value_in
from tformer_jax.config.directions import Direction
from tformer_jax.config.fields import flag
from tformer_jax.data.characters import clean_whitespace, is_blank
from tformer_jax.data.corpora.lines import COMPRESSIONS, BadLines, numbered_lines
from tformer_jax.data.tokenizers.language_tags import find_language
from tformer_jax.tasks.evaluators.evaluation import Segment

TSV = tuple(f".tsv{end}" for end in ("", *COMPRESSIONS))
RECORD_FLAGS: dict[str, Any] = {
    "source_field": "source",
    "reference_field": ["target"],
    "document_field": None,
    "language_fields": None,
}
"""Defaults of the options that name fields of records."""


def add_test_set(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a test set."""
    group = parser.add_argument_group(
        "test set", "Examples to use instead of a split: lines of --source and --reference, or records of --source."
    )
    add_path(group, "--source", "sources: one per line, or records (.tsv with a header, .jsonl)")
    add_path(group, "--reference", "references of the lines, one file for each set; of a classifier, labels", nargs="+")
    group.add_argument("--direction", metavar="EN-DE", help="direction of all lines, for a model of many languages")
    group.add_argument("--source-field", default="source", metavar="NAME", help="field of the source (default: source)")
    group.add_argument(
        "--reference-field",
        nargs="+",
        default=RECORD_FLAGS["reference_field"],
        metavar="NAME",
        help="fields of the references: texts, or in .jsonl lists of texts; an empty text is none (default: target)",
    )
    group.add_argument("--document-field", metavar="NAME", help="field that names the document, which --output keeps")
    group.add_argument(
        "--language-fields", nargs=2, metavar=("SOURCE", "TARGET"), help="fields of the languages of source and target"
    )


def read_test_set(options: argparse.Namespace) -> list[Segment] | None:
    """Reads the test set that the options name; None: they name none.

    Raises:
        UserError: the options contradict each other, or a file is missing, empty, malformed, or has another number of
            lines.
    """
    given = [name for name, default in RECORD_FLAGS.items() if getattr(options, name) != default]
    if options.source is None:
        if wrong := [*given, *(name for name in ("reference", "direction") if getattr(options, name) is not None)]:
            raise UserError(f"{flag(wrong[0])} is used only with --source FILE, which names a test set")
        return None
    for path in (options.source, *(options.reference or ())):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file, and it must be read more than once: copy it to a file")
    if options.direction and options.language_fields:
        raise UserError("--direction names the direction of all lines: leave out --language-fields, or it")
    try:
        direction = str(Direction.parse(options.direction)) if options.direction else None
    except ValueError as error:
        raise UserError(f"--direction {error}") from None
    if options.source.name.endswith((*TSV, *JSONL)):
        if options.reference:
            raise UserError("--reference names files of lines: leave it out, or name the fields by --reference-field")
        if segments := list(_segments(options, direction)):
            return _without_blank(options.source, segments)
        raise UserError(f"{options.source} has only a header, no example: write one in each line after it")
    if given:
        raise UserError(f"{flag(given[0])} names a field of records: --source must be named .tsv or .jsonl")
    if not options.reference:
        raise UserError("--source needs --reference FILE, the references of its lines")
    lines = _aligned([options.source, *options.reference])
    segments = [Segment(source, tuple(references), direction) for source, *references in lines]
    return _without_blank(options.source, segments)


def _without_blank(path: Path, segments: Sequence[Segment]) -> list[Segment]:
    """Returns the segments that have a text, and warns how many have none."""
    some = [segment for segment in segments if not all(map(is_blank, (segment.source, *segment.references)))]
    if not some:
        raise UserError(f"{path} has no text: write a source, and its reference, in each line")
    if blank := len(segments) - len(some):
        message = "%s: %s of %s examples are left out, because their source and references are blank"
        logging.getLogger(__name__).warning(message, path, f"{blank:,}", f"{len(segments):,}")
    return some


def with_directions_of(run: "tj.Run", segments: Sequence[Segment]) -> list[Segment]:
    """Returns segments with directions that name languages as a run does.

    Raises:
        UserError: a text's languages are missing or unknown to a model of many languages, or given to a model of one
            direction.
    """
    directions = dict.fromkeys(segment.direction for segment in segments)
    if not run.config.data.multilingual:
        if {*directions} != {None}:
            raise UserError(f"--direction and --language-fields name directions, but {run.path} has one: omit them")
        return list(segments)
    if None in directions:
        raise UserError(
            f"{run.path} has many languages: name the test set's languages by --direction or --language-fields"
        )
    named = {name: named_direction(run, name) for name in directions if name is not None}
    return [segment._replace(direction=named[segment.direction or ""]) for segment in segments]


def named_direction(run: "tj.Run", direction: str) -> str:
    """Returns a direction with languages named as in the vocabulary of a run.

    Raises:
        UserError: the model does not have a language, or has several that it may be.
    """
    try:
        return str(Direction(*(find_language(run.tokenizers.target, name) for name in Direction.parse(direction))))
    except UserError as error:
        raise UserError(f"direction {direction}: {error}") from None


def _aligned(paths: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    """Yields the texts of each line of all files.

    Raises:
        UserError: one of the files has fewer lines.
    """
    for number, texts in enumerate(itertools.zip_longest(*map(_lines, paths)), 1):
        if None in texts:
            ended = paths[texts.index(None)]
            longer = next(path for path, text in zip(paths, texts, strict=True) if text is not None)
            raise UserError(
                f"{longer}, line {number}: has no partner, because {ended} ends after {counted(number - 1, 'line')}: "
                "the files must have one line for each source"
            )
        yield texts


def _lines(path: Path) -> Iterator[str]:
    for _, line in numbered_lines(path, BadLines()):
        assert line is not None
        yield line


def _segments(options: argparse.Namespace, direction: str | None) -> Iterator[Segment]:
    for place, record in _records(options.source):
        try:
            yield Segment("", ()) if record is None else _segment(record, options, direction)
        except ValueError as error:
            named = {options.source_field, options.document_field, *options.reference_field}
            lacking = {*named, *(options.language_fields or ())} - {None, *(record or ())}
            header = " (line 1 names the columns)" if lacking and options.source.name.endswith(TSV) else ""
            raise UserError(f"{place}: {error}{header}") from None


def _segment(record: Mapping[str, Any], options: argparse.Namespace, direction: str | None) -> Segment:
    references = []
    for field in options.reference_field:
        value = value_in(record, "--reference-field", field)
        texts = value if isinstance(value, list) else [value]
        references += [check_text(text, field) for text in texts if text not in ("", None)]
    source = text_in(record, "--source-field", options.source_field)
    if all(map(is_blank, (source, *references))):
        return Segment(source, tuple(references))
    if all(map(is_blank, references)):
        names = ", ".join(map(repr, options.reference_field))
        raise ValueError(f"has no reference in {names}: write one, or remove the record")
    if options.language_fields:
        codes = [clean_whitespace(text_in(record, "--language-fields", field)) for field in options.language_fields]
        try:
            direction = str(Direction.parse(str(Direction.of_codes(*codes))))
        except ValueError:
            shown, problem = " and ".join(map(repr, codes)), "must be two different codes, such as 'en' and 'pt_BR'"
            raise ValueError(f"the languages {shown} in the fields of --language-fields {problem}") from None
    document = None
    if options.document_field is not None:
        value = value_in(record, "--document-field", options.document_field)
        document = None if value is None else str(value)
    return Segment(source, tuple(references), direction, document)


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Yields the records of a file with their places, for messages; None for a blank line.

    Columns of TSV have the names in its first line.
    """
    header: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        place = f"{path}, line {number}"
        if number == 1 and path.name.endswith(TSV):
            header = line.split("\t")
            if twice := next((name for name in header if name and header.count(name) > 1), None):
                raise UserError(f"{place}: names two columns {twice!r}: rename one of them")
            continue
        try:
            filled = line.strip()
            yield place, None if not filled else _columns(line, header) if header else read_record(line, {}).record
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None


def _columns(line: str, header: Sequence[str]) -> dict[str, str]:
    cells = line.split("\t")
    if len(cells) != len(header):
        raise ValueError(f"has {counted(len(cells), 'column')} where the first line has {len(header)}")
    return dict(zip(header, cells, strict=True))
