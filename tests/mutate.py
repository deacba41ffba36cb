"""Mutation tests of `tformer_jax/nn`: changes one constant or sign at a time and reports which tests fail.

    python -m tests.mutate --mutants 120 --seed 0 --workers 2 --report tests/mutations.json

Each mutant is a copy of the tree with one change; the file's own tests run on it, then those of `OTHERS`, until the
first failure. A mutant that no test detects is a survivor: either a test is missing, or `REASONS` explains why it
cannot be detected.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OTHERS = (
    "models/test_models.py",
    "models/test_cache.py",
    "nn",
    "models/test_properties.py",
    "models/test_packing.py",
    "test_presets.py",
)
OWN = {
    "attention_ops": "attention_ops",
    "layouts": "stacks",
    "projections": "attention",
    "activations": "ffn",
    "dropout": "ffn",
}
"""The test file of a module or folder, if it has another name."""
TIMEOUT = 900
SAME = "the result is the same: "
REASONS = {
    "tformer_jax/nn/linear.py:41: True -> False": SAME + "strict only guards zip against lengths that cannot differ",
    "tformer_jax/nn/attention_ops/core.py:30: True -> False": SAME + "frozen only guards a dataclass nobody assigns to",
    "tformer_jax/nn/attention_ops/blocks.py:107: 1 -> 2": SAME + "a row that sees nothing is 0 / 2 as well as 0 / 1",
    "tformer_jax/nn/relative.py:78: 0 -> 1": SAME + "the base is never None where it is used",
}
"""Why a survivor does not change any observable result, by `file: change`."""

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def mutate(node: ast.AST) -> bool:
    """Changes one node in place; returns False if nodes of its kind are not changed."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else node.op
        if not isinstance(node.op, ast.UAdd):
            node.operand = ast.UnaryOp(type(node.op)(), node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value = node.value + 1
    else:
        return False
    return True


def mutable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Returns the nodes that `mutate` can change, in order, outside of error messages and annotations."""
    skipped = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.JoinedStr) for part in ast.walk(node)
    }
    skipped |= {
        id(part)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if isinstance(getattr(node, field, None), ast.AST)
        for part in ast.walk(getattr(node, field))
    }
    for node in ast.walk(tree):
        probe = type(node)(**{name: getattr(node, name) for name in node._fields if hasattr(node, name)})
        if isinstance(probe, ast.Compare):
            probe.ops = list(probe.ops)
        if id(node) not in skipped and mutate(probe):
            yield node


def mutants() -> list[tuple[Path, int]]:
    """Returns all possible mutations: a file, and the index of the node in it."""
    found = []
    for path in sorted((ROOT / "tformer_jax" / "nn").rglob("*.py")):
        found += [(path, number) for number, _ in enumerate(mutable_nodes(ast.parse(path.read_text("utf-8"))))]
    return found


def change(path: Path, number: int) -> tuple[str, str]:
    """Returns the mutated source, and the change as `file:line: before -> after`."""
    tree = ast.parse(path.read_text("utf-8"))
    node: Any = list(mutable_nodes(tree))[number]
    before, line = ast.unparse(node), node.lineno
    mutate(node)
    return ast.unparse(tree), f"{path.relative_to(ROOT)}:{line}: {before} -> {ast.unparse(node)}"


def run(mutant: tuple[Path, int]) -> dict[str, Any]:
    """Runs the tests on one mutant."""
    path, number = mutant
    source, described = change(path, number)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("tformer_jax", "tests", "pyproject.toml", "README.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, tree / part)
        (tree / path.relative_to(ROOT)).write_text(source, encoding="utf-8")
        folder_or_file = path.parent.name if path.parent.name in OWN else path.stem
        own = tree / "tests" / "nn" / f"test_{OWN.get(folder_or_file, folder_or_file)}.py"
        others = [tree / "tests" / name for name in OTHERS]
        caught = (first_failure(tree, [own]) if own.exists() else None) or first_failure(tree, others)
    result = {"mutant": described, "caught_by": caught}
    print(f"{'caught  ' if caught else 'SURVIVED'} {described}  {caught or ''}", flush=True)
    return result


def first_failure(tree: Path, tests: list[Path]) -> str | None:
    """Returns the first test that fails in the copy at `tree`; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *map(str, tests)]
    environment = os.environ | {"PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return "the time limit"
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or ["the import"])[0].split(" ", 1)[-1] if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", type=Path, default=ROOT / "tests" / "mutations.json")
    options = parser.parse_args()
    chosen = random.Random(options.seed).sample(mutants(), options.mutants)
    known = json.loads(options.report.read_text("utf-8"))["results"] if options.report.exists() else []
    results = {result["mutant"]: result for result in known}
    left = [mutant for mutant in chosen if change(*mutant)[1] not in results]
    with ThreadPoolExecutor(options.workers) as pool:
        for result in pool.map(run, left):
            results[result["mutant"]] = result
            write(options.report, options.seed, results)
    report = write(options.report, options.seed, results)
    print(f"{report['caught']} of {report['mutants']} caught; report in {options.report}")


def write(path: Path, seed: int, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Writes the report so far, from which an interrupted run continues, and returns it."""
    survivors = sorted(name for name, result in results.items() if not result["caught_by"])
    report = {
        "seed": seed,
        "mutants": len(results),
        "caught": len(results) - len(survivors),
        "survivors": {name: REASONS.get(name, "a test is missing") for name in survivors},
        "results": [results[name] for name in sorted(results)],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
