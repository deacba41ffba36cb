"""Commands that map each line of their input to an output: flags, and the loop from input to output."""

import argparse
import collections
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from tformer_jax.cli import outputs
from tformer_jax.cli.common import run_parser
from tformer_jax.cli.inputs import Fields, Line, Source
from tformer_jax.cli.progress import LinesProgress
from tformer_jax.config import ConfigError
from tformer_jax.train import run_folder

Result = TypeVar("Result")


class Work(NamedTuple, Generic[Result]):
    """Functions and settings of a command that processes lines."""

    fields: Fields
    settings: outputs.Facts
    """Everything that determines the results, besides the run and the input."""
    results: Callable[[Iterator[Line], int], Iterable[Result]]
    """Returns the results of the lines, in order, without those of the given number of first lines."""
    plain: Callable[[Line, Result], Sequence[str]]
    """Returns the lines to write for a result, always the same number."""
    added: Callable[[Line, Result], dict[str, Any]]
    """Returns the fields to add to the line's record if the output is .jsonl."""
    names: Sequence[str] = ()
    """Fields that `added` may return."""
    lines_a_text: int = 1
    """Number of lines that `plain` returns."""


def parser(prog: str, description: str, *, texts: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of such a command; with `texts`, positional arguments are input lines."""
    result = run_parser(prog, description)
    if texts:
        result.add_argument("text", nargs="*", help="input text (default: the lines of --input or of standard input)")
    result.add_argument("--input", type=Path, metavar="FILE", help="one text per line, or .jsonl; plain or .gz")
    result.add_argument(
        "--output", type=Path, metavar="FILE", help="text or .jsonl, plain or .gz (default: standard output)"
    )
    result.add_argument("--resume", action="store_true", help="continue an interrupted --output, if any")
    return result


def add_field(parser: argparse.ArgumentParser, name: str = "text") -> None:
    """Adds the flag for the name of a .jsonl field."""
    flag = "--field" if name == "text" else f"--{name}-field"
    parser.add_argument(flag, default=name, metavar="NAME", help=f"field of the {name} in .jsonl (default: {name})")


def opened(options: argparse.Namespace, texts: Sequence[str]) -> Source:
    """Opens the input and checks the output, before a model is loaded; exits with 0 if `--resume` has nothing to do.

    Raises:
        ConfigError: the input or the output does not fit the flags.
    """
    source = Source(texts, options.input)
    outputs.check(options.output, options.input)
    if options.resume and not (options.output and source.is_file and not outputs.is_stream(options.output)):
        raise ConfigError("--resume needs --output FILE and --input FILE, which is read again")
    if options.resume and options.output.exists() and not outputs.partial_of(options.output.resolve()).exists():
        print(f"{options.output} is complete: leave out --resume to write it again", file=sys.stderr)
        sys.exit(0)
    return source


def process(options: argparse.Namespace, source: Source, work: Work[Result]) -> int:
    """Writes the output of each line, in order, as soon as it is available; keeps no line that is written.

    Returns:
        The number of lines whose outputs had been written by the command that is resumed.

    Raises:
        ConfigError: raised by the input, the output or the results; the outputs of all earlier lines are written.
        RunError: writing the output fails.
    """
    as_json = outputs.is_json(options.output)
    lines_a_text = 1 if as_json else work.lines_a_text
    facts = {**work.settings, "input": source.identity(), "run": run_identity(options.run)}
    shown = bool(options.output) or sys.stdout is None or not sys.stdout.isatty()
    with (
        outputs.opened(options.output, facts, lines_a_text=lines_a_text, resume=options.resume) as output,
        LinesProgress(source, done=output.done, shown=shown) as progress,
    ):
        before = output.done
        waiting: collections.deque[Line] = collections.deque()
        found = source.lines(work.fields, work.names if as_json else ())
        results = work.results(_kept(found, waiting, before), before)
        for result in results:
            line = waiting.popleft()
            if as_json:
                output.write([outputs.as_json({**line.record, **work.added(line, result)})])
            else:
                output.write([outputs.as_line(text) for text in work.plain(line, result)])
            progress.advance()
    return before


def run_identity(run: Path) -> dict[str, Any]:
    """Returns what identifies the current weights of a run; they change if training continues."""
    found = hashlib.sha256()
    for path in (run / "config.json", run_folder.weights_facts(run)):
        found.update(path.read_bytes() if path.exists() else b"")
    steps = sorted(path.name for path in run_folder.checkpoints(run).iterdir())
    return {"folder": str(run.resolve()), "files": found.hexdigest(), "checkpoints": steps}


def _kept(lines: Iterator[Line], waiting: collections.deque[Line], skip: int) -> Iterator[Line]:
    """Yields all lines, and adds those after the first `skip` lines to `waiting`, until their results are available."""
    yield from itertools.islice(lines, skip)
    for line in lines:
        waiting.append(line)
        yield line
