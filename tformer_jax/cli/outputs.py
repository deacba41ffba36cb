"""Outputs of the line commands: standard output, or a file that has a temporary name until it is complete."""

import contextlib
import fcntl
import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.base.paths import finite, resolved, write_text
from tformer_jax.cli.common import check_not_of_run

Facts = dict[str, dict[str, Any]]
"""Everything that determines the lines of a file, by topic; compatible with JSON."""
Identity = Callable[..., dict[str, Any]]
"""Returns facts that identify the input, or its first `lines` lines: `inputs.Source.identity`."""
COMPLETE = "complete"
"""Key of the facts of a partial file whose lines are complete."""


def check_output(path: Path | None, source: Path | None = None) -> None:
    """Raises `UserError` if `path` cannot be created, as far as that is known before writing."""
    if path is None:
        return
    if source is not None and path.exists() and path.samefile(source):
        raise UserError(f"{path} is both --input and --output: choose another --output")
    check_not_of_run(resolved(path), "--output")
    partial = partial_path(resolved(path))
    if source is not None and resolved(source) in (partial, facts_path(partial), provenance_path(resolved(path))):
        raise UserError(f"{source} is a file that --output {path} replaces: choose another --output")
    if not path.absolute().parent.is_dir():
        raise UserError(f"folder {path.parent} does not exist: create it, or choose another --output")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file with --output")
    if path.suffix == ".zst":
        raise UserError(f"{path}: outputs are not compressed as .zst: write .gz")


def is_json(path: Path | None) -> bool:
    """Returns whether the file name requests JSON objects."""
    return path is not None and path.name.endswith((".jsonl", ".jsonl.gz"))


def join_lines(text: str) -> str:
    """Returns `text` on one line: line breaks are replaced by spaces."""
    return re.sub(r"[\r\n]+", " ", text)


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as one line of JSON; non-finite numbers become null."""
    record = finite(record)
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(record)
    return line


@contextlib.contextmanager
def open_output(
    path: Path | None, settings: Facts, identity: Identity, *, lines_per_text: int, resume: bool
) -> Iterator["Printed | PartialFile"]:
    """Opens standard output or a file; a regular file is created or replaced only if the block succeeds.

    Args:
        settings: everything that determines the lines, except the input.
        identity: identifies the input.

    Raises:
        UserError: the file cannot be created, is being written by another process, or was started by another
            command; or an earlier command was interrupted, and `resume` is False.
        RunError: writing the file fails.
    """
    if path is None:
        yield Printed(sys.stdout)
        return
    if is_stream(path):
        try:
            with path.open("w", encoding="utf-8") as stream:
                yield Printed(stream)
        except OSError as error:
            raise RunError(f"{path} cannot be written ({error.strerror})") from error
        return
    with open_partial(path.resolve(), settings, identity, lines_per_text, resume) as file:
        try:
            yield file
        except UserError:
            file.save_input(identity)
            raise
        file.finish()


def is_stream(path: Path) -> bool:
    """Returns whether `path` is a device, a pipe or a socket, which is written to directly and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


class Printed:
    """Output to a stream."""

    done = 0

    def __init__(self, stream: TextIO | None):
        self._stream = stream

    def write(self, lines: Sequence[str]) -> None:
        """Prints and flushes the lines; does nothing if the stream is closed."""
        if self._stream is not None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()


def partial_path(path: Path) -> Path:
    """Returns the path of the lines until they are complete."""
    return path.with_name(f"{path.name}.partial")


def provenance_path(path: Path) -> Path:
    """Returns the path of the settings and the input of a complete file."""
    return path.with_name(f"{path.name}.provenance.json")


def is_complete(path: Path, settings: Facts, identity: Identity) -> bool:
    """Returns whether `path` is the complete output of a command; False if it does not exist or is not complete.

    Raises:
        UserError: it is the output of another command, or of an unknown one.
    """
    path = path.resolve()
    partial, provenance = partial_path(path), provenance_path(path)
    if not path.exists() or partial.exists():
        return False
    left = read_facts(facts_path(partial)) or {}
    if left.pop(COMPLETE, None) is not None:  # killed in `finish`
        write_facts(provenance, left)
        facts_path(partial).unlink()
    again = "remove it, or leave out --resume, to write it again"
    saved = read_facts(provenance)
    if saved is None:
        raise UserError(
            f"{path} exists, but {provenance.name}, which records how it was made, is missing or damaged: {again}"
        )
    if changed := _changes(saved, {**settings, "input": identity()}):
        raise UserError(f"{path} was written by another command ({'; '.join(changed[:3])}): {again}")
    return True


def open_partial(path: Path, settings: Facts, identity: Identity, lines_per_text: int, resume: bool) -> "PartialFile":
    """Opens the partial file of `path`, and with `resume` keeps its complete texts; raises as `open_output` does."""
    partial = partial_path(path)
    try:
        file = partial.open("a+b")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"{partial} is being written by another process: wait for it, or choose another --output"
        ) from None
    result = PartialFile(path, partial, file, lines_per_text)
    try:
        result.begin(settings, identity, resume)
    except BaseException:
        if not os.fstat(file.fileno()).st_size:
            partial.unlink(missing_ok=True)
        file.close()
        raise
    return result


class PartialFile(contextlib.AbstractContextManager["PartialFile"]):
    """An incomplete output: `NAME.partial` has its lines, `NAME.partial.json` the settings and input of the command.

    When `write` returns, the lines of the text have been passed to the operating system. A process that is killed may
    leave a part of the next text, which `begin` removes.
    """

    def __init__(self, path: Path, partial: Path, file: Any, lines_per_text: int):
        self._path, self._partial, self._file, self._lines_per_text = path, partial, file, lines_per_text
        self._facts = facts_path(partial)
        self.done = 0

    def begin(self, settings: Facts, identity: Identity, resume: bool) -> None:
        """Empties the file, or continues after its last complete text; raises as `open_output` does."""
        self.done, complete_bytes = self._complete_texts()
        if self.done and not resume:
            raise UserError(
                f"{self._partial} holds {self.done:,} result{'s' * (self.done != 1)} of an interrupted command: add "
                "--resume to continue, or delete it to start again"
            )
        if self.done:
            self._check_same(settings, identity)
        self._file.truncate(complete_bytes)
        write_facts(self._facts, {**settings, "input": identity()})

    def save_input(self, identity: Identity) -> None:
        """Allows the input to change after the lines whose outputs have been written, so that it can be corrected."""
        saved = read_facts(self._facts)
        if self.done and saved is not None:
            write_facts(self._facts, {**saved, "input": identity(self.done)})

    def write(self, lines: Sequence[str]) -> None:
        """Passes the lines of the next text to the operating system."""
        try:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        self.done += 1

    def finish(self) -> None:
        """Moves the complete file to its final path; compresses it if the path ends in .gz."""
        try:
            facts = read_facts(self._facts) or {}
            write_facts(self._facts, {**facts, COMPLETE: {}})
            if self._path.suffix == ".gz":
                compress_file(self._partial, packed := self._path.with_name(f"{self._partial.name}.gz"))
                packed.replace(self._path)
                self._partial.unlink()
            else:
                self._partial.replace(self._path)
            write_facts(provenance_path(self._path), facts)
            self._facts.unlink()
        except OSError as error:
            raise self._error(error) from error

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported before
            self._file.close()
        if not self.done:
            self._facts.unlink(missing_ok=True)
            self._partial.unlink(missing_ok=True)

    def _complete_texts(self) -> tuple[int, int]:
        """Returns the number of texts with all their lines, and the size of these lines in bytes."""
        self._file.seek(0)
        lines = position = complete_bytes = 0
        for line in self._file:
            position += len(line)
            lines += line.endswith(b"\n")
            if line.endswith(b"\n") and lines % self._lines_per_text == 0:
                complete_bytes = position
        return lines // self._lines_per_text, complete_bytes

    def _check_same(self, settings: Facts, identity: Identity) -> None:
        saved = read_facts(self._facts)
        if saved is None:
            raise UserError(
                f"{self._partial} cannot be resumed, because {self._facts} is missing or damaged: delete "
                f"{self._partial} to start again"
            )
        changed = _changes(saved, {**settings, "input": identity(saved["input"].get("lines"))})
        if changed and all(change.startswith(("input.sha256", "input.bytes")) for change in changed):
            raise UserError(
                f"the input has changed since {self._partial} was started: restore it, or delete that file to start "
                "again"
            )
        if changed:
            raise UserError(
                f"{self._partial} was started by another command ({'; '.join(changed[:3])}): repeat that command, or "
                "delete the file to start again"
            )

    def _error(self, error: OSError) -> RunError:
        reason = error.strerror or error
        return RunError(
            f"{self._path} cannot be written ({reason}): free some space and repeat the command with --resume"
        )


def facts_path(partial: Path) -> Path:
    """Returns the path of the record of how an unfinished output is made, `NAME.partial.json`."""
    return partial.with_name(f"{partial.name}.json")


def read_facts(path: Path) -> Facts | None:
    """Returns the facts in a file; None if the file is missing or damaged."""
    try:
        facts: Facts = json.loads(path.read_text(encoding="utf-8"))
        return facts if isinstance(facts["input"], dict) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_facts(path: Path, facts: Facts) -> None:
    """Writes facts atomically.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        write_text(path, json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def compress_file(plain: Path, packed: Path) -> None:
    """Compresses a file to a `.gz` file that depends only on its content."""
    with plain.open("rb") as file, packed.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as target:
        shutil.copyfileobj(file, target)


def _changes(saved: Facts, now: Facts) -> list[str]:
    """Returns the differences between facts that change written lines; with `--on-long-line stop`, all lines fit."""
    differences = fact_differences(saved, now)
    return [change for change in differences if not change.startswith("command.on_long_line: 'stop' ->")]


def fact_differences(old: Facts, new: Facts) -> list[str]:
    """Returns the differences between two facts, such as `decode.beams: 4 -> 5`."""
    old, new = (_flattened(json.loads(json.dumps(facts))) for facts in (old, new))
    names = {**old, **new}
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]


def _flattened(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts by `topic.name`; a topic that is itself a fact, as in older files, keeps its name."""
    flat: dict[str, Any] = {}
    for topic, values in facts.items():
        named = values.items() if isinstance(values, dict) else [("", values)]
        flat |= {f"{topic}.{name}".removesuffix("."): value for name, value in named}
    return flat
