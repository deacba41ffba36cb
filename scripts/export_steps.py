"""Writes the steps of a run as StableHLO: python scripts/export_steps.py --run DIR FOLDER"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.lab.commands.export_steps import main

    run_main(main)
