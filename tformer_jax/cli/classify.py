"""`scripts/classify.py`: labels texts with a trained classifier."""

import functools
from collections.abc import Sequence
from typing import Any

from tformer_jax.cli import lines
from tformer_jax.cli.common import load_run
from tformer_jax.cli.inputs import Line
from tformer_jax.data.characters import is_blank

Prediction = tuple[str, float]
NAMES = ("label", "probability")
"""Fields that are added to a record."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints label, probability and text of each text, tab-separated, in order; a blank line for a blank text."""
    parser = lines.make_parser("classify", "Labels texts with a trained classifier.")
    lines.add_field(parser)
    options = parser.parse_args(argv)
    source = lines.open_source(options)
    run = load_run(options)
    stream = functools.partial(run.classifier().stream, run.params)
    lines.process_lines(source, lines.Work(options, stream, plain, added, NAMES))


def plain(line: Line, prediction: Prediction) -> list[str]:
    """Returns the plain output: label, probability and text."""
    label, probability = prediction
    return ["" if is_blank(line.texts[0]) else f"{label}\t{probability:.4f}\t{line.texts[0]}"]


def added(line: Line, prediction: Prediction) -> dict[str, Any]:
    """Returns the fields to add to a record; a blank text has no label."""
    return dict(zip(NAMES, (None, None) if is_blank(line.texts[0]) else prediction, strict=True))
