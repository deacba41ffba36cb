"""Commands that map each line of their input to an output: flags, and the loop from input to output."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import resolved
from tformer_jax.cli import outputs
from tformer_jax.cli.common import add_path, add_weights, run_parser
from tformer_jax.cli.inputs import Line, Source
from tformer_jax.config.fields import flag
from tformer_jax.config.layers import MEANS
from tformer_jax.inference.encoding import ON_LONG, LongTextError, LongTexts, TextError
from tformer_jax.runs import run_folder

Result = TypeVar("Result")

TOO_LONG = "too_long"
"""Field of records of lines that are too long for the model: the action taken."""
DONE = {"truncate": "truncated", "skip": "skipped"}
"""What was done with a text that is too long for the model, by action."""


@dataclasses.dataclass(frozen=True)
class Work(Generic[Result]):
    """What a command computes from lines, and how it is written."""

    options: argparse.Namespace
    stream: Callable[..., Iterable[Result]]
    """Maps texts, or tuples of texts if there are several fields, to results, as `Translator.stream` does with these
    arguments: `stream(texts, skip=n, long_texts=...)`."""
    plain: Callable[[Line, Result], Sequence[str]]
    """Returns the lines to write for a result, always the same number."""
    added: Callable[[Line, Result], dict[str, Any]]
    """Returns the fields to add to the line's record if the output is .jsonl."""
    names: Sequence[str]
    """Fields that `added` returns."""
    fields: Sequence[str] = ("field",)
    """Options that name the fields of the texts in .jsonl; (): `stream` reads whole records."""
    settings: Sequence[str] = ()
    """Other options that determine the results, except the options of `make_parser`."""
    facts: outputs.Facts = dataclasses.field(default_factory=dict)
    """Other facts that determine the results."""
    lines_per_text: int = 1
    """Number of lines that `plain` returns."""
    as_json: bool = False
    """Write records also to an output that is not .jsonl."""

    @functools.cached_property
    def long_texts(self) -> LongTexts:
        """The policy for texts that are too long for the model, and the record of the long texts in `stream`."""
        return LongTexts(self.options.on_long_line)


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a command that processes lines, with the flags that all such commands share."""
    result = run_parser(command, description)
    add_weights(result)
    result.add_argument("text", nargs="*", help="input text (default: the lines of --input or of standard input)")
    add_path(result, "--input", "one text per line, or .jsonl; plain, .gz, .bz2, .xz, .lz4 or .zst")
    add_path(result, "--output", "text or .jsonl, plain or .gz (default: standard output)")
    result.add_argument("--resume", action="store_true", help="continue an interrupted --output, if any")
    result.add_argument(
        "--on-long-line",
        choices=ON_LONG,
        default="stop",
        help="what to do with a line that is too long for the model: stop with an error, truncate it, or skip it "
        "with a blank output (default: stop)",
    )
    return result


def add_field(parser: argparse.ArgumentParser, name: str = "text") -> None:
    """Adds the flag for the name of a .jsonl field."""
    option = "--field" if name == "text" else f"--{name}-field"
    parser.add_argument(option, default=name, metavar="NAME", help=f"field of the {name} in .jsonl (default: {name})")


def open_source(options: argparse.Namespace) -> Source:
    """Opens the input and checks the output, before a model is loaded.

    Raises:
        UserError: the input or the output does not fit the flags.
    """
    source = Source(options.text, options.input)
    outputs.check_output(options.output, options.input)
    if options.resume and not (options.output and source.is_file and not outputs.is_stream(options.output)):
        raise UserError("--resume needs --output FILE and --input FILE, which is read again")
    return source


def process_lines(source: Source, work: Work[Result], report: Callable[[int], None] = lambda before: None) -> int:
    """Writes the output of each line, in order, as soon as it is available, in bounded memory.

    Exits with 0 if `--resume` has nothing to do. After an error in a line, that line and later ones
    may be changed before the command is resumed.

    Args:
        report: is called at the end, also after an error, with the value that is returned.

    Returns:
        The number of lines whose outputs had been written by the command that is resumed.

    Raises:
        UserError: raised by the input, the output or the results; the outputs of all earlier lines are written.
        RunError: writing the output fails.
    """
    options, settings = work.options, settings_facts(work)
    if options.resume and outputs.is_complete(options.output, settings, source.identity):
        print(f"{options.output} is complete: remove it, or leave out --resume, to write it again", file=sys.stderr)
        sys.exit(0)
    as_json = work.as_json or outputs.is_json(options.output)
    lines_per_text = 1 if as_json else work.lines_per_text
    shown = bool(options.output) or sys.stdout is None or not sys.stdout.isatty()
    output_file = outputs.open_output(
        options.output, settings, source.identity, lines_per_text=lines_per_text, resume=options.resume
    )
    with output_file as output, contextlib.ExitStack() as on_exit:
        before = output.done
        on_exit.callback(report, before)
        long = on_exit.enter_context(LongLines(source, work.long_texts, before))
        progress = on_exit.enter_context(LinesProgress(source, done=before, shown=shown))
        for index, (line, result) in enumerate(pair_results(source, work, as_json, before), start=before):
            action = long.action(index)
            output.write([_record(work, line, result, action)] if as_json else _lines(work, line, result, action))
            progress.advance()
    return before


def settings_facts(work: Work[Any]) -> outputs.Facts:
    """Returns what determines the output, except the input."""
    names = (*work.fields, *work.settings, "on_long_line")
    command = {name: getattr(work.options, name) for name in names}
    if work.options.quantize:
        command["quantize"] = work.options.quantize
    facts = {"run": run_identity(work.options.run, work.options.step), "command": command, **work.facts}
    if work.options.ensemble:
        others = [run_identity(run) for run in work.options.ensemble]
        facts["ensemble"] = {"mean": work.options.mean or MEANS[0], "runs": others}
    return facts


class LongLines(contextlib.AbstractContextManager["LongLines"]):
    """Counts the lines that were too long for the model; as a context, reports them at its end, also after an error.

    Args:
        before: number of lines whose outputs an interrupted command has written, which are not counted.
    """

    def __init__(self, source: Source, texts: LongTexts, before: int = 0):
        self._source, self._texts, self._before = source, texts, before
        self._count, self._first = 0, 0

    def __exit__(self, *_: object) -> None:
        self.report()

    def action(self, index: int) -> str | None:
        """Returns the action taken for line `index` if it was too long, else None."""
        if not self._texts.pop(index):
            return None
        self._first = self._first if self._count else index
        self._count += 1
        return self._texts.action

    def report(self) -> None:
        """Prints the number of lines to stderr, if there are any."""
        if self._count:
            done, first = DONE[self._texts.action], self._source.location(self._first)
            after = f" after line {self._before:,}" if self._before else ""
            if self._count == 1:
                print(f"1 line{after} was too long for the model and was {done}: {first}", file=sys.stderr)
            else:
                lines = f"{self._count:,} lines{after} were too long for the model and were {done}"
                print(f"{lines}; the first is {first}", file=sys.stderr)


def pair_results(
    source: Source, work: Work[Result], as_json: bool = False, skip: int = 0
) -> Iterator[tuple[Line, Result]]:
    """Yields each line after the first `skip` ones with its result.

    Raises:
        UserError: raised by the input or the results.
    """
    waiting: collections.deque[Line] = collections.deque()
    fields = {flag(name): getattr(work.options, name) for name in work.fields}
    lines = _remember(source.lines(fields, (*work.names, TOO_LONG) if as_json else ()), waiting, skip)
    texts = (line.record if not fields else line.texts if len(fields) > 1 else line.texts[0] for line in lines)
    try:
        for result in work.stream(texts, skip=skip, long_texts=work.long_texts):
            yield waiting.popleft(), result
    except TextError as error:
        hint = ", or add --on-long-line truncate or skip" if isinstance(error, LongTextError) else ""
        raise UserError(f"{source.location(error.index)}: {error.problem}{hint}") from None


def _record(work: Work[Result], line: Line, result: Result, action: str | None) -> str:
    """Returns the record of a line; `action` says what was done if it is too long, else None."""
    added = dict.fromkeys(work.names) if action == "skip" else work.added(line, result)
    return outputs.format_record({**line.record, **added, **({TOO_LONG: action} if action else {})})


def _lines(work: Work[Result], line: Line, result: Result, action: str | None) -> list[str]:
    if action == "skip":
        return [""] * work.lines_per_text
    return [outputs.join_lines(text) for text in work.plain(line, result)]


def run_identity(run: Path, step: int | None = None) -> dict[str, Any]:
    """Returns facts that identify the weights of a run: the current ones, which change if training continues.

    Args:
        step: the step of the checkpoint that is used; None: the current weights.
    """
    if step is not None:
        provenance = (run / "provenance.json").read_bytes()
        return {"folder": str(resolved(run)), "files": hashlib.sha256(provenance).hexdigest(), "step": step}
    digest = hashlib.sha256()
    for path in (run / "config.json", run_folder.weights_json(run)):
        digest.update(path.read_bytes() if path.exists() else b"")
    checkpoints = run_folder.checkpoints(run)
    steps = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else []
    return {"folder": str(resolved(run)), "files": digest.hexdigest(), "checkpoints": steps}


def _remember(lines: Iterator[Line], waiting: collections.deque[Line], skip: int) -> Iterator[Line]:
    """Yields all lines; lines after the first `skip` are also added to `waiting`, until their results are available."""
    yield from itertools.islice(lines, skip)
    for line in lines:
        waiting.append(line)
        yield line


class LinesProgress:
    """Shows on a terminal the number of completed lines, lines/s and, if the size is known, the percentage read."""

    def __init__(self, source: Source, *, done: int, shown: bool = True, console: Console | None = None):
        console = console or Console(stderr=True)
        self._source, self._first, self._done = source, done, done
        self._shown = shown and console.is_terminal
        self._bar = Progress(
            TextColumn("{task.fields[lines]:,} lines"),
            TextColumn("{task.fields[speed]:,.0f} lines/s"),
            BarColumn(),
            TaskProgressColumn(show_speed=False),
            console=console,
            disable=not self._shown,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task("", total=source.size, lines=done, speed=0.0)

    def __enter__(self) -> "LinesProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Counts one more completed line."""
        self._done += 1
        if self._shown:
            elapsed = self._bar.tasks[0].elapsed or 0
            speed = (self._done - self._first) / elapsed if elapsed else 0
            self._bar.update(self._task, completed=self._source.position, lines=self._done, speed=speed)
