"""Kills training runs with SIGKILL at random moments, resumes them, and compares with runs that were never stopped.

python -m tests.programs.kills --kills 20 --record tests/programs/kills.json
"""

import argparse
import collections
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import commands
from tformer_jax.runs.run_folder import events, read_records

PLACES = ("while starting", "between two steps", "while saving")
SHARES = (0.15, 0.4, 0.45)
LINES = 4
"""Maximum number of lines about steps before a kill."""


def main() -> None:
    """Prints and records the outcome of each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills of each kind of run, at least one at each place")
    parser.add_argument("--kinds", nargs="+", choices=commands.KINDS, default=commands.KINDS, help="kinds of runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    actual = {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            actual[kind] = kill_often(kind, options.kills, random.Random(f"{options.seed} {kind}"), Path(folder))
        print(f"{kind}: {json.dumps(actual[kind])}", flush=True)
    if options.record:
        commands.write_record(options.record, "tests.programs.kills", seed=options.seed, runs=actual)


def kill_often(kind: str, kills: int, draw: random.Random, folder: Path) -> dict[str, Any]:
    """Returns where a run was killed, and its differences from an undisturbed run."""
    whole, killed, cache = folder / "whole", folder / "killed", folder / "cache"
    finish(commands.command(kind, whole), cache)
    places, stages = dict.fromkeys(PLACES, 0), collections.Counter[str]()
    wanted = [place for place, share in zip(PLACES, SHARES, strict=True) for _ in range(max(1, round(share * kills)))]
    draw.shuffle(wanted)
    while wanted:
        process = commands.start(commands.command(kind, killed, "--resume"), cache, stderr=None)
        if reached(process, wanted[-1], killed, draw):
            process.kill()
            places[wanted.pop()] += 1
            stages[f"stage {stages_begun(killed)}"] += 1
        process.wait()
        if process.returncode == 0:
            break  # it finished before the next kill
    finish(commands.command(kind, killed, "--resume"), cache)
    in_stages = {"killed_in": dict(sorted(stages.items()))} if len(stages) > 1 else {}
    return {"killed": places, **in_stages, "differences": commands.differences(killed, whole)}


def stages_begun(run: Path) -> int:
    """Returns the number of stages of data that a run has begun."""
    messages = [event["message"] for event in read_records(events(run)) if event["kind"] == "stage"]
    return 1 + len(set(messages))


def reached(process: Any, place: str, run: Path, draw: random.Random) -> bool:
    """Waits until the process is at `place`; returns whether it still runs."""
    if place == "while starting":
        time.sleep(draw.uniform(0.5, 6))
        return process.poll() is None
    steps = (line for line in process.stdout if line.startswith("step "))
    for _ in range(draw.randint(1, LINES)):  # more than the steps since a checkpoint, so that the run goes on
        next(steps, None)
    if place == "between two steps":
        time.sleep(draw.uniform(0, 0.3))
    else:
        checkpoints = run / "checkpoints"
        while process.poll() is None and not list(checkpoints.glob("*tmp*")):
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
    return process.poll() is None


def finish(arguments: list[str], cache: Path) -> None:
    """Runs a command to its end."""
    process = commands.start(arguments, cache)
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{output}{errors}")


if __name__ == "__main__":
    main()
