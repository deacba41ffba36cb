"""`scripts/explain.py`: explains the mechanisms of Transformers with figures of a sentence."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.cli.common import add_path, add_run, check_writable, load_run, new_parser, write_output

NAME = "explain.html"
TEXT = "The cat sat on the mat because the cat was tired"
TARGET = "Die Katze saß auf der Matte, weil die Katze müde war"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page and prints its path."""
    options = parser().parse_args(argv)
    checks.require_pages("this command")
    check_writable(options.output, "--output")
    from tformer_jax.lab.explain import page
    from tformer_jax.lab.explain.topic import Example
    from tformer_jax.lab.explain.trained import default_text, trained_example

    arguments, name = options.topics, ""
    if options.run is None:
        if unused := [name for name in ("step", "mesh") if getattr(options, name) is not None]:
            raise UserError(f"--{unused[0]} needs --run")
        text = TEXT if options.text is None else options.text
        example = Example.from_text(text, TARGET if options.target is None and text == TEXT else options.target)
        trained = None
    else:
        run = load_run(options)
        text = default_text(run, TEXT) if options.text is None else options.text
        example, trained = trained_example(run, text, options.target)
        step = [] if options.step is None else ["--step", str(options.step)]
        arguments, name = [*arguments, "--run", str(options.run), *step], trained.name
    arguments = [*arguments, "--text", text, *(["--target", options.target] if options.target is not None else [])]
    command = shlex.join(["python", "scripts/explain.py", *arguments])
    topics = page.build_topics(example, options.topics, trained)
    write_output(options.output, page.render_topics(topics, example, command, name))
    print(options.output)


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "explain",
        "Explains attention, positions, norms, feed-forward networks, training and decoding in one HTML "
        "file that needs no network: formulas, shapes, functions of this package, and figures that they compute on a "
        "text. No trained model is needed; --run adds the figures of one.",
    )
    result.add_argument("topics", nargs="*", metavar="TOPIC", help="topics to explain, such as rope (default: all)")
    add_run(
        result,
        required=False,
        meaning="a run folder: its tokenizer splits the text, and its weights compute figures of attention, the "
        "residual stream and beam search",
    )
    result.add_argument("--text", help=f"the text of the figures (default: {TEXT}; with --run, a held-out text)")
    result.add_argument(
        "--target",
        help="translation of the text (default: for the default text, a fixed one; with a translator, its output; "
        "otherwise, the tokens of the text reversed)",
    )
    add_path(result, "--output", "where the page is written (default: %(default)s)", default=Path(NAME))
    return result
