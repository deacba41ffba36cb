"""`scripts/translate.py`: translates texts with a trained model."""

from collections.abc import Sequence

from tformer_jax.cli import common
from tformer_jax.inference.text import Translator


def main(argv: Sequence[str] | None = None) -> None:
    """One translation a text, in the order of the texts; a blank text gives a blank line."""
    parser = common.lines_parser("translate.py", "Translates texts with a trained model.")
    options = parser.parse_args(argv)
    texts = common.read_texts(options)
    trained = common.load(options.run, "seq2seq")
    translate = Translator(trained.cfg, trained.model, trained.tokenizers)
    common.write_lines(translate(trained.params, texts), options.output)
