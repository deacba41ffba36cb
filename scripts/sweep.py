"""Trains a config for each combination of settings: python scripts/sweep.py --config FILE --sweep "seed=0,1,2" """

from tformer_jax.cli.common import run_main
from tformer_jax.cli.sweep import main

if __name__ == "__main__":
    run_main(main)
