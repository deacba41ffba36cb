"""Servers shared by many tests."""

import pytest

from tests.serving.live import live


@pytest.fixture(scope="module")
def lm():
    with live("decoder_lm") as one:
        yield one


@pytest.fixture(scope="module")
def translator():
    with live("seq2seq") as one:
        yield one
