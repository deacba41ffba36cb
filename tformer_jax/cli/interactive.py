"""An interactive prompt that answers each text as it is entered."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from tformer_jax.base.errors import UserError
from tformer_jax.cli.inputs import checked_argument
from tformer_jax.data.characters import is_blank

with contextlib.suppress(ImportError):  # line editing and history, if available
    import readline  # noqa: F401

PROMPT = "> "


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--interactive`."""
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="prompt for texts; Ctrl-C stops an output, Ctrl-D exits",
    )


def check(options: argparse.Namespace) -> None:
    """Raises `UserError` if other flags contradict `--interactive`."""
    others = {
        "texts": options.text,
        "--input": options.input,
        "--output": options.output,
        "--scores": options.scores,
        "several outputs": options.outputs > 1,
        "--resume": options.resume,
    }
    for name, given in others.items():
        if options.interactive and given:
            raise UserError(f"--interactive cannot be combined with {name}: omit one of them")


def ask(answer: Callable[[str, int], Iterator[str]]) -> None:
    """Prompts for texts, and prints the pieces of `answer(text, n)`, where n is the number of texts answered before.

    Errors are printed. Ctrl-C stops an answer or discards the line; Ctrl-D exits.
    """
    count = 0
    while True:
        try:
            text = input(PROMPT)
            if not is_blank(text):
                _show(answer(checked_argument(text), count))
                count += 1
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except (UserError, UnicodeDecodeError) as error:
            print(f"error: {error}", file=sys.stderr)


def _show(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
