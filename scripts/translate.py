"""Translates texts: python scripts/translate.py --run runs/translate_cldr_en_de 'March 3, 2026'"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.translate import main

    run_main(main)
