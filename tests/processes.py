"""Trains with several processes on this machine: complete, killed, stopped, resumed by others, and misconfigured.

python -m tests.processes --record tests/processes.json
"""

import argparse
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests import commands, process_batches
from tformer_jax.train.trained import load_trained

CONFIG = "tests/processes_config.py"
LONG = {"train.steps": 4000, "train.eval_every": 4000, "train.log_every": 50, "train.checkpoint_every": 10}
Outcome = dict[str, Any]


def write_corpus(folder: Path) -> None:
    """Writes pairs.tsv: words, and the same words in capitals."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(120)]
    (folder / "pairs.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in words), encoding="utf-8")


def free_port() -> int:
    """Returns a free port."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def environment(cache: Path, devices: int) -> dict[str, str]:
    """Returns the environment of a process with `devices` CPU devices and a compilation cache."""
    return {
        **os.environ,
        "PYTHONPATH": str(commands.ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }


def flags_of(coordinator: str, count: int, number: int) -> list[str]:
    """Returns the flags that give a process its index."""
    return ["--coordinator", coordinator, "--processes", str(count), "--process", str(number)]


class Bench:
    """A folder with a corpus, and commands that train from it on four devices in total."""

    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder / "cache"
        write_corpus(folder)

    def command(self, run: Path, *flags: str, **changes: Any) -> list[str]:
        """Returns a training command; `changes` are settings with `__` for the dot."""
        overrides = [f"--config.{name.replace('__', '.')}={value}" for name, value in changes.items()]
        fixed = ["--config", CONFIG, "--data", str(self.folder), "--run", str(run)]
        return [sys.executable, "scripts/train.py", *fixed, *overrides, *flags]

    def start(self, arguments: list[str], devices: int) -> subprocess.Popen:
        """Starts one process."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            arguments, cwd=commands.ROOT, env=environment(self.cache, devices), text=True, errors="replace", **pipes
        )

    def together(self, count: int, run: Path, *flags: str, **changes: Any) -> list[subprocess.Popen]:
        """Starts `count` processes that share four devices."""
        command, coordinator = self.command(run, *flags, **changes), f"localhost:{free_port()}"
        if count == 1:
            return [self.start(command, 4)]
        return [self.start([*command, *flags_of(coordinator, count, number)], 4 // count) for number in range(count)]

    def trained(self, count: int, run: Path, *flags: str, **changes: Any) -> list[Outcome]:
        """Starts `count` processes and waits for their end."""
        return outcomes(self.together(count, run, *flags, **changes))

    def saving(self, count: int, run: Path, *flags: str, **changes: Any) -> list[subprocess.Popen]:
        """Starts processes with many steps and waits for their first checkpoint."""
        long = {name.replace(".", "__"): value for name, value in LONG.items()}
        processes = self.together(count, run, *flags, **{**long, **changes})
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
    values = [("loss", *(np.array(losses(path)) for path in (run, expected)))]
    mine, theirs = (dict(leaves(load_trained(path).params)) for path in (run, expected))
    values += [(name, mine[name], theirs[name]) for name in theirs]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for _, a, b in values)


def losses(run: Path) -> list[float]:
    """Returns the losses of each step and of the validation split."""
    return [record["loss"] for record in commands.records(run) if record["group"] != "test"]


def leaves(params: Any, path: str = "") -> list[tuple[str, np.ndarray]]:
    """Returns the parameters by name."""
    if not isinstance(params, dict):
        return [(path, np.asarray(params, np.float64))]
    return [leaf for name, value in params.items() for leaf in leaves(value, f"{path}/{name}")]


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
    """Two processes train half of the steps; one or four train the rest."""
    found = []
    for count in (1, 4):
        run = bench.folder / f"resumed_by_{count}"
        bench.trained(2, run, train__steps=4)
        found.append(compared(bench, bench.trained(count, run, "--resume"), run))
    return found


def batches(bench: Bench, count: int) -> list[dict[str, Any]]:
    """Returns what each of `count` processes prints about its first batches of prepared data (`process_batches`)."""
    folder = bench.folder / "rows"
    if not folder.exists():
        process_batches.write(folder)
    coordinator = f"localhost:{free_port()}"
    started = [
        bench.start(
            [sys.executable, "-m", "tests.process_batches", str(folder), coordinator, str(count), str(index)],
            4 // count,
        )
        for index in range(count)
    ]
    printed = [process.communicate(timeout=280) for process in started]
    return [json.loads(output.splitlines()[-1]) if output else {"errors": errors} for output, errors in printed]


def rows_read(bench: Bench) -> list[Outcome]:
    """Returns the bytes that each of 1, 2 and 4 processes reads for the same batches."""
    found = {count: batches(bench, count) for count in (1, 2, 4)}
    expected = found[1][0]["sums"]
    return [
        {"bytes": [each["bytes"] for each in all_], "same": all(each["sums"] == expected for each in all_)}
        for all_ in found.values()
    ]


def lost(bench: Bench, count: int, victim: int) -> list[Outcome]:
    """Kills one process; then all are resumed."""
    run = bench.folder / f"lost_{victim}_of_{count}"
    processes = bench.saving(count, run)
    processes[victim].kill()
    begun = time.monotonic()
    ended = outcomes(processes)
    seconds = round(time.monotonic() - begun, 1)
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
    coordinator, run = f"localhost:{free_port()}", bench.folder / "other"
    plain, other = bench.command(run), bench.command(run, optim__learning_rate=0.5)
    commands_ = [[*plain, *flags_of(coordinator, 2, 0)], [*other, *flags_of(coordinator, 2, 1)]]
    return outcomes([bench.start(command, 2) for command in commands_])


def other_folders(bench: Bench) -> list[Outcome]:
    """The run folders have the same name, in folders that the processes do not share."""
    coordinator = f"localhost:{free_port()}"
    processes = []
    for number in range(2):
        own = bench.folder / f"host_{number}"
        (own / "runs").mkdir(parents=True)
        command = bench.command(Path("runs") / "not_shared")
        command[1] = str(commands.ROOT / command[1])
        command[3] = str(commands.ROOT / command[3])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        arguments = [*command, *flags_of(coordinator, 2, number)]
        processes.append(subprocess.Popen(arguments, cwd=own, env=environment(bench.cache, 2), text=True, **pipes))
    return outcomes(processes)


def missing(bench: Bench) -> list[Outcome]:
    """Two of four processes do not start."""
    command, coordinator = bench.command(bench.folder / "few", parallel__start_seconds=8), f"localhost:{free_port()}"
    return outcomes([bench.start([*command, *flags_of(coordinator, 4, number)], 1) for number in (0, 2)])


def nobody_there(bench: Bench) -> list[Outcome]:
    """Only process 1 starts."""
    command = bench.command(bench.folder / "nobody", parallel__start_seconds=3)
    return outcomes([bench.start([*command, *flags_of(f"localhost:{free_port()}", 2, 1)], 1)])


def wrong_number(bench: Bench) -> list[Outcome]:
    """The process index is 2 of 2 processes."""
    command = bench.command(bench.folder / "wrong")
    return outcomes([bench.start([*command, *flags_of("localhost:1234", 2, 2)], 1)])


def port_in_use(bench: Bench) -> list[Outcome]:
    """The port is in use."""
    with socket.create_server(("", 0)) as server:
        command = bench.command(bench.folder / "used")
        return outcomes([bench.start([*command, *flags_of(f"localhost:{server.getsockname()[1]}", 2, 0)], 1)])


STORIES: dict[str, Callable[[Bench], list[Outcome]]] = {
    "the same losses and parameters by 1, 2 and 4 processes": equal_whatever_their_number,
    "bytes that each of 1, 2 and 4 processes reads for the same batches": rows_read,
    "half by 2 processes, the rest by 1 and by 4": resumed_by_others,
    "SIGKILL for process 1 of 2": lambda bench: lost(bench, 2, 1),
    "SIGKILL for process 0 of 2": lambda bench: lost(bench, 2, 0),
    "SIGKILL for process 3 of 4": lambda bench: lost(bench, 4, 3),
    "SIGTERM for process 1 of 2": stopped,
    "another setting in process 1": other_settings,
    "no shared folder": other_folders,
    "processes 1 and 3 of 4 do not come": missing,
    "no coordinator": nobody_there,
    "process 2 of 2": wrong_number,
    "the port is in use": port_in_use,
}


def main() -> None:
    """Prints and records each outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", choices=STORIES)
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name, story in STORIES.items():
            if options.only in (None, name):
                text = json.dumps(story(bench)).replace(folder, "DIR").replace(socket.gethostname(), "HOST")
                found[name] = json.loads(text)
                print(name, *map(json.dumps, found[name]), sep="\n    ", flush=True)
    if options.record:
        commands.write_record(options.record, "tests.processes", stories=found)


if __name__ == "__main__":
    main()
