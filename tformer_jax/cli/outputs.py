"""Where the lines of a command go to: standard output, or a file that grows beside its place until it is whole."""

import contextlib
import fcntl
import gzip
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from tformer_jax.config import ConfigError
from tformer_jax.train.errors import RunError

Facts = dict[str, dict[str, Any]]
"""All that the lines of a file follow from, by topic; fit for JSON."""


class Output(Protocol):
    """Takes the lines of one text after another."""

    done: int
    """Texts whose lines are there already."""

    def write(self, lines: Sequence[str]) -> None:
        """Lets everyone see the lines of the next text."""


def check(path: Path | None, source: Path | None = None) -> None:
    """Raises `ConfigError` unless a file can be made at `path`, as far as that is known before."""
    if path is None:
        return
    if source is not None and path.exists() and path.samefile(source):
        raise ConfigError(f"{path} is both --input and --output: name another --output")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"folder {path.parent} does not exist: make it, or name another --output")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file with --output")
    if path.suffix == ".zst":
        raise ConfigError(f"{path}: outputs are not compressed as .zst: write .gz")


def is_json(path: Path | None) -> bool:
    """Whether the name asks for JSON objects."""
    return path is not None and path.name.endswith((".jsonl", ".jsonl.gz"))


def as_line(text: str) -> str:
    """`text` on one line: line breaks inside it become spaces."""
    return re.sub(r"[\r\n]+", " ", text)


def as_json(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(record)
    return line


@contextlib.contextmanager
def opened(path: Path | None, facts: Facts, *, lines_a_text: int, resume: bool) -> Iterator[Output]:
    """Standard output, or the file, which takes its place when the block ends well.

    Raises:
        ConfigError: the file cannot be made, is written by another process, or was begun by another command; or an
            earlier one did not end, and is not to be resumed.
        RunError: it cannot be written any more.
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
    with open_partial(path.resolve(), facts, lines_a_text, resume) as file:
        yield file
        file.finish()


def is_stream(path: Path) -> bool:
    """Whether `path` is a device, a pipe or a socket, which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


class Printed:
    """A stream."""

    done = 0

    def __init__(self, stream: TextIO | None):
        self._stream = stream

    def write(self, lines: Sequence[str]) -> None:
        """Prints them at once; a closed stream takes none."""
        if self._stream is not None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()


def partial_of(path: Path) -> Path:
    """The file that holds the lines until there are no more to come."""
    return path.with_name(f"{path.name}.partial")


def open_partial(path: Path, facts: Facts, lines_a_text: int, resume: bool) -> "PartialFile":
    """The file beside `path`, with what is there already where `resume`; raises as `opened` does."""
    partial = partial_of(path)
    try:
        file = partial.open("a+b")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"{partial} is being written by another process: wait for it, or name another --output"
        ) from None
    result = PartialFile(path, partial, file, lines_a_text)
    try:
        result.begin(facts, resume)
    except BaseException:
        file.close()
        raise
    return result


class PartialFile:
    """`NAME.partial`: plain lines; `NAME.partial.json` says what they follow from.

    The last text's lines are in the hands of the system when `write` returns. A process that is killed may leave some
    of the next text's bytes, which `begin` cuts off.
    """

    def __init__(self, path: Path, partial: Path, file: Any, lines_a_text: int):
        self._path, self._partial, self._file, self._lines_a_text = path, partial, file, lines_a_text
        self._facts = path.with_name(f"{partial.name}.json")
        self.done = 0

    def begin(self, facts: Facts, resume: bool) -> None:
        """Makes it empty, or goes on after its last complete text; raises as `opened` does."""
        self.done, whole_bytes = self._whole_texts()
        if self.done and not resume:
            raise ConfigError(
                f"{self._partial} holds {self.done:,} results of a command that did not end: add --resume to go on, "
                f"or delete it to start again"
            )
        if self.done:
            self._check_same(facts)
        self._file.truncate(whole_bytes)
        if not self.done:
            write_facts(self._facts, facts)

    def write(self, lines: Sequence[str]) -> None:
        """Hands the lines of the next text to the system."""
        try:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        self.done += 1

    def finish(self) -> None:
        """Puts the file in its place."""
        try:
            if self._path.suffix == ".gz":
                compress(self._partial, whole := self._path.with_name(f"{self._partial.name}.gz"))
                whole.replace(self._path)
                self._partial.unlink()
            else:
                self._partial.replace(self._path)
            self._facts.unlink()
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what a full disk has no room for has been reported
            self._file.close()
        if not self.done:
            self._partial.unlink(missing_ok=True)
            self._facts.unlink(missing_ok=True)

    def _whole_texts(self) -> tuple[int, int]:
        """How many texts are there with all their lines, and the bytes of these."""
        self._file.seek(0)
        lines = position = whole_bytes = 0
        for line in self._file:
            position += len(line)
            lines += line.endswith(b"\n")
            if line.endswith(b"\n") and lines % self._lines_a_text == 0:
                whole_bytes = position
        return lines // self._lines_a_text, whole_bytes

    def _check_same(self, facts: Facts) -> None:
        try:
            saved = json.loads(self._facts.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(
                f"{self._partial} cannot be resumed without {self._facts}, which says what it holds: delete it to "
                "start again"
            ) from None
        changed = differences(saved, json.loads(json.dumps(facts)))
        if changed:
            raise ConfigError(
                f"{self._partial} was begun by another command ({'; '.join(changed[:3])}): repeat that one, or delete "
                "the file to start again"
            )

    def _error(self, error: OSError) -> RunError:
        reason = error.strerror or error
        return RunError(f"{self._path} cannot be written ({reason}): make room and repeat the command with --resume")


def write_facts(path: Path, facts: Facts) -> None:
    """Writes them whole, or not at all.

    Raises:
        ConfigError: there is no room for them.
    """
    partial = path.with_name(f"{path.name}.new")
    try:
        partial.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def compress(plain: Path, packed: Path) -> None:
    """Writes a `.gz` file that follows from the content alone."""
    with plain.open("rb") as file, packed.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as target:
        shutil.copyfileobj(file, target)


def differences(old: Facts, new: Facts) -> list[str]:
    """What differs between two facts, as `decode.beams: 4 -> 5`."""
    return [
        f"{topic}.{name}: {old.get(topic, {}).get(name)!r} -> {new.get(topic, {}).get(name)!r}"
        for topic in {**old, **new}
        for name in {**old.get(topic, {}), **new.get(topic, {})}
        if old.get(topic, {}).get(name) != new.get(topic, {}).get(name)
    ]
