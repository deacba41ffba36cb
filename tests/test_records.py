"""Records of mutation tests and of equivalences match the code; no record names a folder of its machine."""

import json
import sys

from tests import commands
from tests.programs import equivalences, mutate
from tests.programs.mutation import changes, forks

CHANGED = 0.25
"""Maximum share of recorded mutants whose line may have changed since."""


def test_the_recorded_mutants_exist():
    recorded = set(mutate.read(mutate.RECORD))
    actual = {mutant for file in {each.file for each in recorded} for mutant in changes.of_file(forks.ROOT, file)}
    gone = recorded - actual
    assert len(gone) <= CHANGED * len(recorded), (
        f"{len(gone)} of {len(recorded)} are gone; run python -m tests.programs.mutate"
    )


def test_the_tests_that_detected_a_mutant_exist():
    tests = {result["detected_by"] for result in mutate.read(mutate.RECORD).values()} - {None}
    gone = {test for test in tests if not mutate.exists(test)}
    assert len(gone) <= CHANGED * len(tests), f"{sorted(gone)} are gone; run python -m tests.programs.mutate"


def test_the_table_of_equivalences_has_every_test_that_compares():
    assert list(equivalences.read()) == equivalences.every(), "run python -m tests.programs.equivalences"


RECORDS = [
    path for folder in ("configs/results", "tests/programs") for path in (commands.ROOT / folder).rglob("*.json")
]


def test_no_recorded_command_names_a_folder_of_its_machine():
    loaded = {path: json.loads(path.read_text(encoding="utf-8")) for path in RECORDS}
    actual = {path: record["command"] for path, record in loaded.items() if "command" in record}
    assert len(actual) > 20
    assert not [str(path) for path, command in actual.items() if " /" in command or "=/" in command]


def test_the_command_of_a_record_has_only_the_name_of_an_absolute_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["program.py", "--data", "/some/where/data", "--runs", "runs/a b"])
    commands.write_record(tmp_path / "record.json", "tests.programs.x", scores=[1])
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["command"] == "python -m tests.programs.x --data data --runs 'runs/a b'"
    assert record["scores"] == [1]
