"""`scripts/export_hf.py`: saves a run as a checkpoint in Hugging Face's format."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.base.errors import UserError
from tformer_jax.cli.common import check_writable_folder, run_parser
from tformer_jax.interop.published_fields import DEFAULTS


def main(argv: Sequence[str] | None = None) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files to a new folder."""
    options = parser().parse_args(argv)
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise UserError(f"{options.folder} already exists: name a new folder")
    check_writable_folder(options.folder, "FOLDER")
    from tformer_jax.cli import checkpoint_export

    checkpoint_export.save_run(options)


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "export_hf",
        "Saves a run as a checkpoint in Hugging Face's format, with its tokenizer and decoding settings. Only a model "
        "that transformers computes identically is saved.",
    )
    result.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write, new or empty")
    result.add_argument(
        "--model-type",
        choices=sorted(DEFAULTS),
        help="architecture (default: that of the imported checkpoint, or the first one that can represent the model)",
    )
    result.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not compare what transformers and CTranslate2, where installed, compute from the files with the run",
    )
    return result
