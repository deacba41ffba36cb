"""Trains a model: python scripts/train.py --config configs/translate_cldr.py"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.train import main

if __name__ == "__main__":
    run_main(main)
