"""Measures speed and memory: python scripts/benchmark.py attention --length 16384"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    # not at the top: spawned processes import this file and must not import JAX
    from tformer_jax.cli.common import run_main
    from tformer_jax.lab.commands.benchmark import main

    run_main(main)
