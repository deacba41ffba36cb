"""Examples of large files: stored once in the user's cache folder, and memory-mapped by this and later runs."""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import mmap
import operator
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tformer_jax.base.user_cache import VARIABLE
from tformer_jax.data.corpora.blocks import Block, divided
from tformer_jax.data.corpora.corpus import Indexed, Joined
from tformer_jax.data.corpora.example import DataError, Example

LARGE = 2**26
"""Size of files, in bytes, from which on their examples are stored; smaller files are held in memory."""
ROWS, BYTES = 2**14, 2**24
"""Number of examples with which a record batch ends, or their size if this is reached before."""
MAPPED_READS = 1000
"""Number of examples to read before their pages, of up to 64 KiB each, leave the process's memory."""
MAX_FOLDERS = 8
"""Maximum number of stored sequences; the least recently used ones are removed, unless a run may still read them."""
IN_USE = 24 * 3600
"""Seconds from the last use on in which a run may still read a sequence, as its workers do."""
FORMAT = 2
Version = tuple[str, int, int]
"""Path of a file, its size in bytes and its modification time in nanoseconds."""
EXAMPLES, FACTS = "examples.arrow", "facts.json"


class Stored(Indexed[Example]):
    """Examples in a memory-mapped Arrow file, all with equal keys; a pickled copy maps the file again."""

    _reads = 0

    def __init__(self, path: Path):
        self._path = path

    def __len__(self) -> int:
        return len(self._batches)

    def element(self, index: int) -> Example:
        number, row = self._batches.locate(range(len(self._batches))[index])
        self._reads += 1
        if self._reads % MAPPED_READS == 0:
            self._unload()
        return {name: column[row].as_py() for name, column in self._columns[number].items()}

    def __iter__(self) -> Iterator[Example]:
        for batch in self._batches.parts:
            yield from batch.to_pylist()
            self._unload()

    def _unload(self) -> None:
        """Takes the pages that were read out of the process's memory, and says that the file is in use."""
        with contextlib.suppress(OSError):
            os.utime(self._path.parent)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED)

    def origin(self) -> str:
        """Returns the hash of what the examples were read from."""
        return self._path.parent.name

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    @functools.cached_property
    def _file(self) -> mmap.mmap:
        with self._path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @functools.cached_property
    def _batches(self) -> Joined:
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._file)))
        return Joined([reader.get_batch(number) for number in range(reader.num_record_batches)])

    @functools.cached_property
    def _columns(self) -> list[dict[str, pa.Array]]:
        """Each batch by name: the attribute `columns` of a batch makes new objects every time."""
        return [dict(zip(batch.schema.names, batch.columns, strict=True)) for batch in self._batches.parts]


def hold(
    examples: Iterable[Example],
    blocks: Callable[[], Iterator[Block]],
    files: Sequence[Path],
    key: Callable[[], Any],
    facts: Callable[[], Any],
    restore: Callable[[Any], None],
) -> Sequence[Example]:
    """Returns examples with random access: stored on disk if their files are large, else in memory.

    Without `TFORMER_CACHE_DIR`, which commands set, or where it cannot be written, all are held in memory.

    Args:
        examples: are read once, or not at all if an earlier run has stored them.
        blocks: returns the examples in blocks, to be stored.
        files: files of the examples; another size or modification time means other examples.
        key: returns everything else that the examples depend on, ready for JSON; raises an error if this is unknown,
            as for code in a notebook.
        facts: returns what reading them has counted, ready for JSON.
        restore: takes the facts of an earlier run.
    """
    versions = _versions(files)
    folder = _folder(versions, key)
    if folder is None:
        return list(examples)
    with contextlib.suppress(OSError, ValueError, pa.ArrowException):
        stored = Stored(folder / EXAMPLES)
        size, known = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if len(stored) == size:
            os.utime(folder)
            restore(known)
            return stored
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return _store(folder, blocks(), facts, versions)
    except OSError as error:
        logging.getLogger(__name__).warning(
            "%s cannot be written (%s): the examples are held in memory", folder, error.strerror or error
        )
        return list(examples)


def _versions(files: Iterable[str | Path]) -> list[Version]:
    return [(str(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]


def _folder(versions: Sequence[Version], key: Callable[[], Any]) -> Path | None:
    """Returns the folder of the examples of files; None if these are small, there is no cache, or no key."""
    root = os.environ.get(VARIABLE)
    if not root or sum(size for _, size, _ in versions) < LARGE:
        return None
    with contextlib.suppress(OSError, TypeError):
        named = json.dumps([FORMAT, versions, key()], sort_keys=True)
        return Path(root) / "examples" / hashlib.sha256(named.encode()).hexdigest()[:32]
    return None


def _store(folder: Path, blocks: Iterable[Block], facts: Callable[[], Any], versions: Sequence[Version]) -> Stored:
    """Writes a folder, which appears when it is complete.

    Raises:
        DataError: a file is no longer in the version that the folder stands for.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="new-", ignore_cleanup_errors=True) as name:
        new = Path(name) / folder.name
        new.mkdir()
        size = _write(new / EXAMPLES, blocks)
        (new / FACTS).write_text(json.dumps([size, facts()]), encoding="utf-8")
        for before, now in zip(versions, _versions(path for path, *_ in versions), strict=True):
            if before != now:
                raise DataError(f"{before[0]} changed while it was read: start again")
        if not folder.exists():  # another process may have been faster
            new.rename(folder)
    logging.getLogger(__name__).warning("%s examples are stored in %s, for this and later runs", f"{size:,}", folder)
    complete = [path for path in folder.parent.iterdir() if (path / FACTS).exists()]
    abandoned = [path for path in folder.parent.glob("new-*") if path.is_dir()]
    for old in [*abandoned, *sorted(complete, key=_last_use)[:-MAX_FOLDERS]]:
        if _last_use(old) < time.time() - IN_USE:
            shutil.rmtree(old, ignore_errors=True)
    return Stored(folder / EXAMPLES)


def _last_use(folder: Path) -> float:
    """Returns the time at which a run last took a stored sequence."""
    return folder.stat().st_mtime


def _write(path: Path, blocks: Iterable[Block]) -> int:
    sizes = operator.attrgetter("nbytes"), operator.attrgetter("num_rows")
    batches = map(_joined, divided(_as_batches(blocks), ROWS, BYTES, *sizes))
    first, size = next(batches, pa.RecordBatch.from_pylist([])), 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in itertools.chain([first], batches):
            writer.write_batch(batch)
            size += batch.num_rows
    return size


def _as_batches(blocks: Iterable[Block]) -> Iterator[pa.RecordBatch]:
    for are_columns, group in itertools.groupby(blocks, lambda block: isinstance(block, pa.RecordBatch)):
        if are_columns:
            yield from group
        else:
            examples = itertools.chain.from_iterable(group)
            for rows in divided(examples, ROWS, BYTES, lambda example: sum(map(len, example.values()))):
                yield pa.RecordBatch.from_pylist(rows, pa.schema([(name, pa.large_utf8()) for name in rows[0]]))


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
