"""`scripts/benchmark.py`: reproducible measurements of training, decoding, caches, attention, data and growth."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from tformer_jax.base.cpu import run_in_calling_thread
from tformer_jax.base.errors import UserError
from tformer_jax.cli.common import add_data, add_number, add_path, add_seconds, check_writable, integer, new_parser
from tformer_jax.cli.config_file import read_config
from tformer_jax.config.layers import DTYPES
from tformer_jax.lab.benchmarks import paged, train_cases
from tformer_jax.lab.benchmarks.attention import attention_cases
from tformer_jax.lab.benchmarks.data import data_cases
from tformer_jax.lab.benchmarks.decode import add_flags, measure_decoding
from tformer_jax.lab.benchmarks.growth import GROWTHS, measure_growth
from tformer_jax.lab.benchmarks.memory import measure_memory
from tformer_jax.lab.benchmarks.operations import measure_operations
from tformer_jax.lab.benchmarks.train import measure_training
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.runs import provenance, run_folder

ROUNDS = 5
"""Default number of rounds of the comparison with PyTorch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one benchmark, prints its results, and writes them to `--record`."""
    options, overrides = parser().parse_known_args(argv)
    if overrides and not vars(options).get("config"):
        raise UserError(f"unexpected argument {overrides[0]!r}")
    if options.record:
        check_writable(options.record)
    run_in_calling_thread()
    results = run_benchmark(options, overrides)
    if options.record:
        run_folder.write_json(options.record, provenance.collect() | results)


def run_benchmark(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs the chosen benchmark and returns its results."""
    if options.benchmark == "decode":
        return measure_decoding(options)
    if options.benchmark == "data":
        return {"cases": data_cases(read_config(options.config, overrides), options)}
    if options.benchmark == "train":
        instead = "--operations" if options.operations else "--memory" if options.memory else None
        if instead and options.rounds:
            raise UserError(f"--rounds is for the comparison with PyTorch: leave it out with {instead}")
        cases = training_cases(options, overrides)
        if options.operations:
            return measure_operations(cases, options.steps)
        if options.memory:
            return measure_memory(cases, options.steps)
        return measure_training(cases, options.rounds or ROUNDS, options.steps)
    if options.benchmark == "paged":
        return paged.measure_paged(options)
    if options.benchmark == "growth":
        return measure_growth(options.only, options.steps)
    return {"cases": attention_cases(options)}


def training_cases(options: argparse.Namespace, overrides: Sequence[str]) -> list[Case]:
    """Returns the cases of `--case` or `--config`, with the dtype of `--dtype` if it is given."""
    if options.config:
        cases = [train_cases.config_case(read_config(options.config, overrides))]
    else:
        cases = [named_case(name) for name in options.case]
    return [train_cases.with_model(case, dtype=options.dtype or case.cfg.model.dtype) for case in cases]


def named_case(name: str) -> Case:
    """Returns the case `name` of `--case`."""
    if name in train_cases.PUBLISHED:
        return train_cases.published_case(name)
    return train_cases.built_in_case(name, read_config(str(train_cases.CONFIGS / train_cases.BUILT_IN[name].config)))


def parser() -> argparse.ArgumentParser:
    """Returns the parser, with one subcommand per benchmark."""
    result = new_parser(
        "benchmark", "Measures training, decoding, caches, attention, the data pipeline, and how training cost scales."
    )
    commands = result.add_subparsers(dest="benchmark", required=True)
    for name, (meaning, add) in BENCHMARKS.items():
        command = commands.add_parser(name, help=meaning)
        add(command)
        add_path(command, "--record", "write the result to this JSON file")
    return result


def _add_attention(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backends",
        nargs="+",
        default=["blockwise", "reference"],
        metavar="NAME",
        help="values of model.attention_backend (default: blockwise reference)",
    )
    command.add_argument(
        "--length", type=integer(1), nargs="+", default=[16_384], metavar="T", help="sequence length (default: 16384)"
    )
    add_number(command, "--batch", "batch size", 1, unit="B")
    add_number(command, "--repeat", "runs after one warm-up run; the median is shown", 1, unit="R")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of inputs (default: float32)")
    add_number(command, "--heads", "number of heads", 4)
    command.add_argument("--forward", action="store_true", help="omit the backward pass")
    add_number(command, "--head-dim", "head size", 64, unit="H")


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    add_number(command, "--workers", "loader processes to compare with a loader thread", 2, lowest=0)
    add_seconds(command, "--seconds", "seconds per measurement", 5)
    add_data(command)


def _add_paged(command: argparse.ArgumentParser) -> None:
    for name, (default, meaning) in paged.FLAGS.items():
        add_number(command, f"--{name}", meaning, default)


def _add_train(command: argparse.ArgumentParser) -> None:
    cases = command.add_mutually_exclusive_group()
    cases.add_argument(
        "--case",
        nargs="+",
        choices=train_cases.NAMES,
        default=train_cases.CPU_CASES,
        metavar="NAME",
        help=f"one or more of {', '.join(train_cases.NAMES)} (default: {', '.join(train_cases.CPU_CASES)})",
    )
    cases.add_argument("--config", metavar="FILE[:VARIANT]", help="any config instead, with random tokens")
    command.add_argument("--dtype", choices=DTYPES, help="compute dtype (default: the config's)")
    instead = command.add_mutually_exclusive_group()
    instead.add_argument("--operations", action="store_true", help="show the time per operation and module instead")
    instead.add_argument(
        "--memory", action="store_true", help="show what holds the memory, by stage and module, instead"
    )
    add_number(command, "--rounds", f"rounds per system (default: {ROUNDS})")
    add_number(command, "--steps", "measured steps per round", 5)


def _add_growth(command: argparse.ArgumentParser) -> None:
    names = list(GROWTHS)
    command.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"one or more of {', '.join(names)}"
    )
    add_number(command, "--steps", "measured steps", 3)


BENCHMARKS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    # subcommand: its help, and the function that adds its flags
    "attention": ("time and memory of attention, forward and backward, over long sequences", _add_attention),
    "data": ("throughput and padding of the data pipeline, from text and prepared data", _add_data),
    "decode": ("decoding speed, compared with Hugging Face and CTranslate2", add_flags),
    "paged": ("decoding with a paged cache and with a dense one", _add_paged),
    "train": ("training speed, compared with PyTorch", _add_train),
    "growth": ("scaling of training cost with context, depth, vocabulary or experts", _add_growth),
}
