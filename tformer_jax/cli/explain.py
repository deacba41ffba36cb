"""`scripts/explain.py`: explains the mechanisms of Transformers with pictures of a sentence."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.cli import report
from tformer_jax.report import html

NAME = "explain.html"
TEXT = "The cat sat on the mat because the cat was tired"
TARGET = "Die Katze saß auf der Matte, weil die Katze müde war"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page and prints its path."""
    options = parser().parse_args(argv)
    html.check_installed("this command")
    from tformer_jax.report.explain import page
    from tformer_jax.report.explain.topic import Example

    target = TARGET if options.target is None and options.text == TEXT else options.target
    example = Example.of(options.text, target)
    command = f"python scripts/explain.py {shlex.join(options.topics)} --text {shlex.quote(options.text)}"
    report.write_page(page.render(page.build(example, options.topics), example, command), options.output)
    print(options.output)


def parser() -> argparse.ArgumentParser:
    """Returns the parser."""
    result = argparse.ArgumentParser(
        prog="explain.py",
        description="Explains attention, positions, norms, feed-forward networks, training and decoding in one HTML "
        "file that needs no network: formulas, shapes, functions of this package, and pictures that they compute on a "
        "text. No trained model is needed.",
        allow_abbrev=False,
    )
    result.add_argument("topics", nargs="*", metavar="TOPIC", help="topics to explain, such as rope (default: all)")
    result.add_argument("--text", default=TEXT, help="the text of the pictures (default: %(default)s)")
    result.add_argument(
        "--target", help="its translation (default: that of the default text; of another text, its words backwards)"
    )
    result.add_argument(
        "--output",
        type=Path,
        default=Path(NAME),
        metavar="FILE",
        help="where the page is written (default: %(default)s)",
    )
    return result
