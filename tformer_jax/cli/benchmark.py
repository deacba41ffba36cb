"""`scripts/benchmark.py`: measurements that anyone can repeat."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_jax.benchmarks.attention import attention_cases
from tformer_jax.benchmarks.data import data_cases
from tformer_jax.benchmarks.decode import add_flags, measure_decoding
from tformer_jax.cli.train import DATA_VARIABLE, check_writable, read_config
from tformer_jax.config import ConfigError
from tformer_jax.train import provenance, run_folder


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one benchmark, prints a line a case, and writes all of it to `--record`."""
    options, overrides = parser().parse_known_args(argv)
    if overrides and options.benchmark != "data":
        raise ConfigError(f"unexpected argument {overrides[0]!r}")
    if options.record:
        check_writable(options.record)
    found = measured(options, overrides)
    if options.record:
        run_folder.write_json(options.record, provenance.collect() | found)


def measured(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """What the chosen benchmark finds."""
    if options.benchmark == "decode":
        return measure_decoding(options)
    if options.benchmark == "data":
        return {"cases": data_cases(read_config(options.config, overrides), options)}
    return {"cases": attention_cases(options)}


def parser() -> argparse.ArgumentParser:
    """One subcommand a benchmark."""
    result = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, allow_abbrev=False)
    commands = result.add_subparsers(dest="benchmark", required=True)
    attention = commands.add_parser(
        "attention", help="time and memory of attention, forward and backward, over long sequences"
    )
    attention.add_argument("--backends", nargs="+", default=["blockwise", "reference"], metavar="NAME")
    attention.add_argument(
        "--length", type=int, nargs="+", default=[16_384], metavar="T", help="tokens of a row (default: 16384)"
    )
    attention.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default: 1)")
    attention.add_argument("--repeat", type=int, default=1, metavar="R", help="runs, of which the median is shown")
    attention.add_argument("--forward", action="store_true", help="without the backward pass")
    attention.add_argument("--heads", type=int, default=4, metavar="N")
    attention.add_argument("--head-dim", type=int, default=64, metavar="H")
    data = commands.add_parser("data", help="tokens/s of the data pipeline alone, from text and prepared, and padding")
    data.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    data.add_argument("--workers", type=int, default=2, metavar="N", help="loader processes to compare with a thread")
    data.add_argument("--seconds", type=float, default=5, metavar="S", help="of each measurement (default: 5)")
    data.add_argument("--data", type=Path, metavar="DIR", default=os.environ.get(DATA_VARIABLE))
    decode = commands.add_parser("decode", help="speed of decoding, beside Hugging Face's and CTranslate2's")
    add_flags(decode)
    for command in (attention, data, decode):
        command.add_argument("--record", type=Path, metavar="FILE", help="write the result to this JSON file")
    return result
