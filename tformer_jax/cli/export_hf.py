"""`scripts/export_hf.py`: saves a run for Hugging Face, CTranslate2 or PEFT, or as a run with weights of int8."""

import argparse
from collections.abc import Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.cli.common import check_new_folder, local_path, run_parser
from tformer_jax.config.layers import QUANTIZATIONS
from tformer_jax.interop import ctranslate2_models
from tformer_jax.interop.published_fields import DEFAULTS

FORMATS = ("huggingface", "ctranslate2", "peft", "run")
TYPES = {"ctranslate2": ctranslate2_models.QUANTIZATIONS, "run": QUANTIZATIONS}
"""Values of `--quantization` by format."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the model, its decoding settings, the tokenizer's files and a model card to a new folder."""
    export(parser().parse_args(argv))


def export(options: argparse.Namespace) -> None:
    """Does what `main` does, with the flags that were parsed.

    Raises:
        UserError: a flag has another value than the format allows, or as `checkpoint_export.save_run`.
    """
    for flag, value, choices in (("format", options.format, FORMATS), ("model-type", options.model_type, DEFAULTS)):
        if value is not None and value not in choices:
            raise UserError(f"--{flag} {value}: must be {', '.join(sorted(choices))}")
    if options.base and options.format != FORMATS[2]:
        raise UserError(f"--base is for --format {FORMATS[2]}: add it, or leave --base out")
    if options.quantization and options.format not in TYPES:
        raise UserError(f"--quantization is for --format {' or '.join(TYPES)}: add it, or leave --quantization out")
    if options.quantization and options.quantization not in TYPES[options.format]:
        raise UserError(f"--quantization must be {', '.join(TYPES[options.format])} for --format {options.format}")
    check_new_folder(options.folder)
    from tformer_jax.cli import checkpoint_export

    checkpoint_export.save_run(options)


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "export_hf",
        "Saves a run in the format of Hugging Face, CTranslate2 or PEFT, with its tokenizer and a model card, or as a "
        "run with weights of int8. For others, only a model that transformers computes identically is saved.",
    )
    result.add_argument("folder", type=local_path, metavar="FOLDER", help="folder to write, new or empty")
    result.add_argument(
        "--model-type",
        choices=sorted(DEFAULTS),
        help="architecture (default: the imported checkpoint's, or the first one that can represent the model)",
    )
    result.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="files to write: config.json and model.safetensors, or CTranslate2's model.bin, each with the tokenizer; "
        "or the adapter of a run of train.lora_rank; or a run folder whose kernels are stored as int8 "
        "(default: %(default)s)",
    )
    result.add_argument(
        "--base",
        metavar="NAME",
        help="folder of the checkpoint that the adapter changes, or its name on the Hub (default: the checkpoint from "
        "which train.start_from was imported)",
    )
    result.add_argument(
        "--quantization",
        choices=sorted({*ctranslate2_models.QUANTIZATIONS, *QUANTIZATIONS}),
        help="type of the weights in CTranslate2's model.bin (default: the parameters' own); --format run: "
        "int8_weights, the default, or int8, to multiply in int8 as well",
    )
    result.add_argument(
        "--license",
        metavar="NAME",
        help="licence that README.md names, as the Hugging Face Hub spells it, such as apache-2.0 (default: unknown)",
    )
    result.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not compare the run with the results of transformers and CTranslate2 (if installed) on the files",
    )
    return result
