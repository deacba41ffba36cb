"""Prints recommended XLA flags: export XLA_FLAGS="$(python scripts/xla_flags.py gpu fsdp)" """

from tformer_jax.cli.xla_flags import main

if __name__ == "__main__":
    main()
