"""Prepares a tokenized corpus: python scripts/prepare_data.py --config FILE --data DIR --output prepared/NAME"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.prepare_data import main

    run_main(main)
