"""`scripts/prepare_data.py`: tokenizes a corpus once and writes it as array_record files."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tformer_jax.base.errors import UserError
from tformer_jax.cli.common import add_data, add_number, add_path, check_writable_folder, new_parser, run_path
from tformer_jax.cli.config_file import read_config
from tformer_jax.cli.outputs import fact_differences
from tformer_jax.cli.tables import table_console
from tformer_jax.config import Config
from tformer_jax.config.fields import flag
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.corpora.prepared import check_files
from tformer_jax.data.prepare import EXAMPLES_PER_CHUNK, Summary, is_prepared, origin, prepare, stored_origin
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.data.transforms.show import TRIED, show_changes
from tformer_jax.runs.guards import locked

TOP = 64
"""Default of `--top`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Downloads the dataset with `--download`, prepares the corpus and prints its statistics, or shows transforms."""
    options, overrides = parser().parse_known_args(argv)
    cfg = read_config(options.config, overrides)
    check_flags(options)
    if options.teacher is not None:
        store_distributions(cfg, options)
        return
    given = _tokenizers(options.tokenizers) if options.tokenizers else None
    if options.output is not None:
        if options.resume and is_prepared(options.output):
            problem = difference(options.output, origin(cfg, options.data, given, options.shards))
            if problem is None:
                print(f"{options.output} is complete")
                return
            if not options.overwrite:
                raise UserError(f"{problem}: restore this, or add --overwrite to prepare it again")
        check_output_folder(options.output, overwrite=options.overwrite)
    if options.download:
        download_dataset(cfg, options.data, options.manual)
    if options.show:
        show_transforms(cfg, options.data, options.show, given)
    if options.output is None:
        return
    with locked_progress(options.output) as bar:
        tasks = {split: bar.add_task(split, total=None) for split in ("train", "validation", "test")}
        summaries = prepare(
            cfg,
            options.data,
            options.output,
            tokenizers=given,
            shards=options.shards,
            progress=lambda split, count: bar.advance(tasks[split], count),
        )
    table_console().print(summary_table(options.output, summaries))


def difference(folder: Path, now: Mapping[str, Any]) -> str | None:
    """Returns how prepared data differs from what a command with the origin `now` would write; None: it does not."""
    before = stored_origin(folder)
    if changes := fact_differences(before, {topic: now[topic] for topic in before}):
        return f"{folder} was prepared otherwise ({'; '.join(changes[:3])})"
    try:
        check_files(folder, json.loads((folder / "dataset.json").read_text(encoding="utf-8")))
    except DataError as error:
        return str(error).rpartition(": ")[0]
    return None


@contextlib.contextmanager
def locked_progress(output: Path) -> Iterator[Progress]:
    """Context that locks the folder to write; yields a bar for numbers of examples, which only a terminal shows."""
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} examples"), TimeElapsedColumn())
    hidden = sys.stderr is None or not sys.stderr.isatty()
    bar = Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True)
    with locked(output, "--output"), bar:
        yield bar


def store_distributions(cfg: Config, options: argparse.Namespace) -> None:
    """Stores the distributions of the run `--teacher`, or continues where an earlier command was interrupted.

    Raises:
        UserError: as `stored_teacher.store`, or the folder cannot be written.
    """
    check_writable_folder(options.output, "--output")
    from tformer_jax.runs import stored_teacher  # imports JAX

    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, teacher=str(options.teacher)))
    with locked_progress(options.output) as bar:
        if options.overwrite:
            stored_teacher.remove(options.output)
        task = bar.add_task("train", total=None)
        facts = stored_teacher.store(
            cfg,
            options.data,
            options.output,
            options.top or TOP,
            lambda size, count: bar.update(task, total=size, advance=count),
        )
    print(
        f"{options.output}: distributions of {facts['teacher']['run']} for {facts['labels']:,} labels; the "
        f"{facts['top']:,} stored tokens of a label have a probability of {facts['mass']:.4f} on average"
    )


def _tokenizers(folder: Path) -> Tokenizers:
    """Loads the tokenizers of a run folder, or of a folder of tokenizers."""
    if not folder.is_dir():
        raise UserError(f"--tokenizers {folder}: is not a folder")
    of_run = folder / "tokenizers"
    return Tokenizers.load(of_run if of_run.is_dir() else folder)


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate: `--config.SECTION.SETTING=VALUE`."""
    result = new_parser(
        "prepare_data",
        "Tokenizes the corpus of a config once. To train on it: --config.data.source=prepared "
        "--config.data.train=FOLDER, which gives the same batches as the corpus itself.",
    )
    result.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    add_path(result, "--output", "folder to write", unit="DIR")
    result.add_argument("--overwrite", action="store_true", help="replace what was written to --output before")
    result.add_argument(
        "--resume",
        action="store_true",
        help="do nothing if --output has been prepared from the same settings and files; prepare it if it is new",
    )
    shards = f"files per split; a split of fewer than {EXAMPLES_PER_CHUNK:,} examples has one"
    add_number(result, "--shards", shards, 1)
    add_path(
        result,
        "--tokenizers",
        "folder of tokenizers, such as a run's, to use instead of what the config describes; "
        "configs that read the output may then have any tokenizer settings",
        unit="DIR",
    )
    shown = "print N training examples before and after each transform of data.transforms; needs no --output"
    add_number(result, "--show", shown)
    result.add_argument(
        "--teacher",
        type=run_path,
        metavar="RUN",
        help="store the distributions of this run for the training examples of a config that reads prepared data, for "
        "train.teacher=OUTPUT; the same command continues after an interruption",
    )
    stored = f"--teacher: number of most probable tokens to store of each label (default: {TOP})"
    add_number(result, "--top", stored, unit="K")
    result.add_argument("--download", action="store_true", help="data.source='tfds': download and prepare the dataset")
    add_path(result, "--manual", "folder of manually downloaded files", unit="DIR")
    add_data(result, "data folder, or folder of TFDS's datasets")
    return result


def check_flags(options: argparse.Namespace) -> None:
    """Raises `UserError` for flags that lack another, or that have no effect with others."""
    if options.output is None and not (options.download or options.show):
        raise UserError("add --output DIR, the folder to which the prepared data is written")
    if options.manual and not options.download:
        raise UserError("--manual needs --download")
    if options.top is not None and options.teacher is None:
        raise UserError("--top needs --teacher RUN, whose distributions are stored")
    given = {name for name, value in vars(options).items() if value != parser().get_default(name)}
    if options.teacher is not None and (unused := given & {"download", "show", "tokenizers", "shards"}):
        raise UserError(f"{flag(min(unused))} is for examples: leave it out with --teacher")
    used = {"tokenizers"} if options.show else set()
    if options.output is None and (unused := given & {"tokenizers", "shards", "overwrite", "teacher"} - used):
        raise UserError(f"{flag(min(unused))} needs --output DIR, the folder to write")


def show_transforms(cfg: Config, root: Path | None, count: int, tokenizers: Tokenizers | None) -> None:
    """Prints training examples that each transform changes in the first epoch, before and after the change.

    Args:
        tokenizers: None: the corpus's tokenizers, or else tokenizers trained as the config says.

    Raises:
        UserError: the config has no transforms, or the data cannot be read.
    """
    if not cfg.data.transforms:
        raise UserError("--show needs transforms in data.transforms, such as ('case',)")
    corpus = load_corpus(cfg, root)
    if tokenizers is None:
        given = corpus.tokenizers
        tokenizers = Tokenizers.load(given) if given else train_tokenizers(cfg.data, corpus.train, root)
    for name, changes in show_changes(cfg, corpus, tokenizers, count):
        shown = [f"  {before}\n  -> {after}" for before, after in changes]
        print("\n".join([name, *(shown or [f"  changes none of the first {TRIED:,} examples"])]))


def check_output_folder(folder: Path, *, overwrite: bool) -> None:
    """Checks that prepared data may be written to a folder.

    Raises:
        UserError: the folder contains other files, or prepared data and `overwrite` is False, or cannot be created.
    """
    check_writable_folder(folder, "--output")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder with --output")
    if folder.exists() and any(folder.iterdir()):
        if not is_prepared(folder):
            raise UserError(f"{folder} contains files other than prepared data; choose another --output")
        if not overwrite:
            raise UserError(f"{folder} already holds prepared data: add --overwrite to replace it")


def download_dataset(cfg: Config, root: Path | None, manual: Path | None) -> None:
    """Downloads and prepares the dataset of the config with TFDS.

    Raises:
        UserError: the config does not read a TFDS dataset, or the dataset is not available.
    """
    if cfg.data.source != "tfds":
        raise cfg.data.error("source", "cannot be downloaded; --download needs data.source='tfds'")
    from tformer_jax.data.corpora import tfds  # TFDS takes half a second to import

    tfds.download(cfg, root, manual)


def summary_table(folder: Path, summaries: dict[str, Summary]) -> Table:
    """Returns a table of the examples, tokens, lengths and what is left out of each split."""
    headings = ("split", "examples", "tokens", "examples by length of the longer side", "left out")
    result = Table(*headings, title=escape(str(folder)))
    for split, summary in summaries.items():
        facts = dataclasses.asdict(summary)
        tokens = "\n".join(f"{key} {count:,}" for key, count in facts["tokens"].items())
        lengths = "\n".join(f"up to {length}: {count:,}" for length, count in sorted(facts["lengths"].items()))
        skipped = "\n".join(f"{count:,}: {problem}" for problem, count in facts["skipped"].items())
        result.add_row(split, f"{summary.examples:,}", tokens, lengths, escape(skipped) or "none")
    return result
