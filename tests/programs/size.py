"""Counts the files, lines, names and import circles of the package: `python -m tests.programs.size [--record FILE]`."""

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grimp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tformer_jax"
COMMANDS = {"train.py": ("cli.train",), "translate.py": ("cli.translate", "api")}
"""Modules that each command imports; those that its function `main` imports are counted too."""
OWNERS = ("tasks", "models")
"""Folders that may compare `family`."""
LONG_FUNCTION, LONG_FILE = 60, 400
"""Numbers of lines."""
LISTS = (f"functions over {LONG_FUNCTION} lines", f"files over {LONG_FILE} lines", "import circles")
"""Counts whose entries the table lists."""
LOADED = """
import importlib, json, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == sys.argv[1]]
print(json.dumps(sorted({module.__file__ for module in modules if module.__file__})))
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def measure(root: Path, package: str = PACKAGE, commands: Mapping[str, tuple[str, ...]] = COMMANDS) -> dict[str, Any]:
    """Returns all counts of the package in the folder `root`, ready for JSON."""
    folder = root / package
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    lines = {path: count_lines(path) for path in trees}
    folders = Counter[str]()
    files = Counter[str]()
    for path, count in lines.items():
        name = path.relative_to(folder).parts[0]
        folders[name] += count
        files[name] += 1
    names = {path: str(path.relative_to(folder)) for path in trees}
    functions = [(f"{names[path]}:{node.name}", length(node)) for path in trees for node in functions_in(trees[path])]
    comparisons = {names[path]: family_comparisons(trees[path]) for path in trees}
    return {
        "package": {"files": len(lines), "lines": sum(lines.values())},
        "imported": {command: imported(root, package, modules) for command, modules in commands.items()},
        "folders": {name: {"files": files[name], "lines": folders[name]} for name in sorted(folders)},
        "family compared": {
            name: count for name, count in comparisons.items() if count and Path(name).parts[0] not in OWNERS
        },
        "attributes of Trainer": sorted(name for tree in trees.values() for name in attributes(tree, "Trainer")),
        "public names": sum(len(public_names(tree)) for tree in trees.values()),
        LISTS[0]: {name: count for name, count in functions if count > LONG_FUNCTION},
        LISTS[1]: {names[path]: count for path, count in lines.items() if count > LONG_FILE},
        LISTS[2]: circles(root, package),
    }


def count_lines(path: Path) -> int:
    """Returns the number of lines of a file."""
    return len(path.read_bytes().splitlines())


def imported(root: Path, package: str, modules: tuple[str, ...]) -> dict[str, int]:
    """Returns the files and lines of the package that a new process loads when it imports modules of it.

    The modules that the first one imports in its function `main` are imported too.
    """
    main = root.joinpath(package, *modules[0].split(".")).with_suffix(".py")
    names = [f"{package}.{module}" for module in modules] + imports_of_main(main, package)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, package, *names], cwd=root, capture_output=True, text=True, check=True
    )
    paths = [Path(path) for path in json.loads(done.stdout.splitlines()[-1])]
    return {"files": len(paths), "lines": sum(map(count_lines, paths))}


def imports_of_main(path: Path, package: str) -> list[str]:
    """Returns the modules of the package that the function `main` of a file imports."""
    names = []
    for function in functions_in(ast.parse(path.read_text(encoding="utf-8"))):
        for node in ast.walk(function) if function.name == "main" else ():
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names if alias.name.split(".")[0] == package]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
                for alias in node.names:
                    inner = path.parents[path.parts[::-1].index(package)].joinpath(*node.module.split("."), alias.name)
                    module = inner.is_dir() or inner.with_suffix(".py").exists()
                    names.append(f"{node.module}.{alias.name}" if module else node.module)
    return names


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Yields all functions and methods."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(node: Function) -> int:
    """Returns the number of lines of a function with its signature and docstring, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def family_comparisons(tree: ast.AST) -> int:
    """Returns how often a variable or attribute `family` is compared or matched."""

    def is_family(node: ast.AST) -> bool:
        return getattr(node, "attr", None) == "family" or getattr(node, "id", None) == "family"

    return sum(
        (isinstance(node, ast.Compare) and any(map(is_family, (node.left, *node.comparators))))
        or (isinstance(node, ast.Match) and is_family(node.subject))
        for node in ast.walk(tree)
    )


def attributes(tree: ast.AST, name: str) -> set[str]:
    """Returns the attributes that a class declares, or that its methods assign to `self`."""
    (body,) = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name] or [[]]
    declared = {
        node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = {
        node.attr
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return declared | assigned


def public_names(tree: ast.Module) -> list[str]:
    """Returns the functions, classes and constants that a module defines without a leading underscore."""
    names = []
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def circles(root: Path, package: str) -> list[list[str]]:
    """Returns the groups of modules that import each other, in functions and for type checkers too.

    `__init__.py` of the package itself, which imports its Python API when that is used, is left out.
    """
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph(package, cache_dir=None)
    finally:
        sys.path.remove(str(root))
    modules = sorted(graph.modules - {package})
    imports = [[graph.direct_import_exists(importer=a, imported=b) for b in modules] for a in modules]
    groups: dict[int, list[str]] = {}
    for module, label in zip(modules, connected_components(csr_array(imports), connection="strong")[1], strict=True):
        groups.setdefault(label, []).append(module)
    return [group for group in groups.values() if len(group) > 1]


def table(counts: Mapping[str, Any]) -> str:
    """Returns the counts as aligned text."""
    sizes = {
        **counts["folders"],
        PACKAGE: counts["package"],
        **{f"imported by {name}": size for name, size in counts["imported"].items()},
    }
    rows = [f"{name:<28}{size['files']:>6,} files{size['lines']:>8,} lines" for name, size in sizes.items()]
    family = counts["family compared"]
    rows.append(f"{'family compared':<28}{sum(family.values()):>6,} times in {len(family)} files")
    rows.append(f"{'public names':<28}{counts['public names']:>6,}")
    for title in ("attributes of Trainer", *LISTS):
        rows.append(f"{title:<28}{len(counts[title]):>6,}")
        rows += [f"  {entry}" for entry in counts[title] if title in LISTS]
    return "\n".join(rows)


def main() -> None:
    """Prints the counts, and writes them to a file if requested."""
    parser = argparse.ArgumentParser(description="Counts files, lines, names and import circles of the package.")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the counts as JSON")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="folder with another revision")
    options = parser.parse_args()
    counts = measure(options.root.resolve())
    print(table(counts))
    if options.record:
        options.record.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
