"""Records what each option of a config was compared with, and the largest difference.

    python -m tests.programs.equivalences --record tests/programs/equivalences.json

Runs the tests that pass `proves` to `assert_close`, as far as the record lacks them; `tests/parity` needs the extra
`parity`.
"""

import argparse
import ast
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".json")
"""For each test its comparisons: option, oracle, largest difference."""


def tests_of(path: Path) -> list[str]:
    """Returns the tests of a file that compare for the table, themselves or through functions of the file."""
    tree = ast.parse(path.read_text("utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    mentions = {name: {_name(part) for part in ast.walk(node)} for name, node in functions.items()}
    actual, more = set(), {"proves"}
    while more:
        actual |= more
        more = {name for name, names in mentions.items() if names & actual} - actual
    return [name for name in functions if name in actual and name.startswith("test_") and not _slow(functions[name])]


def _slow(test: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) == "pytest.mark.slow" for mark in test.decorator_list)


def _name(node: ast.AST) -> str | None:
    return node.arg if isinstance(node, ast.keyword) else getattr(node, "id", None)


def every() -> list[str]:
    """Returns the tests of the whole suite that compare for the table, as `file::function`."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [f"{path.relative_to(ROOT).as_posix()}::{name}" for path in paths for name in tests_of(path)]


def read(path: Path = RECORD) -> dict[str, list[list[Any]]]:
    """Reads the record, empty if there is none."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


class _Differences:
    """A pytest plugin: collects the comparisons of each test function."""

    def __init__(self) -> None:
        self.largest: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        from tests import helpers  # after conftest.py has chosen the devices

        mine = self.largest[nodeid.partition("[")[0]]
        for pair, difference in helpers.EQUIVALENCES.items():
            mine[pair] = max(mine.get(pair, 0.0), difference)
        helpers.EQUIVALENCES.clear()


def main() -> None:
    """Runs the tests that the record lacks, file by file, and records those of each file that passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--all", action="store_true", help="run the tests that the record has, too")
    options = parser.parse_args()
    tests = every()
    known = {} if options.all else read(options.record)

    def write() -> None:
        options.record.write_text(json.dumps({test: known[test] for test in tests if test in known}, indent=1) + "\n")

    write()  # without tests that are gone
    left = [test for test in tests if test not in known]
    failed = []
    for file, mine in itertools.groupby(left, key=lambda test: test.partition("::")[0]):
        code, actual = _compared(list(mine))
        if code:
            failed.append(file)
            continue
        known |= actual
        write()
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def _compared(tests: list[str]) -> tuple[int, dict[str, list[Any]]]:
    """Runs test functions; of those whose cases are all slow, runs these. Returns the exit status, and the rows."""
    differences, code = _Differences(), 0
    for marks in ("not slow", ""):
        left = [test for test in tests if test not in differences.largest]
        if left and not code:
            code = pytest.main(["-n", "0", "--timeout=0", "-m", marks, *left], plugins=[differences])
            code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)
    largest = differences.largest.items()
    rows = {test: [[*pair, value] for pair, value in sorted(each.items())] for test, each in largest}
    return code, rows


if __name__ == "__main__":
    main()
