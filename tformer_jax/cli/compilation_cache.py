"""The compilation cache that all commands share: what one of them has compiled, the next one loads.

JAX reads its settings from the environment when it is imported; so this runs before, and holds in child processes too.
"""

import contextlib
import logging
import os
import platform
import sys
import zlib
from pathlib import Path

import filelock

FOLDER, SWITCH = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # 0.2 costs 0.4 s of a translation that takes 3.1 s
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),  # bytes; JAX removes what was not used for the longest time
}
ENTRY, USED = "-cache", "-atime"
"""Endings of the two files that JAX writes for each program: the program, then when it was last used."""


def enable() -> None:
    """Sets the environment variables of JAX's cache, except those that are set.

    Nothing changes where the user names a folder or switches the cache off. One that cannot be written is only warned
    of.
    """
    if FOLDER in os.environ or os.environ.get(SWITCH, "").lower() in ("0", "f", "false", "n", "no", "off"):
        return
    try:
        folder = default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is executed
        remove_unfinished(folder)
    except (OSError, RuntimeError) as error:
        logging.warning("nothing that is compiled is kept for the next command (%s)", error)
        return
    os.environ[FOLDER] = str(folder)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def default_folder() -> Path:
    """A folder in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        caches = named if named.is_absolute() else Path.home() / ".cache"
    return caches / "tformer_jax" / "xla" / processor()


def processor() -> str:
    """Names what programs for this CPU may use: one compiled elsewhere, in a shared home folder, could crash here."""
    features = b""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        features = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return f"{platform.machine()}-{zlib.crc32(features):08x}"


def remove_unfinished(folder: Path) -> None:
    """Removes entries whose writer was killed, which JAX would neither read nor replace, nor evict others then.

    Raises:
        OSError: the folder cannot be written.
    """
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=0):
        names = {path.name for path in folder.iterdir()}
        for name in names:
            if name.endswith(ENTRY) and name.removesuffix(ENTRY) + USED not in names:
                (folder / name).unlink()
