"""Compares two runs: python scripts/compare.py runs/A runs/B"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.compare import main

    run_main(main)
