"""`scripts/generate.py`: continues a prompt with a trained language model."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.cli import common
from tformer_jax.inference.text import TextGenerator

SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p")


def main(argv: Sequence[str] | None = None) -> None:
    """The prompt with its continuation, once a sample."""
    options = parser().parse_args(argv)
    trained = common.load(options.run, "decoder_lm")
    changed = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    sampled = {"temperature", "top_k", "top_p"} & set(changed) or options.samples > 1
    if sampled:
        changed["strategy"] = "sample"
    cfg = dataclasses.replace(trained.cfg, decode=dataclasses.replace(trained.cfg.decode, **changed))
    generate = TextGenerator(cfg, trained.model, trained.tokenizers)
    continuations = generate(trained.params, [options.prompt] * options.samples, seed=options.seed)
    common.write_lines((options.prompt + continuation for continuation in continuations), None)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = argparse.ArgumentParser(
        prog="generate.py",
        description="Continues a prompt with a trained language model: greedily, or by sampling where "
        "--temperature, --top-k, --top-p or several --samples are given.",
    )
    result.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder of scripts/train.py")
    result.add_argument("--prompt", required=True, help="the text to continue")
    result.add_argument("--max-new-tokens", type=int, help="longest continuation, in tokens")
    result.add_argument("--temperature", type=float, help="logits are divided by it")
    result.add_argument("--top-k", type=int, help="sample from the k most probable tokens")
    result.add_argument("--top-p", type=float, help="sample from the most probable tokens that hold this mass")
    result.add_argument("--samples", type=int, default=1, help="number of continuations")
    result.add_argument("--seed", type=int, default=0, help="of sampling")
    return result
