"""Translates texts: python scripts/translate.py --run runs/translate_cldr_en_de 'March 3, 2026'"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.translate import main

if __name__ == "__main__":
    run_main(main)
