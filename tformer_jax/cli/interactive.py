"""A prompt that answers each text as it is typed."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from tformer_jax.cli.inputs import checked_argument
from tformer_jax.config import ConfigError

with contextlib.suppress(ImportError):  # history and editing, where Python has them
    import readline  # noqa: F401

PROMPT = "> "


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag."""
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="ask for one text after another; Ctrl-C stops an output, Ctrl-D ends",
    )


def check(options: argparse.Namespace, texts: object) -> None:
    """Raises `ConfigError` where other flags contradict `--interactive`."""
    given = {"texts": texts, "--input": options.input, "--output": options.output, "--scores": options.scores}
    several = {"several outputs": options.outputs > 1, "--resume": options.resume}
    for name, value in {**given, **several}.items():
        if options.interactive and value:
            raise ConfigError(f"--interactive does not go together with {name}: leave one of them out")


def ask(answer: Callable[[str, int], Iterator[str]]) -> None:
    """Shows the pieces of `answer` to each text, as they come; its second argument counts the texts from 0.

    A text that cannot be answered is told why. Ctrl-C stops an answer, or forgets the line; Ctrl-D ends.
    """
    count = 0
    while True:
        try:
            text = input(PROMPT)
            if text.strip():
                _show(answer(checked_argument(text), count))
                count += 1
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except (ConfigError, UnicodeDecodeError) as error:
            print(f"error: {error}", file=sys.stderr)


def _show(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
