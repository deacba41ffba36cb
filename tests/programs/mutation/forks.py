"""Runs pytest on a copy of the repository, in processes forked from one that has imported the libraries.

No device runtime starts in the parent: a fork of a process with XLA's threads would deadlock.
"""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache" / "mutation"
LIBRARIES = (
    *("numpy", "jax", "jax.experimental.pallas", "flax.linen", "optax", "orbax.checkpoint", "grain.python"),
    *("tokenizers", "sentencepiece", "tiktoken", "sacrebleu", "ml_collections", "tensorflow_datasets", "babel"),
    *("hypothesis", "pytest", "starlette.testclient", "uvicorn", "torch", "transformers"),
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def preload() -> None:
    """Imports the libraries that tests use, as far as they are installed."""
    os.environ.update(ENVIRONMENT)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def copy_tree(target: Path) -> None:
    """Copies the files of the repository, as they are now, without those that git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def forked(task: Callable[[Path], None], tree: Path, seconds: float) -> float:
    """Runs `task`, given a scratch folder, in a forked process inside a copy of the repository.

    Ends it after `seconds` of CPU time, or twenty times as much wall time. Returns the CPU seconds that it took.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        process = os.fork()
        if process == 0:
            _enter(tree, Path(scratch), seconds)
            try:
                task(Path(scratch))
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        usage = _wait(process, time.monotonic() + 20 * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what a failing test left running
    return usage.ru_utime + usage.ru_stime


def _enter(tree: Path, scratch: Path, seconds: float) -> None:
    """Makes this process one that was started inside `tree`."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    log = os.open(CACHE / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    own = {str(ROOT), "", os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in own)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "tformer_jax")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # processes that tests spawn import it
    sys.argv[:] = ["pytest"]
    os.environ.update(PYTHONPATH=str(tree), TMPDIR=str(scratch), HYPOTHESIS_STORAGE_DIRECTORY=str(scratch / "examples"))
    tempfile.tempdir = None


def _wait(process: int, deadline: float) -> resource.struct_rusage:
    """Waits for a process, which is killed at the deadline."""
    while time.monotonic() < deadline:
        actual, _, usage = os.wait4(process, os.WNOHANG)
        if actual:
            return usage
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    return os.wait4(process, 0)[2]
