"""The changes that mutation tests make to the source: one operator or constant at a time."""

import ast
import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("nn", "models", "train", "runs", "data", "inference", "interop", "parallel", "tasks")
"""The folders of tformer_jax that are sampled."""
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
}
MESSAGES = {"print", "warning", "warn", "Console", "Progress", "track"}
"""Functions whose arguments only decide what is shown."""
NEUTRAL = {
    "strict": "guards `zip` against lengths that the caller fixes",
    "frozen": "guards dataclasses that nothing assigns to",
    "eq": "equality of dataclasses that are not compared",
    "maxsize": "size of a cache",
    "donate_argnums": "memory, not values",
    "prevent_cse": "speed of compiled programs",
    "unique_indices": "speed of compiled programs",
    "check_vma": "a check of jax.shard_map that passes",
    "allow_split_physical_axes": "placement on TPUs",
    "num_threads": "speed of reading",
    "prefetch_buffer_size": "speed of reading",
    "daemon": "how a process ends",
    "indent": "layout of JSON",
}
"""Keyword arguments that cannot change a result."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change, identified by the text around it, so that it survives changes elsewhere in the file."""

    file: str
    """Relative to the root of the repository."""
    line: str
    """The source line on which the changed expression begins."""
    change: str
    """The expression before and after."""
    nth: int
    """Index among equal changes on equal lines of the file."""

    def rank(self, seed: int) -> str:
        """Returns a hash; the mutants with the lowest ranks form the sample."""
        return hashlib.sha256(repr((seed, dataclasses.astuple(self))).encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.file}: `{self.line}`: {self.change}"


def changed(node: ast.AST) -> ast.AST | None:
    """Returns a changed copy of one node, or None if nodes of its kind are not changed."""
    node = copy.copy(node)
    match node:
        case ast.Compare(left=ast.Call(func=ast.Attribute(attr="monotonic" | "perf_counter"))):
            return None  # < or <= is the same for a clock
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str()) | ast.JoinedStr()):
            return None  # a path
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            return node.operand
        case ast.BinOp() | ast.BoolOp() | ast.UnaryOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            node.op = OPERATORS[type(node.op)]()
        case ast.Compare() if type(node.ops[0]) in OPERATORS:
            node.ops = [OPERATORS[type(node.ops[0])](), *node.ops[1:]]
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float()):
            node.value = 2 * node.value if abs(node.value) >= 1000 else node.value + 1
        case _:
            return None
    return node


def _excluded(node: ast.AST) -> list[Any]:
    """Returns the children of a node that are not changed: messages, annotations, durations and neutral arguments."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return list(ast.iter_child_nodes(node))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in MESSAGES:
            return [*node.args, *node.keywords]
        case ast.keyword(arg=name) if name in NEUTRAL:
            return [node.value]
        case ast.Assign(targets=[ast.Name(id=name)]) if name.endswith("SECONDS"):
            return [node.value]
        case ast.arg() | ast.AnnAssign():
            return [node.annotation]
        case ast.FunctionDef():
            return [node.returns]
    return []


def sites(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes of a module that are changed, in source order."""
    actual: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if changed(node) is not None:
            actual.append(node)
        excluded = _excluded(node)
        for child in ast.iter_child_nodes(node):
            if not any(child is each for each in excluded):
                visit(child)

    visit(tree)
    return actual


def located(file: str, source: str) -> Iterator[tuple[Mutant, ast.AST, ast.Module]]:
    """Yields the mutants of a file, the node of each, and the module's tree."""
    lines, tree = source.splitlines(), ast.parse(source)
    counts: Counter[tuple[str, str]] = Counter()
    for node in sites(tree):
        text = lines[node.lineno - 1].strip()
        change = f"{ast.unparse(node)} -> {ast.unparse(changed(node))}"
        yield Mutant(file, text, change, counts[text, change]), node, tree
        counts[text, change] += 1


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST):
        self.target = target

    def visit(self, node: ast.AST) -> Any:
        return changed(node) if node is self.target else self.generic_visit(node)


def mutated(mutant: Mutant, source: str) -> tuple[str, int]:
    """Returns the source with the change, and the line number of the change in the given source."""
    for actual, node, tree in located(mutant.file, source):
        if actual == mutant:
            return ast.unparse(_Replace(node).visit(tree)), node.lineno
    raise LookupError(f"{mutant} does not exist")


def of_file(root: Path, file: str) -> list[Mutant]:
    """Returns the mutants of one file, none if it does not exist."""
    path = root / file
    return [mutant for mutant, _, _ in located(file, path.read_text("utf-8"))] if path.exists() else []


def every(root: Path) -> dict[str, list[Mutant]]:
    """Returns all mutants, by folder of the package."""
    actual: dict[str, list[Mutant]] = {}
    for package in PACKAGES:
        paths = sorted((root / "tformer_jax" / package).rglob("*.py"))
        actual[package] = [mutant for path in paths for mutant in of_file(root, path.relative_to(root).as_posix())]
    return actual


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draws mutants, from each folder in proportion to its number of mutants.

    A change to the code leaves the rest of the sample as it is: the mutants with the lowest hashes are taken.
    """
    available = every(root)
    total = sum(map(len, available.values()))
    shares = {package: count * len(mutants) / total for package, mutants in available.items()}
    quotas = {package: int(share) for package, share in shares.items()}
    for package in sorted(shares, key=lambda name: quotas[name] - shares[name])[: count - sum(quotas.values())]:
        quotas[package] += 1
    ranked = {name: sorted(mutants, key=lambda mutant: mutant.rank(seed)) for name, mutants in available.items()}
    return [mutant for name, mutants in ranked.items() for mutant in mutants[: quotas[name]]]
