"""Fills masked tokens: python scripts/fill_mask.py --run DIR 'a [MASK] film'"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.fill_mask import main

    run_main(main)
