"""Serves a trained model over HTTP: python scripts/serve.py --run DIR"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.serve import main

    run_main(main)
