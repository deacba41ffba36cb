"""Random Unicode texts through every path of a text (`tests.programs.fuzz`); a deliberate fault is noticed."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra parity", allow_module_level=True)

from tests.programs import fuzz
from tests.random_texts import Texts
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.data.tokenizers import base, normalization


def test_changed_texts_have_the_same_normal_form():
    texts = Texts.draw(500, seed=1)
    assert list(map(clean_whitespace, texts.changed)) == texts.clean
    assert sum(a != b for a, b in zip(texts.changed, texts.clean, strict=True)) > 400


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_path(tmp_path):
    result = fuzz.run_all(1000, 0, tmp_path)
    assert not result["faults"]
    assert result["distinct_outputs"] > 50


@pytest.mark.slow
def test_a_fault_is_recorded(tmp_path, monkeypatch):
    """A deliberate fault: only the ends of texts are cleaned."""
    monkeypatch.setitem(normalization.STEPS, normalization.WHITESPACE, lambda language: str.strip)
    monkeypatch.setattr(base, "_cached_normalizer", base.normalizer)  # other tests fill the cache
    findings = fuzz.Findings()
    fuzz.Fuzz(Texts.draw(300, 0), tmp_path, findings, 0).tokenizers()
    assert {"bytes: ids of raw texts", "bpe: ids of changed texts"} <= findings.faults.keys()
