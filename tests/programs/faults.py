"""Records the messages and results of real faults, each in a separate process.

python -m tests.programs.faults --record tests/programs/faults.json
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import commands

KIND = "bucketed translation"
Outcome = dict[str, Any]


class Bench:
    """A folder for faults, and an undisturbed run to compare with."""

    def __init__(self, folder: Path):
        self.folder, self.cache, self.whole = folder, folder / "cache", folder / "whole"
        assert self.train(self.whole)["status"] == 0

    def train(self, run: Path, *flags: str, prefix: tuple[str, ...] = (), **changes: Any) -> Outcome:
        """Runs a training command to its end."""
        process = commands.start([*prefix, *commands.command(KIND, run, *flags, **changes)], self.cache)
        return self.outcome(process)

    def started(self, run: Path, *flags: str, **changes: Any) -> subprocess.Popen:
        """Starts a training command and waits for its first checkpoint."""
        process = commands.start(commands.command(KIND, run, *flags, **changes), self.cache)
        while not (run / "checkpoints" / "20").exists() and process.poll() is None:
            time.sleep(0.005)
        return process

    def outcome(self, process: subprocess.Popen) -> Outcome:
        """Waits for the process; returns its exit status and last message."""
        output, errors = process.communicate()
        said = [line for line in errors.splitlines() if line.startswith(("error:", "WARNING:"))]
        return {"status": process.returncode, "says": said[-1] if said else output.splitlines()[-1]}

    def stopped(self, name: str) -> Path:
        """Returns a run that was stopped by SIGTERM after its first checkpoint."""
        run = self.folder / name
        process = self.started(run)
        process.send_signal(signal.SIGTERM)
        assert self.outcome(process)["status"] == 130
        return run

    def resumed(self, run: Path, **changes: Any) -> Outcome:
        """Resumes a run; `equal` is True if its result equals that of the undisturbed one."""
        actual = self.train(run, "--resume", **changes)
        actual["equal"] = actual["status"] == 0 and not commands.differences(run, self.whole)
        return actual


def killed(bench: Bench) -> list[Outcome]:
    process = bench.started(bench.folder / "killed")
    process.kill()
    process.communicate()
    return [{"status": process.returncode, "says": ""}, bench.resumed(bench.folder / "killed")]


def terminated(bench: Bench) -> list[Outcome]:
    process = bench.started(bench.folder / "terminated")
    process.send_signal(signal.SIGTERM)
    return [bench.outcome(process), bench.resumed(bench.folder / "terminated")]


def full_disk(bench: Bench) -> list[Outcome]:
    """A file system with space for few checkpoints, which is then enlarged."""
    disk = bench.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        first = bench.train(disk / "run", train__keep_checkpoints=50)
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        return [first, bench.resumed(disk / "run")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def read_only(bench: Bench) -> list[Outcome]:
    """A read-only file system, which is then made writable."""
    run = bench.stopped("read_only")
    subprocess.run(["mount", "--bind", str(run), str(run)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(run)], check=True)
    try:
        first = bench.train(run, "--resume")
    finally:
        subprocess.run(["umount", str(run)], check=True)
    return [first, bench.resumed(run)]


def truncated_checkpoint(bench: Bench) -> list[Outcome]:
    run = bench.stopped("truncated")
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    return [bench.resumed(run)]


def deleted_tokenizer(bench: Bench) -> list[Outcome]:
    run = bench.stopped("tokenizer")
    away = bench.folder / "tokenizers"
    shutil.move(run / "tokenizers", away)
    first = bench.train(run, "--resume")
    shutil.move(away, run / "tokenizers")
    return [first, bench.resumed(run)]


def not_finite(bench: Bench) -> list[Outcome]:
    """A learning rate that makes every model diverge."""
    return [bench.train(bench.folder / "nan", optim__learning_rate=1e38, optim__clip_norm=0.0)]


def nan_in_a_batch(bench: Bench) -> list[Outcome]:
    """Two steps with a non-finite loss, in a run that continues."""
    program = (
        "import sys, jax, jax.numpy as jnp; from tformer_jax.train import step; plain = step.batch_loss\n"
        "def broken(model, params, batch, *, dropout_key, **options):\n"
        "    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), s), 0) for s in (30, 31)]\n"
        "    same = [(jax.random.key_data(k) == jax.random.key_data(dropout_key)).all() for k in keys]\n"
        "    sums, rest = plain(model, params, batch, dropout_key=dropout_key, **options)\n"
        "    return sums._replace(loss=jnp.where(same[0] | same[1], jnp.nan, sums.loss)), rest\n"
        "step.batch_loss = broken\n"
        "from tformer_jax.cli.common import run_main; from tformer_jax.cli.train import main; run_main(main)"
    )
    arguments = commands.command(KIND, bench.folder / "batch")
    process = commands.start([sys.executable, "-c", program, *arguments[2:]], bench.cache)
    output, _ = process.communicate()
    skipped = [line for line in output.splitlines() if "skipped, because" in line]
    return [{"status": process.returncode, "says": " | ".join([*skipped, output.splitlines()[-1]])}]


def clock_jump(bench: Bench) -> list[Outcome]:
    """The wall clock is set back by a day during the run."""
    program = (
        "import time; plain, born = time.time, time.monotonic()\n"
        "time.time = lambda: plain() - (86400 if time.monotonic() - born > 12 else 0)\n"
        "from tformer_jax.cli.common import run_main; from tformer_jax.cli.train import main; run_main(main)"
    )
    arguments = commands.command(KIND, bench.folder / "clock")
    actual = bench.outcome(commands.start([sys.executable, "-c", program, *arguments[2:]], bench.cache))
    return [{**actual, "equal": not commands.differences(bench.folder / "clock", bench.whole)}]


def two_processes(bench: Bench) -> list[Outcome]:
    run = bench.folder / "shared"
    first = bench.started(run)
    os.kill(first.pid, signal.SIGSTOP)
    second = bench.train(run, "--resume")
    third = bench.train(run, "--overwrite")
    os.kill(first.pid, signal.SIGCONT)
    ended = bench.outcome(first)
    return [second, third, {**ended, "equal": not commands.differences(run, bench.whole)}]


FAULTS: dict[str, Callable[[Bench], list[Outcome]]] = {
    "SIGKILL, then --resume": killed,
    "SIGTERM, then --resume": terminated,
    "full disk, then room and --resume": full_disk,
    "read-only run folder, then --resume": read_only,
    "newest checkpoint truncated, --resume": truncated_checkpoint,
    "tokenizers deleted; put back": deleted_tokenizer,
    "nothing finite any more": not_finite,
    "NaN in two batches": nan_in_a_batch,
    "wall clock jumps back": clock_jump,
    "two processes on one folder": two_processes,
}


def main() -> None:
    """Prints and records each outcome; requires permission to mount a file system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", choices=FAULTS)
    options = parser.parse_args()
    actual = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name, fault in FAULTS.items():
            if options.only in (None, name):
                text = json.dumps(fault(bench)).replace(folder, "DIR").replace(str(commands.ROOT), ".")
                actual[name] = json.loads(text)
                print(name, *map(json.dumps, actual[name]), sep="\n    ", flush=True)
    if options.record:
        commands.write_record(options.record, "tests.programs.faults", faults=actual)


if __name__ == "__main__":
    main()
