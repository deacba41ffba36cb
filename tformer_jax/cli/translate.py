"""`scripts/translate.py`: translates texts with a trained model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.cli import common
from tformer_jax.inference.text import Translator


def main(argv: Sequence[str] | None = None) -> None:
    """One translation a text, in the order of the texts; a blank text gives a blank translation."""
    options = parser().parse_args(argv)
    texts = common.read_texts(options.text, options.input)
    trained = common.load(options.run, "seq2seq")
    translate = Translator(trained.cfg, trained.model, trained.tokenizers)
    translations = iter(translate(trained.params, [text for text in texts if text.strip()]))
    common.write_lines((next(translations) if text.strip() else "" for text in texts), options.output)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = argparse.ArgumentParser(prog="translate.py", description="Translates texts with a trained model.")
    result.add_argument("text", nargs="*", help="what to translate (default: the lines of --input or standard input)")
    result.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder of scripts/train.py")
    result.add_argument("--input", type=Path, metavar="FILE", help="one text a line, plain or .gz")
    result.add_argument("--output", type=Path, metavar="FILE", help="where translations go (default: standard output)")
    return result
