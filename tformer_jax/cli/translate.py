"""`scripts/translate.py`: translates texts with a trained model."""

import argparse
from collections.abc import Sequence

from tformer_jax.cli import decoding, interactive, lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one or several translations of each text, in order; a blank text gives blank lines."""
    options = parser().parse_args(argv)
    interactive.check(options)
    source = lines.opened(options)
    from tformer_jax.cli import generation

    translation = generation.load(options, "translate", "seq2seq")
    before = 0
    if options.interactive:
        translation.answer()
    else:
        before = lines.process(source, translation.work(lambda _, output: output.text))
    translation.report(before)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = lines.parser("translate", "Translates texts with a trained model.")
    decoding.add_all_flags(result, "seq2seq")
    return result
