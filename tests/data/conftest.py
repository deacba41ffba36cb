"""Tests on real corpora run where the variable TFORMER_DATA names their folder."""

import os

collect_ignore = [] if os.environ.get("TFORMER_DATA") else ["test_real_corpora.py"]
