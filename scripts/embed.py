"""Embeds texts: python scripts/embed.py --run DIR 'some text'"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.embed import main

    run_main(main)
