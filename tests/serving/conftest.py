"""Servers shared by many tests."""

import pytest

from tests.serving.live import live


@pytest.fixture(scope="module")
def lm():
    with live("decoder_lm") as server:
        yield server


@pytest.fixture(scope="module")
def translator():
    with live("seq2seq") as server:
        yield server
