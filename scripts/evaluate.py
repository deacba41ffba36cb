"""Evaluates a trained model on a split of its data: python scripts/evaluate.py --run DIR --beams 5"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.evaluate import main

    run_main(main)
