"""`scripts/generate.py`: continues a prompt with a trained language model."""

import argparse
import dataclasses
from collections.abc import Sequence

from tformer_jax.cli import common
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.text import TextGenerator

SAMPLING = ("temperature", "top_k", "top_p")
SEPARATOR = "-" * 20 + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """The prompt with its continuation, once a sample, with a dashed line between two samples."""
    options = parser().parse_args(argv)
    prompt = common.checked_argument(options.prompt)
    trained = common.load(options.run, "decoder_lm")
    cfg = dataclasses.replace(trained.cfg, decode=decode_config(trained.cfg.decode, options))
    generate = TextGenerator(cfg, trained.model, trained.tokenizers)
    continuations = generate(trained.params, [prompt] * options.samples, seed=options.seed)
    print(SEPARATOR.join(f"{prompt}{continuation}\n" for continuation in continuations), end="")


def decode_config(saved: DecodeConfig, options: argparse.Namespace) -> DecodeConfig:
    """The run's own settings with those of the command line; asking for variety turns sampling on.

    Raises:
        ConfigError: a value is out of range.
    """
    given = {name: getattr(options, name) for name in (*SAMPLING, "max_new_tokens")}
    given = {name: value for name, value in given.items() if value is not None}
    if options.samples > 1 or any(name in given for name in SAMPLING):
        given["strategy"] = "sample"
    return dataclasses.replace(saved, **given)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = common.run_parser(
        "generate.py",
        "Continues a prompt with a trained language model: greedily, or by sampling where --temperature, --top-k, "
        "--top-p or several --samples are given.",
    )
    result.add_argument("--prompt", required=True, help="the text to continue")
    result.add_argument("--max-new-tokens", type=int, metavar="N", help="longest continuation, in tokens")
    result.add_argument("--temperature", type=float, metavar="T", help="logits are divided by it")
    result.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    result.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that hold mass P")
    result.add_argument("--samples", type=common.whole(1), default=1, metavar="N", help="number of continuations")
    result.add_argument("--seed", type=common.whole(0), default=0, metavar="S", help="of sampling")
    return result
