"""`scripts/import_hf.py`: imports a checkpoint as a run, from transformers or PyTorch."""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import check_replaceable, resolved
from tformer_jax.cli.common import add_mesh, add_number, add_path, new_parser, run_path
from tformer_jax.interop.published_fields import DEFAULTS
from tformer_jax.runs import run_folder


def main(argv: Sequence[str] | None = None) -> None:
    """Creates a run folder with the model, the tokenizers and the decoding settings of a checkpoint."""
    options = parser().parse_args(argv)
    check_place(options)
    if run_folder.holds_run(options.run) and not options.overwrite:
        raise UserError(f"{options.run} already holds a run: add --overwrite to replace it, or choose another --run")
    from tformer_jax.cli import checkpoint_import

    checkpoint_import.make_run(options)


def check_place(options: argparse.Namespace) -> None:
    """Raises `UserError` if the run would replace a file that is imported, or the working directory."""
    check_replaceable(options.run)
    run = resolved(options.run)
    for path in map(Path, (options.checkpoint, *(options.tokenizer or ()), *filter(None, (options.adapter,)))):
        if path.exists() and run in (path.resolve(), *path.resolve().parents):
            raise UserError(f"--run {options.run} would replace {path}, which is imported: choose another --run")


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "import_hf",
        "Creates a run folder from a checkpoint in Hugging Face's format (config.json, safetensors and the "
        f"tokenizer's files; architectures: {', '.join(sorted(DEFAULTS))}), from a GGUF file or Marian's .npz, or from "
        "a PyTorch state dict of nanoGPT, of fairseq's transformer, or of torch.nn.Transformer with the names of "
        "PyTorch's translation tutorial.",
    )
    result.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder, .gguf or .npz file, .pt file of torch.save, or model on the Hub, such as org/name",
    )
    result.add_argument("--run", type=run_path, required=True, metavar="DIR", help="run folder to make")
    add_path(result, "--adapter", "folder of an adapter of PEFT (LoRA), which is merged into the run", unit="DIR")
    add_mesh(result)
    result.add_argument(
        "--family",
        choices=("classifier", "masked_lm"),
        help="kind of model that an encoder's checkpoint becomes (default: masked_lm if it has that head, else "
        "classifier)",
    )
    add_number(
        result,
        "--max-length",
        "maximum number of tokens, for T5 and models with rotary positions, which have no maximum (default: "
        "n_positions or max_position_embeddings of config.json, or the length for which YaRN scales)",
    )
    state_dict = result.add_argument_group("state dicts")
    add_path(
        state_dict,
        "--tokenizer",
        "tokenizer.json, tokenizer of a run folder, fairseq's dict.LANGUAGE.txt, or another .txt, whose "
        "characters are the vocabulary; two files for a pair, the first of the source",
        nargs="+",
    )
    state_dict.add_argument(
        "--model-args",
        type=_argument,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of the model that the file lacks, such as n_head=6, nhead=8 or norm_first=True",
    )
    result.add_argument("--overwrite", action="store_true", help="replace the run in --run")
    return result


def _argument(text: str) -> tuple[str, Any]:
    """Returns the name and the value, a Python literal or a word, of NAME=VALUE; an argparse type."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
