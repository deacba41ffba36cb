"""Computes the log-probability of texts: python scripts/score.py --run DIR 'some text'"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.score import main

    run_main(main)
