"""Imports a Hugging Face checkpoint as a run: python scripts/import_hf.py FOLDER --run runs/NAME"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.import_hf import main

    run_main(main)
