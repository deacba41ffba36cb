"""Trains a config for each combination of settings: python scripts/sweep.py --config FILE --sweep "seed=0,1,2" """

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.sweep import main

    run_main(main)
