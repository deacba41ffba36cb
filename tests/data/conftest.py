"""Tests on real corpora run if the environment variable TFORMER_DATA is set to their folder."""

import os

collect_ignore = [] if os.environ.get("TFORMER_DATA") else ["test_real_corpora.py"]
