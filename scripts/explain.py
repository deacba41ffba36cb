"""Explains Transformers with figures: python scripts/explain.py --text "some text" """

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.lab.commands.explain import main

    run_main(main)
