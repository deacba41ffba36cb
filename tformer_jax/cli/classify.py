"""`scripts/classify.py`: labels texts with a trained classifier."""

from collections.abc import Sequence

from tformer_jax.cli import common
from tformer_jax.config import ConfigError
from tformer_jax.inference.text import LabelClassifier


def main(argv: Sequence[str] | None = None) -> None:
    """One line a text, in the order of the texts: label, probability and text between tabs; blank for a blank text."""
    parser = common.lines_parser("classify.py", "Labels texts with a trained classifier.")
    options = parser.parse_args(argv)
    texts = common.read_texts(options)
    trained = common.load(options.run, "classifier")
    if trained.labels is None:
        raise ConfigError(f"{options.run} has lost its labels.json: train the model again")
    classify = LabelClassifier(trained.cfg, trained.model, trained.tokenizers, trained.labels)
    found = zip(texts, classify(trained.params, texts), strict=True)
    lines = (f"{label}\t{probability:.4f}\t{text}" if text.strip() else "" for text, (label, probability) in found)
    common.write_lines(lines, options.output)
