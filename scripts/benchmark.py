"""Measures: python scripts/benchmark.py attention --length 16384"""

if __name__ == "__main__":
    from tformer_jax.cli.benchmark import main  # not above: processes that it starts import this file, but not JAX
    from tformer_jax.cli.common import run_main

    run_main(main)
