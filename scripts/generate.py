"""Continues prompts: python scripts/generate.py --run DIR --prompt 'def '"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.generate import main

if __name__ == "__main__":
    run_main(main)
