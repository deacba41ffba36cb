"""Runs the commands of a file in order, and continues where it was interrupted: python scripts/pipeline.py STEPS"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.pipeline import main

    run_main(main)
