"""`scripts/translate.py`: translates texts with a trained model."""

import argparse
import dataclasses
from collections.abc import Sequence

from tformer_jax.cli import common
from tformer_jax.config import ConfigError, DecodeConfig
from tformer_jax.inference.text import Translator


def main(argv: Sequence[str] | None = None) -> None:
    """One translation a text, in the order of the texts, or several; a blank text gives blank lines."""
    options = parser().parse_args(argv)
    texts = common.read_texts(options)
    trained = common.load(options.run, "seq2seq")
    cfg = dataclasses.replace(trained.cfg, decode=decode_config(trained.cfg.decode, options))
    translate = Translator(cfg, trained.model, trained.tokenizers)
    if not (options.scores or options.n_best > 1):
        common.write_lines(translate(trained.params, texts), options.output)
        return
    found = translate.n_best(trained.params, texts)
    lines = (
        f"{score:.4f}\t{output}" if options.scores and text.strip() else output
        for text, outputs in zip(texts, found, strict=True)
        for output, score in outputs[: options.n_best]
    )
    common.write_lines(lines, options.output)


def decode_config(saved: DecodeConfig, options: argparse.Namespace) -> DecodeConfig:
    """The run's own settings with those of the command line; asking for several outputs or scores needs beams.

    Raises:
        ConfigError: more outputs than beams are asked for.
    """
    needed = options.n_best if options.n_best > 1 or options.scores else None
    beams = options.beams or (saved.beams if saved.strategy == "beam" else needed)
    if beams is None:
        return saved
    if options.n_best > beams:
        raise ConfigError(f"--n-best {options.n_best} needs at least as many beams: write --beams {options.n_best}")
    return dataclasses.replace(saved, strategy="beam", beams=beams)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = common.lines_parser("translate.py", "Translates texts with a trained model.")
    result.add_argument("--beams", type=common.whole(1), metavar="K", help="beam search with K beams (1: greedy)")
    result.add_argument("--n-best", type=common.whole(1), default=1, metavar="N", help="lines for each text")
    result.add_argument("--scores", action="store_true", help="write the score before each line, and a tab")
    return result
