"""`scripts/report.py`: shows one or several runs in one HTML file."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.base import checks
from tformer_jax.cli.common import add_path, check_writable, integer, new_parser, run_path, write_output
from tformer_jax.report import html, run

NAME = "report.html"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report; with `--watch`, rewrites it when the runs have new records, until all runs have ended."""
    options = parser().parse_args(argv)
    checks.require_pages("this command")
    path = options.output or (options.runs[0] / NAME if len(options.runs) == 1 else Path(NAME))
    if options.output is not None:
        check_writable(options.output, "--output")
    runs = write_report(options.runs, path, options.watch)
    print(path)
    while options.watch and any(loaded.running for loaded in runs):
        time.sleep(options.watch)
        runs = write_report(options.runs, path, options.watch)


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "report",
        "Shows runs in one HTML file that needs no network: curves, evaluation, outputs, events, config, "
        "environment, parameters. Several runs are compared with the first. A run may be in progress or have failed.",
    )
    result.add_argument("runs", type=run_path, nargs="+", metavar="RUN", help="run folder of scripts/train.py")
    add_path(result, "--output", f"default: RUN/{NAME}, or {NAME} here for several runs")
    result.add_argument(
        "--watch",
        type=integer(1),
        nargs="?",
        const=30,
        metavar="SECONDS",
        help="rewrite the report at this interval (default: 30) until all runs have ended; browsers reload it",
    )
    return result


def write_report(folders: Sequence[Path], path: Path, refresh: int | None = None) -> list[run.RunFiles]:
    """Writes the report of the run folders to `path`; returns the runs.

    Args:
        refresh: as for `html.render_report`.

    Raises:
        UserError: a folder is not a run folder, or `path` cannot be written.
    """
    runs = run.load_all(folders)
    write_output(path, html.render_report(runs, refresh=refresh))
    return runs
