"""Prints recommended XLA flags: export XLA_FLAGS="$(python scripts/xla_flags.py gpu fsdp)" """

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.lab.commands.xla_flags import main

    run_main(main)
