"""Classifies texts: python scripts/classify.py --run DIR 'some text'"""

from tformer_jax.cli.classify import main
from tformer_jax.cli.common import run_main

if __name__ == "__main__":
    run_main(main)
