"""`scripts/classify.py`: labels texts with a trained classifier."""

from collections.abc import Iterator, Sequence
from typing import Any

from tformer_jax.cli import lines
from tformer_jax.cli.common import load_run
from tformer_jax.cli.inputs import Line
from tformer_jax.inference.encoding import LongTexts

Found = tuple[str, float]
NAMES = ("label", "probability")
"""Fields that are added to a record."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints label, probability and text of each text, tab-separated, in order; a blank line for a blank text."""
    parser = lines.parser("classify", "Labels texts with a trained classifier.")
    lines.add_field(parser)
    options = parser.parse_args(argv)
    source = lines.opened(options, options.text)
    run = load_run(options.run, options.mesh)
    classifier, long_texts = run.classifier(), LongTexts(options.on_long_line)

    def results(found: Iterator[Line], skip: int) -> Iterator[Found]:
        texts = (line.texts[0] for line in found)
        return classifier.stream(run.params, texts, skip=skip, long_texts=long_texts)

    settings = {"command": {"field": options.field}}
    work = lines.Work(
        fields={"--field": options.field},
        settings=settings,
        results=results,
        plain=plain,
        added=added,
        names=NAMES,
        long_texts=long_texts,
    )
    lines.process(options, source, work)


def plain(line: Line, found: Found) -> list[str]:
    """Returns the plain output: label, probability and text."""
    label, probability = found
    return [f"{label}\t{probability:.4f}\t{line.texts[0]}" if line.texts[0].strip() else ""]


def added(line: Line, found: Found) -> dict[str, Any]:
    """Returns the fields to add to a record; a blank text has no label."""
    return dict(zip(NAMES, found if line.texts[0].strip() else (None, None), strict=True))
