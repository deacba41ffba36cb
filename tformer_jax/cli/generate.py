"""`scripts/generate.py`: continues prompts with a trained language model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tformer_jax.cli import chats, generation, lines
from tformer_jax.cli.inputs import Source

if TYPE_CHECKING:
    from tformer_jax.inference.outputs import Output

SEPARATOR = "-" * 20 + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each prompt with its continuation, or the answer to each conversation, on one line for each sample.

    Prompts on the command line are printed unchanged, with a dashed line between outputs.
    """
    parser = generation.make_parser(
        "generate",
        "Continues prompts with a trained language model and the run's decoding settings. --temperature, --top-k, "
        "--top-p, --min-p or several --samples select sampling, --temperature 0 greedy decoding.",
        "--samples",
    )
    chats.add_flags(parser)
    options = parser.parse_args(argv)
    shown = "" if options.chat else "{}"
    generation.run_command(
        options, "generate", lambda prompt, output: shown.format(prompt) + output.text, print_outputs
    )


def print_outputs(source: Source, work: "lines.Work[list[Output]]") -> None:
    """Prints each prompt with its continuations, which may have several lines, as soon as they are available."""
    separator = ""
    with lines.LongLines(source, work.long_texts) as long:
        for index, (line, outputs) in enumerate(lines.pair_results(source, work)):
            skipped = long.action(index) == "skip"
            for text in [""] * work.lines_per_text if skipped else work.plain(line, outputs):
                print(f"{separator}{text}", flush=True)
                separator = SEPARATOR
