"""Lists the configs that come with the package: python scripts/configs.py"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.configs import main

    run_main(main)
