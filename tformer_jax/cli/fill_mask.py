"""`scripts/fill_mask.py`: fills the masked tokens of texts with a masked language model."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tformer_jax.cli import lines
from tformer_jax.cli.common import integer, load_run
from tformer_jax.cli.inputs import Line
from tformer_jax.inference.encoding import LongTexts

if TYPE_CHECKING:
    from tformer_jax.inference.fill_mask import Fill

NAMES = ("fills",)
"""Field that is added to a record."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the fills of each text with their probabilities, in order; blank lines for a blank text."""
    parser = lines.parser(
        "fill_mask",
        "Fills the masked tokens of texts, such as 'a [MASK] film', with a masked language model. Each text gives "
        "--top lines; the n-th one has the n-th most probable token of each mask.",
    )
    lines.add_field(parser)
    parser.add_argument("--top", type=integer(1), default=5, metavar="N", help="number of fills (default: 5)")
    options = parser.parse_args(argv)
    source = lines.opened(options, options.text)
    run = load_run(options.run, options.mesh)
    filler, long_texts = run.mask_filler(top=options.top), LongTexts(options.on_long_line)

    def results(found: Iterator[Line], skip: int) -> Iterator[list["Fill"]]:
        texts = (line.texts[0] for line in found)
        return filler.stream(run.params, texts, skip=skip, long_texts=long_texts)

    def plain(_: Line, fills: list["Fill"]) -> list[str]:
        return [f"{fill.probability:.4f}\t{fill.text}" for fill in fills] or [""] * options.top

    settings = {"command": {"field": options.field, "top": options.top}}
    work = lines.Work(
        fields={"--field": options.field},
        settings=settings,
        results=results,
        plain=plain,
        added=added,
        names=NAMES,
        long_texts=long_texts,
        lines_per_text=options.top,
    )
    lines.process(options, source, work)


def added(_: Line, fills: list["Fill"]) -> dict[str, Any]:
    """Returns the field to add to a record."""
    return {NAMES[0]: [fill._asdict() for fill in fills]}
