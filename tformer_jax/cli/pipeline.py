"""`scripts/pipeline.py`: runs the commands of a file in order, and continues where it was interrupted."""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.base.paths import replacing
from tformer_jax.cli.children import Children
from tformer_jax.cli.common import DATA_VARIABLE, USER_ERROR, add_data, new_parser
from tformer_jax.config.fields import nearest
from tformer_jax.data.corpora.lines import BadLines, read_text

RESUMED = ("train", "prepare_data", "translate", "generate", "classify", "score")
"""Commands that `--resume` continues; complete, they have nothing to do."""
READING = ("translate", "generate", "classify", "score")
"""Those that read and write texts."""
OTHERS = ("sweep",)
"""Commands that continue by themselves."""
COPY = "copy"
"""The step `copy FILE FILE`."""
DATA = "{data}"
"""Stands for the folder `--data` in a step."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs each step that is not done.

    Raises:
        UserError: a line of the file is no step.
        RunError: a step fails.
    """
    options = parser().parse_args(argv)
    steps = read_steps(options.steps, options.data)
    with Children() as children:
        for number, step in enumerate(steps, start=1):
            name = f"step {number} of {len(steps)}"
            print(f"{name}: {shlex.join(step)}", file=sys.stderr, flush=True)
            status = run_step(step, children, options.data)
            if children.stopped_by is not None:
                print("stopped: the same command continues with this step", file=sys.stderr)
                sys.exit(128 + children.stopped_by)
            if status:
                condition = "after its correction, " if status == USER_ERROR else ""
                advice = f"{condition}the same command continues with it"
                raise RunError(f"{name} ended with status {status}: {shlex.join(step)}; {advice}")


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "pipeline",
        "Runs commands in order: trains runs, translates texts with them, and trains others on the outputs. The same "
        "command continues after an interruption.",
    )
    result.add_argument(
        "steps",
        type=Path,
        metavar="STEPS",
        help=f"file with one step a line: {', '.join((*RESUMED, *OTHERS))} with their flags, or {COPY} FILE FILE; "
        f"{DATA} stands for the folder of --data, and # begins a comment",
    )
    add_data(result, f"folder that {DATA} stands for, and data folder of the steps")
    return result


def read_steps(path: Path, data: Path | None) -> list[list[str]]:
    """Reads the steps of a file: the words of each command.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or a line is no step or names `{data}` without a folder.
    """
    steps = []
    for line in read_text(path, BadLines()).replace("\r\n", "\n").replace("\\\n", " ").split("\n"):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}: {line!r}: {error}") from None
        if not words:
            continue
        if words[0] not in (allowed := (*RESUMED, *OTHERS, COPY)):
            hint = nearest(words[0], allowed) or f"; write {', '.join(allowed)}"
            raise UserError(f"{path}: {line!r} begins with no command of a step{hint}")
        if words[0] == COPY and len(words) != 3:
            raise UserError(f"{path}: {line!r} must read {COPY} FILE FILE")
        needed = ("--input", "--output") if words[0] in READING else ()
        given = {word.partition("=")[0] for word in words}
        if lacking := [flag for flag in needed if flag not in given]:
            raise UserError(f"{path}: {line!r} needs {' and '.join(lacking)} FILE, so that it can be continued")
        if DATA in line and data is None:
            raise UserError(f"{path}: {line!r} needs --data DIR, the folder that {DATA} stands for")
        steps.append([word.replace(DATA, str(data)) for word in words])
    if not steps:
        raise UserError(f"{path} has no step: write commands such as train --config FILE")
    return steps


def run_step(step: Sequence[str], children: Children, data: Path | None) -> int:
    """Runs a step, or the rest of it, and returns its exit status.

    Raises:
        RunError: a file cannot be copied.
    """
    command, *arguments = step
    if command == COPY:
        try:
            with replacing(Path(arguments[1])) as partial:
                shutil.copyfile(arguments[0], partial)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise RunError(f"{shlex.join(step)}: {reason}") from error
        return 0
    if command in RESUMED and "--resume" not in arguments:
        arguments.append("--resume")
    variables = {DATA_VARIABLE: str(data)} if data else {}
    return children.run([sys.executable, "-m", "tformer_jax", command, *arguments], env={**os.environ, **variables})
