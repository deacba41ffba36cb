"""The records of mutation tests and of equivalences match the code and the tests."""

from tests.programs import equivalences, mutate
from tests.programs.mutation import changes, forks

CHANGED = 0.25
"""Maximum share of recorded mutants whose line may have changed since."""


def test_the_recorded_mutants_exist():
    recorded = set(mutate.read(mutate.RECORD))
    found = {mutant for file in {one.file for one in recorded} for mutant in changes.of_file(forks.ROOT, file)}
    gone = recorded - found
    assert len(gone) <= CHANGED * len(recorded), (
        f"{len(gone)} of {len(recorded)} are gone; run python -m tests.programs.mutate"
    )


def test_the_tests_that_detected_a_mutant_exist():
    tests = {result["detected_by"] for result in mutate.read(mutate.RECORD).values()} - {None}
    gone = {test for test in tests if not mutate.exists(test)}
    assert len(gone) <= CHANGED * len(tests), f"{sorted(gone)} are gone; run python -m tests.programs.mutate"


def test_the_table_of_equivalences_has_every_test_that_compares():
    assert list(equivalences.read()) == equivalences.every(), "run python -m tests.programs.equivalences"
