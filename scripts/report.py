"""Shows runs in one HTML file: python scripts/report.py runs/NAME"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.report import main

    run_main(main)
