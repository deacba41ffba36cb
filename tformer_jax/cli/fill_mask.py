"""`scripts/fill_mask.py`: fills the masked tokens of texts with a masked language model."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tformer_jax.cli import lines
from tformer_jax.cli.common import add_number, load_run
from tformer_jax.cli.inputs import Line

if TYPE_CHECKING:
    from tformer_jax.inference.fill_mask import Fill

NAMES = ("fills",)
"""Field that is added to a record."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the fills of each text with their probabilities, in order; blank lines for a blank text."""
    parser = lines.make_parser(
        "fill_mask",
        "Fills the masked tokens of texts, such as 'a [MASK] film', with a masked language model. Each text gives "
        "--top lines; the n-th one has the n-th most probable token of each mask.",
    )
    lines.add_field(parser)
    add_number(parser, "--top", "number of fills", 5)
    options = parser.parse_args(argv)
    source = lines.open_source(options)
    run = load_run(options)
    stream = functools.partial(run.mask_filler(top=options.top).stream, run.params)

    def plain(_: Line, fills: list["Fill"]) -> list[str]:
        return [f"{fill.probability:.4f}\t{fill.text}" for fill in fills] or [""] * options.top

    work = lines.Work(options, stream, plain, added, NAMES, settings=("top",), lines_per_text=options.top)
    lines.process_lines(source, work)


def added(_: Line, fills: list["Fill"]) -> dict[str, Any]:
    """Returns the field to add to a record."""
    return {NAMES[0]: [fill._asdict() for fill in fills]}
