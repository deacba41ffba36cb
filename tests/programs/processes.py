"""Trains with several processes on this machine: complete, killed, stopped, resumed by others, and misconfigured.

python -m tests.programs.processes --record tests/programs/processes.json
"""

import argparse
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests import commands
from tests.programs import process_batches
from tests.runs.conftest import write_pairs
from tformer_jax.runs.trained import load_trained

CONFIG = commands.ROOT / "tests/programs/processes_config.py"
LONG = {"train__steps": 4000, "train__eval_every": 4000, "train__log_every": 50, "train__checkpoint_every": 10}
Outcome = dict[str, Any]


def free_port() -> int:
    """Returns a free port."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


class Bench:
    """A folder with a corpus, and commands that train from it on four devices in total."""

    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder / "cache"
        write_pairs(folder)

    def command(self, run: Path, *flags: str, **changes: Any) -> list[str]:
        """Returns a training command; `changes` are settings with `__` for the dot."""
        overrides = [f"--config.{name.replace('__', '.')}={value}" for name, value in changes.items()]
        fixed = ["--config", str(CONFIG), "--data", str(self.folder), "--run", str(run)]
        return [sys.executable, str(commands.ROOT / "scripts/train.py"), *fixed, *overrides, *flags]

    def start(self, arguments: list[str], devices: int, **options: Any) -> subprocess.Popen:
        """Starts one process with `devices` CPU devices."""
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        return commands.start(arguments, self.cache, {"XLA_FLAGS": flags}, errors="replace", **options)

    def group(
        self, count: int, by_index: dict[int, list[str]], port: int = 0, **options: Any
    ) -> list[subprocess.Popen]:
        """Starts some of `count` processes that share four devices, each with the command at its index."""
        several = ["--coordinator", f"localhost:{port or free_port()}", "--processes", str(count), "--process"]
        return [
            self.start([*command, *several, str(index)], 4 // count, **options) for index, command in by_index.items()
        ]

    def together(self, count: int, run: Path, *flags: str, **changes: Any) -> list[subprocess.Popen]:
        """Starts `count` processes that share four devices."""
        command = self.command(run, *flags, **changes)
        return [self.start(command, 4)] if count == 1 else self.group(count, dict.fromkeys(range(count), command))

    def trained(self, count: int, run: Path, *flags: str, **changes: Any) -> list[Outcome]:
        """Starts `count` processes and waits for their end."""
        return outcomes(self.together(count, run, *flags, **changes))

    def saving(self, count: int, run: Path, *flags: str, **changes: Any) -> list[subprocess.Popen]:
        """Starts processes with many steps and waits for their first checkpoint."""
        processes = self.together(count, run, *flags, **{**LONG, **changes})
        while not (run / "checkpoints" / "10").exists() and all(process.poll() is None for process in processes):
            time.sleep(0.02)
        return processes


def outcomes(processes: list[subprocess.Popen], seconds: int = 280) -> list[Outcome]:
    """Returns the exit status and last message of each process; kills all if one does not end."""
    try:
        spoken = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [outcome(process, *texts) for process, texts in zip(processes, spoken, strict=True)]


def outcome(process: subprocess.Popen, output: str, errors: str) -> Outcome:
    """Returns the exit status and the last message."""
    lines = [line for line in errors.splitlines() if not line.startswith(("WARNING:", "W1", "W0", "I1", "I0"))]
    said = [line for line in lines if line.startswith("error:")] or lines
    said = said or [line for line in output.splitlines() if not line.startswith("[Gloo]")]
    return {"status": process.returncode, "says": said[-1] if said else "", "lines": len(lines)}


def difference(run: Path, expected: Path) -> float:
    """Returns the largest relative difference of two runs in their losses and parameters."""
    mine, theirs = ((np.array(losses(path)), load_trained(path).params) for path in (run, expected))
    return max(jax.tree.leaves(jax.tree.map(relative, mine, theirs)))


def relative(array: Any, expected: Any) -> float:
    """Returns the largest difference of two arrays, relative to the largest value expected."""
    array, expected = np.asarray(array, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(array - expected).max() / max(np.abs(expected).max(), 1e-9))


def losses(run: Path) -> list[float]:
    """Returns the losses of each step and of the validation split."""
    return [record["loss"] for record in commands.records(run) if record["group"] != "test"]


def compared(bench: Bench, ended: list[Outcome], run: Path) -> Outcome:
    """Returns how processes ended, and the difference to the run of one process, or the last messages."""
    status = [each["status"] for each in ended]
    if any(status):
        return {"status": status, "says": [each["says"] for each in ended]}
    return {"status": status, "difference": difference(run, bench.folder / "whole")}


def equal_whatever_their_number(bench: Bench) -> list[Outcome]:
    """Trains with one, two and four processes on the same mesh of four devices."""
    runs = {1: bench.folder / "whole", 2: bench.folder / "of_2", 4: bench.folder / "of_4"}
    return [compared(bench, bench.trained(count, run), run) for count, run in runs.items()]


def resumed_by_others(bench: Bench) -> list[Outcome]:
    """Two processes train half of the steps; one or four train the other half."""
    actual = []
    for count in (1, 4):
        run = bench.folder / f"resumed_by_{count}"
        bench.trained(2, run, train__steps=4)
        actual.append(compared(bench, bench.trained(count, run, "--resume"), run))
    return actual


STAGES = (
    "prepared until step 4",
    "prepared 3 to 1, others 0 to 2 with typos until step 9",
    "linearly to others for 30000 tokens",
    "temperature 2 for 0.02 epochs of others",
    "others",
)


def batches(bench: Bench, count: int, *stages: str) -> list[dict[str, Any]]:
    """Returns what each of `count` processes prints about its first batches of prepared data, perhaps in stages."""
    folder = bench.folder / "rows"
    if not folder.exists():
        process_batches.write(folder)
    command = [
        sys.executable,
        "-m",
        "tests.programs.process_batches",
        str(folder),
        f"localhost:{free_port()}",
        str(count),
    ]
    started = [bench.start([*command, str(index), *stages], 4 // count) for index in range(count)]
    printed = [process.communicate(timeout=280) for process in started]
    return [json.loads(output.splitlines()[-1]) if output else {"errors": errors} for output, errors in printed]


def rows_read(bench: Bench) -> list[Outcome]:
    """Returns the bytes that each of 1, 2 and 4 processes reads for the same batches of training and evaluation."""
    actual = [batches(bench, count) for count in (1, 2, 4)]
    return [
        {
            kind: {
                "bytes": [each[kind]["bytes"] for each in group],
                "same": all(each[kind]["sums"] == actual[0][0][kind]["sums"] for each in group),
            }
            for kind in process_batches.KINDS
        }
        for group in actual
    ]


def stages_read(bench: Bench) -> list[Outcome]:
    """Returns whether 1, 2 and 4 processes have the same batches of stages, with transforms, and where these began."""
    actual = [batches(bench, count, *STAGES) for count in (1, 2, 4)]
    first = actual[0][0]
    return [
        {
            "begun": [each["begun"] for each in group],
            "same": all(each["training"]["sums"] == first["training"]["sums"] for each in group),
        }
        for group in actual
    ]


def lost(bench: Bench, count: int, victim: int) -> list[Outcome]:
    """Kills one process; then all are resumed."""
    run = bench.folder / f"lost_{victim}_of_{count}"
    processes = bench.saving(count, run)
    processes[victim].kill()
    started = time.monotonic()
    ended = outcomes(processes)
    seconds = round(time.monotonic() - started, 1)
    resumed = bench.trained(count, run, "--resume", train__steps=newest(run) + 10, train__eval_every=4000)
    return [*ended, {"seconds": seconds, "resumed": [each["status"] for each in resumed]}]


def stopped(bench: Bench) -> list[Outcome]:
    """Terminates one of two processes: both stop at the same step, which is saved."""
    run = bench.folder / "stopped"
    processes = bench.saving(2, run)
    processes[1].send_signal(signal.SIGTERM)
    ended = outcomes(processes)
    return [*ended, {"saved": newest(run)}]


def newest(run: Path) -> int:
    """Returns the step of the newest checkpoint."""
    return max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())


def other_settings(bench: Bench) -> list[Outcome]:
    """One process has a different learning rate."""
    run = bench.folder / "other"
    return outcomes(bench.group(2, {0: bench.command(run), 1: bench.command(run, optim__learning_rate=0.5)}))


def other_folders(bench: Bench) -> list[Outcome]:
    """The run folders have the same name, in folders that the processes do not share."""
    port, processes = free_port(), []
    for index in range(2):
        own = bench.folder / f"host_{index}"
        (own / "runs").mkdir(parents=True)
        processes += bench.group(2, {index: bench.command(Path("runs/not_shared"))}, port, cwd=own)
    return outcomes(processes)


def missing(bench: Bench) -> list[Outcome]:
    """Two of four processes do not start."""
    command = bench.command(bench.folder / "few", parallel__start_seconds=8)
    return outcomes(bench.group(4, {0: command, 2: command}))


def nobody_there(bench: Bench) -> list[Outcome]:
    """Only process 1 starts."""
    return outcomes(bench.group(2, {1: bench.command(bench.folder / "nobody", parallel__start_seconds=3)}))


def wrong_number(bench: Bench) -> list[Outcome]:
    """The process index is 2 of 2 processes."""
    return outcomes(bench.group(2, {2: bench.command(bench.folder / "wrong")}))


def port_in_use(bench: Bench) -> list[Outcome]:
    """The port is in use."""
    with socket.create_server(("", 0)) as server:
        return outcomes(bench.group(2, {0: bench.command(bench.folder / "used")}, server.getsockname()[1]))


STORIES: dict[str, Callable[[Bench], list[Outcome]]] = {
    "the same losses and parameters by 1, 2 and 4 processes": equal_whatever_their_number,
    "bytes that each of 1, 2 and 4 processes reads for the same batches": rows_read,
    "the same batches of stages by 1, 2 and 4 processes": stages_read,
    "half by 2 processes, the other half by 1 and by 4": resumed_by_others,
    "SIGKILL for process 1 of 2": lambda bench: lost(bench, 2, 1),
    "SIGKILL for process 0 of 2": lambda bench: lost(bench, 2, 0),
    "SIGKILL for process 3 of 4": lambda bench: lost(bench, 4, 3),
    "SIGTERM for process 1 of 2": stopped,
    "another setting in process 1": other_settings,
    "no shared folder": other_folders,
    "processes 1 and 3 of 4 do not start": missing,
    "process 0 of 2 does not start": nobody_there,
    "an index of 2 for 2 processes": wrong_number,
    "the port is in use": port_in_use,
}


def ended(story: Callable[[Bench], list[Outcome]], bench: Bench) -> list[Outcome]:
    """Returns the outcomes of a story, or that its processes did not end."""
    try:
        return story(bench)
    except subprocess.TimeoutExpired as error:
        return [{"error": f"still running after {error.timeout:.0f} s"}]


def main() -> None:
    """Prints and records each outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", choices=STORIES)
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    actual = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name, story in STORIES.items():
            if options.only in (None, name):
                text = json.dumps(ended(story, bench)).replace(folder, "DIR").replace(socket.gethostname(), "HOST")
                actual[name] = json.loads(text)
                print(name, *map(json.dumps, actual[name]), sep="\n    ", flush=True)
    if options.record:
        commands.write_record(options.record, "tests.programs.processes", stories=actual)


if __name__ == "__main__":
    main()
