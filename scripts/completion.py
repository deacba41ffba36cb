"""Prints completions of the command tformer for a shell: python scripts/completion.py > tformer.bash"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.completion import main

    run_main(main)
