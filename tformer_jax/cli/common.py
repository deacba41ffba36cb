"""What the commands share: how they end, and where their texts come from and go to."""

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from tformer_jax.config import ConfigError
from tformer_jax.data.corpora.lines import read_lines
from tformer_jax.train.errors import RunError
from tformer_jax.train.trained import Trained, load_trained

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130
COMMANDS = {"seq2seq": "translate.py", "decoder_lm": "generate.py", "classifier": "classify.py"}
"""The script that uses a model, by its family."""


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs a command; it ends with one sentence on stderr and a status.

    2 for a user's mistake, 1 for a run that cannot go on, 130 for Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what it is told to do
    try:
        main()
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
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
    kind = trained.cfg.model.family
    if kind != family:
        raise ConfigError(f"{run} holds a {kind} model: use scripts/{COMMANDS[kind]}")
    return trained


def run_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flag that names the run folder."""
    result = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    result.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder of scripts/train.py")
    return result


def lines_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command that turns each text into one line."""
    result = run_parser(prog, description)
    result.add_argument("text", nargs="*", help="a text; without any, the lines of --input or of standard input")
    result.add_argument("--input", type=Path, metavar="FILE", help="one text a line, plain or .gz")
    result.add_argument("--output", type=Path, metavar="FILE", help="written whole or not (default: standard output)")
    return result


def whole(lowest: int) -> Callable[[str], int]:
    """An argparse type: a number from `lowest` to 2^31 - 1."""

    def number(text: str) -> int:
        value = int(text)
        if not lowest <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {lowest} on")
        return value

    return number


def read_texts(options: argparse.Namespace) -> list[str]:
    """The texts that the flags of `lines_parser` name.

    Raises:
        ConfigError: the input is missing, empty or not UTF-8, is named twice, or the output has no folder to go to.
    """
    if options.output and not options.output.absolute().parent.is_dir():
        raise ConfigError(f"folder {options.output.parent} does not exist: make it, or name another --output")
    if options.output and options.output.is_dir():
        raise ConfigError(f"{options.output} is a folder: name a file with --output")
    if options.text and options.input:
        raise ConfigError("give texts on the command line or with --input, not both")
    if options.text:
        return [checked_argument(text) for text in options.text]
    if options.input is None:
        return _read_stdin()
    if not options.input.is_file():
        raise ConfigError(f"{options.input} does not exist")
    return read_lines(options.input)


def checked_argument(text: str) -> str:
    """`text` itself.

    Raises:
        ConfigError: the shell passed bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("a text on the command line is not valid UTF-8") from None
    return text


def write_lines(texts: Iterable[str], file: Path | None) -> None:
    """Prints each text on one line (line breaks inside it become spaces), or writes them to a file: all, or none.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = "".join(re.sub(r"[\r\n]+", " ", text) + "\n" for text in texts)
    if file is None:
        sys.stdout.write(lines)
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(lines, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _read_stdin() -> list[str]:
    raw = sys.stdin.buffer.read()
    try:
        lines = raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"standard input, line {number}: not valid UTF-8") from error
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
