"""Blocks of lines of text files as Arrow arrays: a third of the time of a loop over lines.

A block is regular if it is valid UTF-8, has the expected columns and no blank text, so that no line is skipped and no
example dropped. The lines of other blocks are read in a loop.
"""

import codecs
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tformer_jax.data.characters import is_blank
from tformer_jax.data.corpora.example import Example
from tformer_jax.data.corpora.lines import BadLines, open_binary, raw_lines

Block: TypeAlias = pa.RecordBatch | Iterable[Example]
"""Examples as columns, or as dictionaries that filters have yet to see."""
LINES, BYTES = 1_000, 2**20
"""Number of lines with which a block ends, or their size if this is reached before."""
T = TypeVar("T")
FEW = 16
"""Smaller blocks take less time in a loop."""


def line_blocks(paths: Sequence[Path], bad: BadLines) -> Iterator[tuple[int, list[list[bytes]]]]:
    """Yields the lines of aligned files with their ends, in blocks, each with the number of its first line, from 1.

    After the end of a file, its blocks are empty.

    Raises:
        DataError: a file cannot be opened; or it is empty or damaged, and malformed lines are not skipped.
    """
    with contextlib.ExitStack() as files:
        leading, *others = (raw_lines(files.enter_context(open_binary(path)), path, bad) for path in paths)
        blocks, first, filled = divided(leading, LINES, BYTES, len), 1, [False for _ in paths]
        while True:
            block = next(blocks, [])
            aligned = [block, *(list(itertools.islice(lines, len(block) or LINES)) for lines in others)]
            if not any(aligned):
                break
            filled = [known or any(map(_is_filled, lines)) for known, lines in zip(filled, aligned, strict=True)]
            yield first, aligned
            first += max(map(len, aligned))
    for path, known in zip(paths, filled, strict=True):
        if not known:
            bad.reject_empty(path)


def _is_filled(line: bytes) -> bool:
    return bool(line.decode("utf-8-sig", "replace").strip())


def divided(
    items: Iterable[T], count: int, limit: int, size_of: Callable[[T], int], rows_of: Callable[[T], int] | None = None
) -> Iterator[list[T]]:
    """Yields successive lists of at least `count` rows, or of fewer whose sizes reach `limit`.

    Args:
        rows_of: number of rows of an item; None: each is one.
    """
    part: list[T] = []
    rows = size = 0
    for item in items:
        part.append(item)
        rows, size = rows + (1 if rows_of is None else rows_of(item)), size + size_of(item)
        if rows >= count or size >= limit:
            yield part
            part, rows, size = [], 0, 0
    if part:
        yield part


def split_lines(block: Sequence[bytes]) -> pa.Array | None:
    """Returns lines without their ends; None if they are few, not UTF-8 or begin with a byte order mark."""
    if len(block) < FEW:
        return None
    text = b"".join(block)
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    text = text.removesuffix(b"\n" if text.endswith(b"\n") else b"\r")
    if text.startswith(codecs.BOM_UTF8):
        return None
    ends = pa.py_buffer(np.array([0, len(text)], np.int64))
    whole = pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(text))
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return pc.split_pattern(whole, "\n").flatten()


def split_columns(lines: pa.Array | None, width: int, columns: Iterable[int]) -> list[pa.Array | None]:
    """Returns some columns, from 0, of tab-separated lines; None if there are none, or have not `width` columns."""
    cells = None if lines is None else pc.split_pattern(lines, "\t")
    if cells is None or not pc.all(pc.equal(pc.list_value_length(cells), width)).as_py():
        return [None]
    return [pc.list_element(cells, column) for column in columns]


def as_block(names: Sequence[str], columns: Iterable[pa.Array | None]) -> pa.RecordBatch | None:
    """Returns columns by name; None if one is missing, or has a blank text."""
    columns = list(columns)
    if any(column is None or _has_blank(column) for column in columns):
        return None
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def examples_of(block: Block) -> Iterable[Example]:
    """Returns the examples of a block."""
    return block.to_pylist() if isinstance(block, pa.RecordBatch) else block


def _has_blank(texts: pa.Array) -> bool:
    """Returns whether a text is blank; most texts begin with a visible ASCII character."""
    others = pc.or_(pc.less(texts, "!"), pc.greater_equal(texts, "\x7f"))
    return any(map(is_blank, texts.filter(others).to_pylist()))
