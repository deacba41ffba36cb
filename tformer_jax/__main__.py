"""`python -m tformer_jax COMMAND` runs the same as `tformer COMMAND`."""

from tformer_jax.cli.tformer import run

if __name__ == "__main__":
    run()
