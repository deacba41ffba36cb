"""What the processes of one run make sure of before the first step: the same command, data and run folder."""

import json
import time
import uuid
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tformer_jax import config
from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.parallel.multihost import Alone
from tformer_jax.train.provenance import PACKAGES

TOKEN = ".shared"
"""A file by which processes see that they share a folder."""
SEEN_SECONDS = 60
"""How long a network file system may hide a new file."""


def agree_on_command(processes: Alone, cfg: Config, folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises `ConfigError` unless all have the same settings, flags and versions of packages."""
    if processes.count == 1:
        return
    flags = {"--run": str(folder), "--resume": resume, "--overwrite": overwrite}
    versions = {f"the package {name}": metadata.version(name) for name in PACKAGES}
    processes.agree("command", config.flat(cfg) | flags | versions)


def agree_on_data(processes: Alone, cfg: Config, corpus: Corpus) -> None:
    """Raises `ConfigError` unless all have read the same corpus, by its size, its ends and what follows from it."""
    if processes.count == 1:
        return
    splits = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    facts = {f"the number of {name} examples": len(examples) for name, examples in splits.items()}
    for name, examples in splits.items():
        ends = [str(examples[place]) for place in (0, len(examples) - 1)] if len(examples) else []
        facts[f"the checksum of the first and last of the {name} examples"] = zlib.crc32("".join(ends).encode())
    processes.agree("data", config.flat(cfg) | facts)


def first_sees(processes: Alone, name: str, look: Callable[[], bool]) -> bool:
    """Whether something is so as process 0 sees it; the others do not look."""
    return bool(processes.from_first(name, lambda: "yes" if look() else ""))


def tokenizers_of_first(processes: Alone, find: Callable[[], Tokenizers]) -> Tokenizers:
    """The tokenizers of process 0, in all processes."""
    if processes.count == 1:
        return find()
    found: list[Tokenizers] = []

    def describe() -> str:
        found.append(find())
        return json.dumps(found[0].to_json())

    described = processes.from_first("tokenizers", describe)
    return found[0] if found else Tokenizers.from_json(json.loads(described))


def check_shared(processes: Alone, folder: Path) -> None:
    """Waits until process 0 has made the run folder.

    Raises:
        ConfigError: other processes do not see it.
    """
    if processes.count == 1:
        return
    path = folder / TOKEN
    token = processes.from_first("folder", lambda: _written(path))
    seen = _sees(path, token)
    problem = f"does not see the folder {folder} of process 0: name one with --run that all hosts share"
    processes.refuse("folder", None if seen else problem)
    if processes.first:
        path.unlink()


def _written(path: Path) -> str:
    token = uuid.uuid4().hex
    path.write_text(token, encoding="utf-8")
    return token


def _sees(path: Path, token: str) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists() or path.read_text(encoding="utf-8") != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
