"""Computes the log-probability of texts: python scripts/score.py --run DIR 'some text'"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.score import main

if __name__ == "__main__":
    run_main(main)
