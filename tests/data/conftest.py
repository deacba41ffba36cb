"""The corpus of the tests of prepared data; tests on real corpora run if TFORMER_DATA names their folder."""

import os
from pathlib import Path

import pytest

from tests.data.prepared import write_corpus

collect_ignore = [] if os.environ.get("TFORMER_DATA") else ["test_real_corpora.py"]


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """A folder with the files that `tests.data.prepared.config` reads."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder
