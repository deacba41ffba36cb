"""Compressed files of several streams, as `cat` and parallel compressors write them."""

import bz2
import gzip
import lzma

import pytest

from tests.data.corpus_files import lz4, zstd
from tformer_jax.data.corpora import DataError
from tformer_jax.data.corpora.lines import BadLines, numbered_lines

PACKS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".lz4": lz4}
TEXTS = "".join(f"{number} ü\n" for number in range(40000)), "a\r\nb", ""
"""The first one has several chunks."""


def read(path) -> str:
    return "".join(line for _, line in numbered_lines(path, BadLines(), keep_ends=True))


@pytest.mark.parametrize("end", PACKS)
def test_all_streams_are_read(end, tmp_path):
    path = tmp_path / f"a{end}"
    path.write_bytes(b"".join(PACKS[end](text.encode()) for text in TEXTS))
    assert read(path) == "".join(TEXTS)


@pytest.mark.parametrize("end", [".gz", ".bz2", ".xz"])
def test_zeros_may_follow_a_stream(end, tmp_path):
    path = tmp_path / f"a{end}"
    path.write_bytes(PACKS[end](b"a\n") + bytes(100_000) + PACKS[end](b"b\n") + bytes(4))
    assert read(path) == "a\nb\n"


@pytest.mark.parametrize("after", [b"other bytes", b"B", b"\xfd7zX"])
@pytest.mark.parametrize("end", PACKS)
def test_anything_else_after_a_stream_is_damage(end, after, tmp_path):
    path = tmp_path / f"a{end}"
    path.write_bytes(PACKS[end](b"a\n") + after)
    with pytest.raises(DataError, match=rf"a\{end}, line [12]: from here on, this is not a complete"):
        read(path)
