"""Properties of every model config, checked on configs drawn at random (`tests.programs.crossings`)."""

import jax
import pytest

from tests.programs import crossings


def examine(seed: int, checks: list[str] | None = None) -> None:
    case, findings = crossings.examine(seed, checks)
    assert not crossings.faults(case, findings), case.cfg


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "check"), [(0, "rows"), (1, "cached")])
def test_one_check_of_a_few_configs(seed, check):
    examine(seed, [check])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 300, 10))
def test_all_checks_of_ten_configs(first):
    for seed in range(first, first + 10):
        examine(seed)
        jax.clear_caches()


@pytest.mark.slow
def test_a_difference_is_a_fault(monkeypatch):
    """A deliberate fault: every query attends to the next token."""
    from tformer_jax.nn.masks import Mask

    plain = Mask.places

    def late(self, *arguments):
        queries, keys = plain(self, *arguments)
        return queries + 1, keys

    monkeypatch.setattr(Mask, "places", late)
    case, findings = crossings.examine(1, ["rows"])
    assert {fault["property"] for fault in crossings.faults(case, findings)} >= {"later tokens"}
