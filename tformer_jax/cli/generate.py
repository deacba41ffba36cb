"""`scripts/generate.py`: continues prompts with a trained language model."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tformer_jax.cli import decoding, interactive, lines
from tformer_jax.cli.inputs import Source

if TYPE_CHECKING:
    from tformer_jax.inference.outputs import Output

SEPARATOR = "-" * 20 + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each prompt with its continuation, on one line for each sample.

    Prompts on the command line are printed unchanged, with a dashed line between outputs.
    """
    options = parser().parse_args(argv)
    interactive.check(options)
    source = lines.opened(options)
    from tformer_jax.cli import generation

    continuation = generation.load(options, "generate", "decoder_lm")
    work, before = continuation.work(lambda prompt, output: prompt + output.text), 0
    if options.interactive:
        continuation.answer()
    elif options.text and not options.output:
        show(source, work)
    else:
        before = lines.process(source, work)
    continuation.report(before)


def show(source: Source, work: "lines.Work[list[Output]]") -> None:
    """Prints each prompt with its continuations, which may have several lines, as soon as they are known."""
    long, separator = lines.LongLines(source, work.long_texts), ""
    for index, (line, outputs) in enumerate(lines.results_of(source, work)):
        skipped = long.action(index) == "skip"
        for text in [""] * work.lines_per_text if skipped else work.plain(line, outputs):
            print(f"{separator}{text}", flush=True)
            separator = SEPARATOR
    long.report()


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = lines.parser(
        "generate",
        "Continues prompts with a trained language model. The decoding settings are those of the run; --temperature, "
        "--top-k, --top-p, --min-p or several --samples select sampling, --temperature 0 greedy decoding.",
    )
    decoding.add_all_flags(result, "decoder_lm")
    return result
