"""What every command shares: how it ends, and where its texts come from and go to."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from tformer_jax.config import ConfigError
from tformer_jax.data.corpora.files import read_lines
from tformer_jax.train.trained import Trained, load_trained

MISTAKE, INTERRUPTED = 2, 130


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs a command: a user's mistake becomes one sentence on stderr and exit status 2, Ctrl-C status 130."""
    try:
        main()
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def load(run: Path, family: str) -> Trained:
    """The trained model of a run.

    Raises:
        ConfigError: it is not a run folder, or its model is of another family.
    """
    trained = load_trained(run)
    if trained.cfg.model.family != family:
        commands = {"seq2seq": "translate.py", "decoder_lm": "generate.py", "classifier": "classify.py"}
        kind = trained.cfg.model.family
        raise ConfigError(f"{run} holds a {kind} model: use scripts/{commands[kind]}")
    return trained


def read_texts(arguments: list[str], file: Path | None) -> list[str]:
    """Texts from the command line, else the lines of a file (plain or .gz), else those of standard input.

    Raises:
        ConfigError: the file is missing, empty or not UTF-8, or both a file and arguments are given.
    """
    if arguments and file:
        raise ConfigError("give texts on the command line or with --input, not both")
    if arguments:
        return arguments
    if file is None:
        return _read_stdin()
    if not file.is_file():
        raise ConfigError(f"{file} does not exist")
    return read_lines(file)


def write_lines(lines: Iterable[str], file: Path | None) -> None:
    """Prints lines, or writes them to a file: all of them, or none.

    Raises:
        ConfigError: the folder of the file does not exist.
    """
    text = "".join(f"{line}\n" for line in lines)
    if file is None:
        sys.stdout.write(text)
        return
    if not file.parent.is_dir():
        raise ConfigError(f"folder {file.parent} does not exist: make it, or name another --output")
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _read_stdin() -> list[str]:
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"standard input, line {line}: not valid UTF-8") from error
