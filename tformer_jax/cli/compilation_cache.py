"""Compilation cache shared by all commands: programs compiled by one command are loaded by later ones.

JAX reads its settings from the environment when it is imported, so `enable_cache` runs before; child
processes inherit them.
"""

import contextlib
import logging
import os
import platform
import zlib
from pathlib import Path

from tformer_jax.base import user_cache
from tformer_jax.base.workarounds import remove_unfinished_programs

FOLDER, SWITCH = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # 0.2 costs 0.4 s in a translation that takes 3.1 s
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),  # bytes; JAX evicts the least recently used programs
}


def enable_cache() -> None:
    """Sets the environment variables of the user's cache folder and of JAX's cache in it, unless they are set already.

    JAX's cache is left alone if the user sets its folder or disables it. If the folder cannot be written, a warning
    is logged.
    """
    try:
        root = Path(os.environ.setdefault(user_cache.VARIABLE, str(user_cache.default_folder())))
        chosen = FOLDER in os.environ or os.environ.get(SWITCH, "").lower() in ("0", "f", "false", "n", "no", "off")
        if chosen or not os.environ[user_cache.VARIABLE]:
            return
        folder = root / "xla" / processor_name()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, since the files in it are executed
        remove_unfinished_programs(folder)
    except (OSError, RuntimeError) as error:
        logging.warning("compiled programs are not cached for later commands (%s)", error)
        return
    os.environ[FOLDER] = str(folder)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def disable_if_private(processes: int) -> None:
    """Disables the user's cache for several processes on GPUs, unless the user has named a folder, which is shared.

    XLA distributes the autotuning of a program over the processes that compile it. Only process 0 writes to the cache:
    if it loads a program from a folder that other hosts do not have, they wait for its results.
    """
    import jax  # after `enable_cache`

    folder = Path(os.environ.get(user_cache.VARIABLE) or os.devnull) / "xla"
    private = Path(os.environ.get(FOLDER, os.devnull)).is_relative_to(folder)
    if processes > 1 and private and jax.default_backend() == "gpu":
        jax.config.update("jax_enable_compilation_cache", False)


def processor_name() -> str:
    """Returns a name for this CPU and its features: programs compiled for another one in a shared home may crash."""
    features = b""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        features = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return f"{platform.machine()}-{zlib.crc32(features):08x}"
