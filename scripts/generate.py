"""Continues prompts: python scripts/generate.py --run DIR 'def '"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.generate import main

    run_main(main)
