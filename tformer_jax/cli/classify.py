"""`scripts/classify.py`: labels texts with a trained classifier."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.cli import common
from tformer_jax.config import ConfigError
from tformer_jax.inference.text import LabelClassifier


def main(argv: Sequence[str] | None = None) -> None:
    """One line a text, in the order of the texts: label, probability and text between tabs."""
    options = parser().parse_args(argv)
    texts = common.read_texts(options.text, options.input)
    trained = common.load(options.run, "classifier")
    if trained.labels is None:
        raise ConfigError(f"{options.run} has lost its labels.json")
    classify = LabelClassifier(trained.cfg, trained.model, trained.tokenizers, trained.labels)
    found = zip(classify(trained.params, texts), texts, strict=True)
    common.write_lines((f"{label}\t{probability:.4f}\t{text}" for (label, probability), text in found), options.output)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = argparse.ArgumentParser(prog="classify.py", description="Labels texts with a trained classifier.")
    result.add_argument("text", nargs="*", help="what to classify (default: the lines of --input or standard input)")
    result.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder of scripts/train.py")
    result.add_argument("--input", type=Path, metavar="FILE", help="one text a line, plain or .gz")
    result.add_argument("--output", type=Path, metavar="FILE", help="where labels go (default: standard output)")
    return result
