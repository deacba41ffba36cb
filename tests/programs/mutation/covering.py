"""Which tests execute which line of the package, and how long each test takes."""

import ast
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.programs.mutation import forks
from tests.programs.mutation.changes import PACKAGES

FOLDER = forks.CACHE / "tests"
PYTEST = ("-n", "0", "-p", "no:cacheprovider", "-W", "ignore", "--no-header", "--timeout=0")
SETTINGS = """[run]
source = {tree}/tformer_jax
data_file = {scratch}/covered
parallel = true
sigterm = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST}}
"""
OTHERS = ("test_quality", "test_readme_examples", "test_launch", "test_records")
"""Test files that check the sources, or commands as a whole."""
LIMIT = 1200
"""CPU seconds for one test file."""


def measure(tree: Path) -> None:
    """Runs each test file that is new or changed since the last time, and keeps what its tests execute."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    paths = {path: FOLDER / f"{'.'.join(path.relative_to(tree / 'tests').parts)}.json" for path in _files(tree)}
    for gone in set(FOLDER.iterdir()) - set(paths.values()):
        gone.unlink()
    for path, remaining in paths.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if remaining.exists() and json.loads(remaining.read_text())["digest"] == digest:
            continue
        name = path.relative_to(tree).as_posix()
        seconds = forks.forked(lambda scratch, name=name: _measured(tree, scratch, name), tree, LIMIT)
        written = forks.CACHE / "measured"
        if not written.exists():
            print(f"{name} did not end: see {forks.CACHE / 'log'}", flush=True)
            continue
        actual = json.loads(written.read_text())
        written.unlink()
        remaining.write_text(json.dumps({"digest": digest, **actual}))
        print(f"{name}: {len(actual['tests'])} tests, {seconds:.0f} s", flush=True)


def _files(tree: Path) -> list[Path]:
    """Returns the test files of the sampled folders, those beside the folders, and those of parity."""
    folders = [tree / "tests" / name for name in (*PACKAGES, "parity")]
    return [
        *(path for folder in folders for path in sorted(folder.rglob("test_*.py"))),
        *(path for path in sorted((tree / "tests").glob("test_*.py")) if path.stem not in OTHERS),
    ]


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that it started and waited for."""
    return sum(os.times()[:4])


class _Contexts:
    """A pytest plugin: notes the test that executes a line, its CPU time and whether it passes."""

    def __init__(self, measuring: Any):
        self.measuring, self.seconds, self.failed = measuring, {}, set()
        self.loading, self._begin = 0.0, cpu_seconds()

    def pytest_collection_finish(self) -> None:
        self.loading = cpu_seconds() - self._begin

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.measuring.switch_context(nodeid)
        self._begin = cpu_seconds()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.measuring.switch_context("")
        self.seconds[nodeid] = cpu_seconds() - self._begin


def _measured(tree: Path, scratch: Path, name: str) -> None:
    import coverage
    import pytest

    settings = scratch / "coverage.cfg"
    settings.write_text(SETTINGS.format(tree=tree, scratch=scratch))
    os.environ["COVERAGE_PROCESS_START"] = str(settings)  # measures the processes that tests start
    measuring = coverage.Coverage(config_file=str(settings), context="")
    measuring.start()
    notes = _Contexts(measuring)
    pytest.main([*PYTEST, name], plugins=[notes])
    measuring.stop()
    measuring.save()
    passed = sorted(set(notes.seconds) - notes.failed, key=notes.seconds.get)
    numbers = {test: number for number, test in enumerate(passed)}
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file, key, test in _executed(tree, scratch):
        if test in numbers:
            lines[file][key].add(numbers[test])
    actual = {
        "loading": notes.loading,
        "tests": [[test, round(notes.seconds[test], 3)] for test in passed],
        "lines": {file: {key: sorted(tests) for key, tests in keys.items()} for file, keys in lines.items()},
    }
    (forks.CACHE / "measured").write_text(json.dumps(actual))


def _executed(tree: Path, scratch: Path) -> Iterator[tuple[str, str, str]]:
    """Yields file, key of the line and test from coverage's data files."""
    import coverage

    for path in scratch.glob("covered.*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for measured in data.measured_files():
            file = Path(measured).relative_to(tree).as_posix()
            places = keys((tree / file).read_text("utf-8"))
            for line, contexts in data.contexts_by_lineno(measured).items():
                for context in contexts:
                    yield file, places[line - 1], context.split(" (")[0]


def keys(source: str) -> list[str]:
    """Returns a name of each line that changes elsewhere do not change: the function around it, and its text."""
    lines = [line.strip() for line in source.splitlines()]
    functions = [""] * len(lines)

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}."
                functions[child.lineno - 1 : child.end_lineno] = [inner] * (child.end_lineno - child.lineno + 1)
            visit(child, inner)

    visit(ast.parse(source), "")
    return [f"{function} {text}" for function, text in zip(functions, lines, strict=True)]


class Covering:
    """The tests of each line, as measured."""

    def __init__(self, tree: Path):
        self.tree, self.seconds, self.loading = tree, {}, {}
        self._lines: dict[tuple[str, str], set[str]] = defaultdict(set)
        for path in sorted(FOLDER.iterdir()):
            actual = json.loads(path.read_text())
            names = [name for name, _ in actual["tests"]]
            self.seconds |= dict(actual["tests"])
            self.loading |= {name.split("::")[0]: actual["loading"] for name in names[:1]}
            for file, lines in actual["lines"].items():
                for key, numbers in lines.items():
                    self._lines[file, key].update(names[number] for number in numbers)

    def cost(self, test: str) -> float:
        """Returns the seconds of a test, with those in which its file is imported."""
        return self.seconds[test] + self.loading[test.split("::")[0]]

    def tests(self, file: str, line: int) -> list[str]:
        """Returns the tests that execute the statement of a line, those that take the least time first.

        What runs at import is covered by the tests of the functions that mention the names it defines.
        """
        source = (self.tree / file).read_text("utf-8")
        names, (*around, node) = keys(source), _statements(ast.parse(source), line)
        last = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
        covered = [self._lines.get((file, key), set()) for key in names[node.lineno - 1 : max(last, line)]]
        actual = set().union(*covered)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) or (not actual and _function(around)):
            inner = names[node.lineno - 1].partition(" ")[0]
            actual |= self._of(lambda path, place, _: path == file and place.startswith(inner))
        elif not _function(around):
            mention = _mention(_with_users(ast.parse(source), _defined(node)))
            actual |= self._of(lambda _, place, text: mention.search(text) is not None)
        return sorted(actual, key=self.cost)

    def _of(self, wanted: Callable[[str, str, str], bool]) -> set[str]:
        """Returns the tests of all lines that are wanted, given their file, function and text."""
        return set().union(*(tests for (each, key), tests in self._lines.items() if wanted(each, *key.split(" ", 1))))


def _statements(tree: ast.AST, line: int) -> list[ast.stmt]:
    """Returns the statements around a line, the innermost last."""

    def first(node: ast.stmt) -> int:
        return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])

    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and first(node) <= line <= node.end_lineno]
    return sorted(around, key=lambda node: (node.lineno, node.col_offset))


def _function(around: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.FunctionDef) for node in around)


def _mention(names: set[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b" if names else "$.")


def _with_users(module: ast.Module, names: set[str]) -> set[str]:
    """Returns the names, and those that the module defines by means of them."""
    more = set(names)
    while more:
        mention = _mention(names)
        assigned = [node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        users = [node for node in assigned if mention.search(ast.unparse(node.value))]
        more = set().union(*map(_defined, users)) - names
        names = names | more
    return names


def _defined(node: ast.stmt) -> set[str]:
    """Returns the names that an assignment defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)}
