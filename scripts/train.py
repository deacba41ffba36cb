"""Trains a model: python scripts/train.py --config configs/translate_cldr.py"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.train import main

    run_main(main)
