"""Records of mutation tests and of equivalences match the code; no record names a folder of its machine."""

import json
import sys

import pytest

from tests import commands
from tests.programs import equivalences, mutate, replay
from tests.programs.mutation import changes, forks

CHANGED = 0.25
"""Maximum share of recorded mutants whose line may have changed since."""


@pytest.mark.long
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


@pytest.mark.long
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


CURVE = {"step": [50, 100, 200], "tokens": [10, 20, 40], "loss": [3.0, 2.0, 1.0], "nll": [3, 2, 1]}
COMMAND = "python scripts/sweep.py --config configs/x.py:small --config.model.dtype=bfloat16 --sweep seed=3,4"
RESULT = {"command": COMMAND, "runs": [{"settings": ["seed=3"], "curves": {"train": CURVE}}]}


def test_a_replay_trains_the_first_run_of_a_sweep_up_to_its_last_point():
    flags = ["--config", "configs/x.py:small", "--config.model.dtype=bfloat16", "--config.seed=3"]
    assert replay.train_flags(RESULT) == flags
    expected = {"step": [50, 100], "tokens": [10, 20], "loss": [3.0, 2.0]}
    assert replay.first_steps(RESULT, 199) == expected
    assert replay.first_steps(RESULT, 10)["step"] == [50]
    with pytest.raises(replay.CannotReplay, match="no curve"):
        replay.first_steps({"runs": []}, 100)


@pytest.mark.parametrize(
    ("tokens", "loss", "equal"),
    [([10, 15, 20], 2.001, True), ([10, 15, 21], 2.001, False), ([10, 15, 20], 1.99, False)],
)
def test_a_replay_compares_tokens_exactly_and_losses_nearly(tokens, loss, equal):
    actual = {"step": [50, 75, 100], "tokens": tokens, "loss": [3.0, 9.0, loss]}
    compared = replay.compare(replay.first_steps(RESULT, 100), actual)
    assert compared["equal"] is equal
    assert compared["actual"] == {"step": [50, 100], "tokens": [tokens[0], tokens[2]], "loss": [3.0, loss]}
