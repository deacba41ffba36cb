"""Prepares a tokenized corpus: python scripts/prepare_data.py --config FILE --data DIR --output prepared/NAME"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.prepare_data import main

if __name__ == "__main__":
    run_main(main)
