"""Saves a run as a Hugging Face checkpoint: python scripts/export_hf.py --run DIR FOLDER"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.export_hf import main

    run_main(main)
