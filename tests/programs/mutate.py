"""Mutation tests: changes one operator or constant of the package at a time and reports which tests fail.

    python -m tests.programs.mutate --record tests/programs/mutations.json

The mutants are a seeded sample of all folders in `changes.PACKAGES`, in proportion to the changes possible in each.
First, each test file runs once under `coverage` (the extra `mutation`), which records the tests that execute a line and
their CPU times; later, only test files that changed run again. Then the tests that execute the changed line run on each
mutant, the fastest first, up to `--seconds` of CPU time, until one fails. A mutant that no test detects is a survivor:
a test is missing, or the `reason` that was added to its result in the record says why the change has no effect.

The record is continued: a result holds as long as its line is in its file and the test that failed exists, so that only
mutants new to the sample run. `--again` also runs the survivors without a reason. Left out by rule, because they change
no result: messages (`raise`, `assert`, f-strings, `changes.MESSAGES`), annotations, paths, readings of a clock, the
constants named `..._SECONDS`, and the arguments in `changes.NEUTRAL`.
"""

import argparse
import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.programs.mutation import changes, forks
from tests.programs.mutation.changes import Mutant
from tests.programs.mutation.covering import Covering, measure

RECORD = Path(__file__).with_name("mutations.json")
FLAGS = ("-x", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore", "--no-header", "--timeout=900")
FIRST = 20
Result = dict[str, Any]


class _Outcome:
    """A pytest plugin: runs tests in the given order and writes the one that runs, then the first that fails."""

    def __init__(self, order: list[str], path: Path):
        self.order, self.path = {test: number for number, test in enumerate(order)}, path

    def pytest_collection(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("the first failure", deadline=None, phases=phases)
        hypothesis.settings.load_profile("the first failure")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = (item for item in items if item.nodeid in self.order)
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(f"{report.nodeid} (import)")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.path.write_text(f"{nodeid} (crash or time limit)")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.path.read_text() != nodeid:
            self.path.unlink()


def detect(mutant: Mutant, tree: Path, covering: Covering, seconds: float) -> Result:
    """Runs the tests of one mutant in a copy of the repository, which is restored.

    The first tests run before the files of all others are imported.
    """
    path, outcome = tree / mutant.file, forks.CACHE / "outcome"
    source = path.read_text("utf-8")
    changed, line = changes.mutated(mutant, source)
    tests = affordable(covering, covering.tests(mutant.file, line), seconds)
    outcome.unlink(missing_ok=True)
    used = 0.0
    path.write_text(changed, "utf-8")
    try:
        for part in (tests[:FIRST], tests[FIRST:]):
            if part and not outcome.exists():
                used += forks.forked(lambda _, part=part: _run(part, outcome), tree, 3 * seconds + 60)
    finally:
        path.write_text(source, "utf-8")
    detected = outcome.read_text() if outcome.exists() else None
    return {"detected_by": detected, "tests": len(tests), "seconds": round(used, 1)}


def affordable(covering: Covering, tests: list[str], seconds: float) -> list[str]:
    """Returns the first tests that together take `seconds`, at least one."""
    total = itertools.accumulate(covering.seconds[test] for test in tests)
    return [
        test for number, (test, until) in enumerate(zip(tests, total, strict=True)) if until <= seconds or not number
    ]


def _run(tests: list[str], outcome: Path) -> None:
    pytest.main([*FLAGS, *tests], plugins=[_Outcome(tests, outcome)])


def exists(test: str, root: Path = forks.ROOT) -> bool:
    """Returns whether the function of a test, given as a node id, is in its file."""
    file, _, name = re.sub(r"[\[ ].*", "", test, flags=re.DOTALL).partition("::")
    path = root / file
    return path.exists() and f"def {name.split('::')[-1]}(" in path.read_text("utf-8") if name else path.exists()


def read(path: Path) -> dict[Mutant, Result]:
    """Reads the results of a record."""
    if not path.exists():
        return {}
    names = ("file", "line", "change", "nth")
    results = json.loads(path.read_text("utf-8"))["results"]
    return {Mutant(*(each.pop(name) for name in names)): each for each in results}


def write(path: Path, seed: int, results: dict[Mutant, Result]) -> None:
    """Writes a record: the share of detected mutants by folder, the survivors, and each result."""
    folders: dict[str, list[int]] = {}
    for mutant, result in results.items():
        counts = folders.setdefault(mutant.file.split("/")[1], [0, 0])
        counts[0] += result["detected_by"] is not None
        counts[1] += 1
    ordered = sorted(results, key=lambda mutant: (mutant.file, mutant.line, mutant.change, mutant.nth))
    record = {
        "seed": seed,
        "mutants": len(results),
        "detected": sum(detected for detected, _ in folders.values()),
        "detected_of": folders,
        "results": [{**vars(mutant), **results[mutant]} for mutant in ordered],
    }
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    """Runs the mutants that the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40, help="measured time of the tests that run on one mutant")
    parser.add_argument("--again", action="store_true", help="also run survivors without a reason")
    parser.add_argument("--at-most", type=int, default=None, help="end after this number of mutants")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    forks.CACHE.mkdir(parents=True, exist_ok=True)
    forks.preload()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "copy"
        forks.copy_tree(tree)
        measure(tree)
        covering = Covering(tree)
        known = read(options.record)
        chosen = changes.sample(tree, options.mutants, options.seed)
        results = {mutant: known[mutant] for mutant in chosen if _holds(known.get(mutant), again=options.again)}
        left = [mutant for mutant in chosen if mutant not in results]
        print(f"{len(left)} of {len(chosen)} mutants to run", flush=True)
        for mutant in sorted(left, key=lambda mutant: mutant.rank(options.seed))[: options.at_most]:
            results[mutant] = detect(mutant, tree, covering, options.seconds)
            write(options.record, options.seed, results)
            print(f"{results[mutant]['detected_by'] or 'SURVIVED'}  {mutant}", flush=True)
    write(options.record, options.seed, results)


def _holds(result: Result | None, *, again: bool) -> bool:
    """Returns whether a result of the record need not be computed again."""
    if result is None:
        return False
    return exists(result["detected_by"]) if result["detected_by"] else "reason" in result or not again


if __name__ == "__main__":
    main()
