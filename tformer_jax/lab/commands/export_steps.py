"""`scripts/export_steps.py`: writes the forward pass, the train step and decoding of a run as StableHLO.

https://docs.jax.dev/en/latest/export/export.html describes the files, which any process with JAX can call.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.checks import require
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import resolved
from tformer_jax.cli.common import add_number, check_new_folder, load_run, local_path, run_parser

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the programs, their arrays and a README.md to a new folder."""
    options = parser().parse_args(argv)
    folder: Path = options.folder
    check_new_folder(folder)
    require("scripts/export_steps.py", ("flatbuffers", "safetensors"), "stablehlo")
    from tformer_jax.lab.commands import step_programs
    from tformer_jax.runs import weights

    run = load_run(options)
    if weights.are_quantized(run.path):
        raise UserError(f"{run.path} has kernels of int8: export the run from which it was made")
    longest = run.config.model.max_length
    if options.length > longest:
        raise UserError(f"--length {options.length}: the model reads {longest} tokens; write at most that")
    if options.train and run.config.train.teacher is not None:
        raise UserError(
            f"--train: the step of {run.path} also takes the parameters of train.teacher={run.config.train.teacher!r}, "
            "which this command does not write: leave out --train"
        )
    if options.decode:
        _check_decoding(run, options.decode, 1 if run.model.reads_source else options.length)
    place = resolved(folder)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as name:
        unfinished = Path(name) / place.name
        unfinished.mkdir()
        step_programs.write_folder(unfinished, run, options)
        unfinished.replace(place)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "export_steps",
        "Writes the forward pass of a run (parameters and ids -> logits), and more with --decode and --train, as "
        "StableHLO, which any process with JAX can call without this package, with its parameters.",
    )
    result.add_argument("folder", type=local_path, metavar="FOLDER", help="folder to write, new or empty")
    for flag, default, meaning in (("--rows", 8, "rows of a batch"), ("--length", 64, "tokens of a row, with padding")):
        add_number(result, flag, meaning, default)
    add_number(
        result,
        "--decode",
        "write greedy decoding of N tokens, too: the pass over prompts or sources, and a step with its cache",
    )
    result.add_argument("--train", action="store_true", help="write the train step and its initial state, too")
    result.add_argument(
        "--platforms",
        nargs="+",
        choices=PLATFORMS,
        default=["cpu"],
        metavar="NAME",
        help=f"devices that the programs are for: {', '.join(PLATFORMS)} (default: cpu)",
    )
    return result


def _check_decoding(run: Any, new: int, read: int) -> None:
    """Raises `UserError` if a model does not decode, or has no room for `new` tokens after the `read` first ones."""
    if not run.model.decodes:
        raise UserError(
            f"--decode is for translators and language models, but {run.path} is a {run.config.model.family}"
        )
    room = run.config.model.max_length - read
    if new > room:
        raise UserError(f"--decode {new}: after {read} tokens, the model writes {room}; write at most that")
