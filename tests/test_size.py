"""The program that counts files, lines, names and circles counts what a small made package has."""

import pytest

from tests.programs import size

FILES = {
    "__init__.py": "def __getattr__(name):\n    from made import api\n    return getattr(api, name)\n",
    "api.py": "from made.tasks import task\n",
    "unused.py": "import made.api\n" * 450,
    "cli/__init__.py": "",
    "cli/train.py": (
        "import os\nfrom made.loop import Trainer\n\n\n"
        "def main():\n    from made import tasks\n    from made.tasks import task\n\n\n"
        "def other():\n    from made import unused\n"
    ),
    "loop.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from made import step\n\n"
        "LIMIT, _HIDDEN = 1, 2\n\n\n"
        "class Trainer:\n    kind: str\n\n    def __init__(self, cfg):\n        self.cfg, self.step = cfg, 0\n\n"
        "    def run(self):\n        self.step += 1\n        self.cfg.seed = 1\n        other = cfg\n"
    ),
    "step.py": (
        "import made.loop\n\n\ndef long(cfg, family):\n"
        "    if cfg.model.family == 'seq2seq':\n        return family in ('a',)\n"
        "    match cfg.family:\n        case _:\n            return {'seq2seq': 1}[cfg.family]\n" + "    x = 1\n" * 60
    ),
    "tasks/__init__.py": "",
    "tasks/task.py": "def check(family):\n    return family == 'seq2seq'\n",
}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    root = tmp_path_factory.mktemp("size")
    for name, text in FILES.items():
        path = root / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return size.measure(root, "made", {"train.py": ("cli.train",), "translate.py": ("cli.train", "api", "step")})


def lines(*names):
    return {"files": len(names), "lines": sum(FILES[name].count("\n") for name in names)}


def test_files_and_lines_are_counted_by_folder(counts):
    assert counts["package"] == lines(*FILES)
    assert counts["folders"]["cli"] == lines("cli/__init__.py", "cli/train.py")
    assert counts["folders"]["loop.py"] == lines("loop.py")
    assert counts["files over 400 lines"] == {"unused.py": 450}


def test_imports_are_those_of_the_modules_and_of_main(counts):
    loaded = ("__init__.py", "cli/__init__.py", "cli/train.py", "loop.py", "tasks/__init__.py", "tasks/task.py")
    assert counts["imported"] == {"train.py": lines(*loaded), "translate.py": lines(*loaded, "api.py", "step.py")}


def test_comparisons_of_family_outside_tasks_are_counted(counts):
    assert counts["family compared"] == {"step.py": 3}


def test_names_attributes_and_long_functions_are_counted(counts):
    assert counts["attributes of Trainer"] == ["cfg", "kind", "step"]
    assert counts["public names"] == len(["main", "other", "LIMIT", "Trainer", "long", "check"])
    assert counts["functions over 60 lines"] == {"step.py:long": 66}


def test_circles_are_found_also_for_type_checkers(counts):
    assert counts["import circles"] == [["made.loop", "made.step"]]


def test_the_table_has_all_counts(counts):
    text = size.table(counts)
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("public names")] == ["6"]
    assert "  step.py:long" in text and "family compared                  3 times in 1 files" in text
