"""Measures: python scripts/benchmark.py attention --length 16384"""

from tformer_jax.cli.benchmark import main
from tformer_jax.cli.common import run_main

if __name__ == "__main__":
    run_main(main)
