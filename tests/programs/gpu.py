"""Checks and measures on one GPU what a CPU cannot show, most important first.

python -m tests.programs.gpu --data DIR --output gpu [--minutes 25]
python -m tests.programs.gpu --tiny --output gpu --only attention     (on a CPU)

Each part is a command with a time limit. Its record and the end of its output are in the folder `--output` as soon as
it ends, and `summary.json` names what has run, so that nothing is lost if the time ends. The parts compare with PyTorch
if it is installed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests import commands
from tformer_jax.runs.run_folder import write_json

PYTHON = sys.executable
BENCHMARK = (PYTHON, "scripts/benchmark.py")
SHAKESPEARE = ("--config", "configs/lm_tiny_shakespeare.py:gpu", "--config.model.dtype=bfloat16")


class Part(NamedTuple):
    """A command, without its record, and the seconds after which it is stopped."""

    command: tuple[str, ...]
    seconds: int
    tiny: tuple[str, ...] = ()
    """Arguments that replace those after the command's name on a CPU; (): the part is left out."""

    def arguments(self, record: Path, data: Path | None, tiny: bool) -> list[str]:
        """Returns the command with its record, and its data if the command reads some."""
        chosen = self.tiny if tiny else self.command
        reads = data is not None and "--sweep" in chosen
        return [*chosen, "--record", str(record), *(("--data", str(data)) if reads else ())]


def train_part(case: str, dtype: str, seconds: int) -> Part:
    """Compares the steps of a case with PyTorch's."""
    flags = "train", "--case", case, "--dtype", dtype, "--steps", "20", "--rounds", "5"
    return Part((*BENCHMARK, *flags), seconds)


PARTS = {
    "gpt2": train_part("gpt2", "bfloat16", 300),
    "attention": Part(
        (PYTHON, "-m", "tests.programs.gpu_attention"), 200, (PYTHON, "-m", "tests.programs.gpu_attention", "--tiny")
    ),
    "shakespeare": train_part("shakespeare", "bfloat16", 150),
    "transformer_base": train_part("transformer_base", "bfloat16", 240),
    "qwen3": train_part("qwen3", "bfloat16", 300),
    "operations": Part((*BENCHMARK, "train", "--operations", "--case", "gpt2", "--dtype", "bfloat16"), 200),
    "tiny_shakespeare": Part(
        (PYTHON, "scripts/sweep.py", *SHAKESPEARE, "--sweep", "seed=0,1,2", "--jobs", "3", "--output", "runs/gpu"), 400
    ),
}


def main() -> None:
    """Runs the parts until the time is over; exits with 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the records")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    end, summary = time.monotonic() + 60 * options.minutes, {}
    for name in options.only:
        if not options.tiny or PARTS[name].tiny:
            summary[name] = run_part(name, options, end - time.monotonic())
            write_json(options.output / "summary.json", summary)
            print(f"{name}: {summary[name]}", flush=True)
    raise SystemExit(any(part["exit"] for part in summary.values()))


def run_part(name: str, options: argparse.Namespace, left: float) -> dict[str, Any]:
    """Runs a part for at most the seconds that are left; returns its exit status, None without a run."""
    limit = min(PARTS[name].seconds, left)
    if limit < 20:
        return {"exit": None, "seconds": 0}
    arguments = PARTS[name].arguments(options.output / f"{name}.json", options.data, options.tiny)
    # several processes share the device, so none may take most of its memory at its start
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    start = time.monotonic()
    with (options.output / f"{name}.log").open("w") as log:
        status = run_limited(arguments, limit, log, environment)
    return {"exit": status, "seconds": round(time.monotonic() - start)}


def run_limited(arguments: Sequence[str], seconds: float, log: Any, environment: dict[str, str]) -> int:
    """Runs a command and its children in a session of their own; returns its status, or 124 after a kill."""
    process = subprocess.Popen(
        arguments, cwd=commands.ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return 124


if __name__ == "__main__":
    main()
