"""`scripts/generate.py`: continues prompts with a trained language model."""

import argparse
from collections.abc import Sequence

from tformer_jax.cli import decoding, interactive, lines

SEPARATOR = "-" * 20 + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each prompt with its continuation, on one line for each sample.

    With --prompt, texts are printed unchanged, with a dashed line between samples.
    """
    options = parser().parse_args(argv)
    texts = [] if options.prompt is None else [options.prompt]
    interactive.check(options, texts)
    source = lines.opened(options, texts)
    from tformer_jax.cli import generation

    continuation = generation.load(options, "generate", "decoder_lm")
    if options.interactive:
        continuation.answer()
    elif texts and not options.output:
        (outputs,) = continuation.outputs(iter(texts))
        shown = (continuation.with_score(output, f"{options.prompt}{output.text}\n") for output in outputs)
        print(SEPARATOR.join(shown), end="")
    else:
        continuation.process(source, lambda prompt, output: prompt + output.text)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = lines.parser(
        "generate.py",
        "Continues prompts with a trained language model: greedily, or by sampling if --temperature, --top-k, "
        "--top-p or several --samples are given.",
        texts=False,
    )
    result.add_argument("--prompt", metavar="TEXT", help="text to continue (default: each line of the input)")
    decoding.add_all_flags(result, "decoder_lm")
    return result
