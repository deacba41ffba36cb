"""Shows the parameters, FLOPs and memory of a model: python scripts/describe.py --config configs/translate_cldr.py"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.describe import main

if __name__ == "__main__":
    run_main(main)
