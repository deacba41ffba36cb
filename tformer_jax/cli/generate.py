"""`scripts/generate.py`: continues prompts with a trained language model."""

import argparse
from collections.abc import Sequence

from tformer_jax.cli import decoding, interactive, lines

SEPARATOR = "-" * 20 + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each prompt with its continuation, on one line for each sample.

    Prompts on the command line are printed unchanged, with a dashed line between outputs.
    """
    options = parser().parse_args(argv)
    interactive.check(options, options.text)
    source = lines.opened(options, options.text)
    from tformer_jax.cli import generation

    continuation = generation.load(options, "generate", "decoder_lm")
    if options.interactive:
        continuation.answer()
    elif options.text and not options.output:
        found = zip(options.text, continuation.outputs(iter(options.text)), strict=True)
        shown = (
            continuation.with_score(output, f"{prompt}{output.text}\n")
            for prompt, outputs in found
            for output in outputs
        )
        print(SEPARATOR.join(shown), end="")
    else:
        continuation.process(source, lambda prompt, output: prompt + output.text)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = lines.parser(
        "generate.py",
        "Continues prompts with a trained language model: greedily, or by sampling if --temperature, --top-k, "
        "--top-p or several --samples are given.",
    )
    decoding.add_all_flags(result, "decoder_lm")
    return result
