"""Removes or adds tokens of a run's vocabulary: python scripts/vocabulary.py trim runs/NAME --output runs/OTHER"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.vocabulary import main

    run_main(main)
