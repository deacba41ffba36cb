"""`scripts/import_hf.py`: makes a run folder of a checkpoint in Hugging Face's format."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.cli.common import add_mesh, run_path
from tformer_jax.config import ConfigError
from tformer_jax.interop.published import DEFAULTS
from tformer_jax.train import run_folder


def main(argv: Sequence[str] | None = None) -> None:
    """Makes a run folder with the model, the tokenizers and the decoding settings of a checkpoint."""
    options = parser().parse_args(argv)
    if run_folder.holds_run(options.run) and not options.overwrite:
        raise ConfigError(f"{options.run} already holds a run: add --overwrite to replace it, or name another --run")
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder: name the local folder of a checkpoint")
    from tformer_jax.cli import checkpoints

    checkpoints.make_run(options.folder, options.run, options.mesh)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = argparse.ArgumentParser(
        prog="import_hf.py",
        description="Makes a run folder of a checkpoint in Hugging Face's format: config.json, safetensors and the "
        f"tokenizer's files. Architectures: {', '.join(sorted(DEFAULTS))}.",
        allow_abbrev=False,
    )
    result.add_argument("folder", type=Path, metavar="FOLDER", help="local folder of the checkpoint")
    result.add_argument("--run", type=run_path, required=True, metavar="DIR", help="run folder to make")
    add_mesh(result)
    result.add_argument("--overwrite", action="store_true", help="replace the run in --run")
    return result
