"""Serves a trained model over HTTP: python scripts/serve.py --run DIR"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.serve import main

if __name__ == "__main__":
    run_main(main)
