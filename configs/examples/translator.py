"""Trains a translator of dates, numbers and units, and uses it: python configs/examples/translator.py

Needs no files and no network; flags such as --config.train.steps=100 change settings.
"""

import sys
from pathlib import Path

import tformer_jax as tj
from tformer_jax.cli.config_file import read_config


def train(folder: Path, *changes: str) -> tj.Run:
    """Trains the config `translate_cldr` in `folder`, which is replaced, and returns the run."""
    return tj.train(read_config("translate_cldr:en-de", changes), run=folder, overwrite=True)


def main(runs: Path, *changes: str) -> None:
    """Trains the run `translator` in the folder `runs`, and prints outputs and scores."""
    run = train(runs / "translator", *changes)
    sources = ["Tuesday, March 3, 2026", "3:33 PM", "in 2 weeks"]
    for source, output in zip(sources, run.translate(sources), strict=True):
        print(f"{source} -> {output}")
    for output in run.outputs(["in 2 weeks"], 2, beams=4)[0]:
        print(f"beam search: {output.text} ({output.score:.3f})")
    for target in ("in 3 Wochen", "in 3 Tagen"):
        print(f"in 3 weeks -> {target}: ln p = {run.score([('in 3 weeks', target)])[0].total:.3f}")


if __name__ == "__main__":
    main(Path("runs"), *sys.argv[1:])
