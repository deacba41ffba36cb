"""Checks of a machine, its environment, and a config's data and run folder; each problem is one sentence."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from packaging.requirements import Requirement

from tformer_jax.base.errors import RunError, UserError, first_line, one_line
from tformer_jax.base.numbers import GIB
from tformer_jax.base.paths import is_remote
from tformer_jax.cli.common import format_size
from tformer_jax.config import Config, kinds
from tformer_jax.data.corpora.locations import locate
from tformer_jax.runs import run_folder
from tformer_jax.runs.provenance import version

PACKAGE = "tformer_jax"
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
"""JAX plugins, whose versions must match jaxlib."""
CUDA13_DRIVER = 580
"""Minimum driver version for CUDA 13."""
MIN_FREE = GIB
"""Free disk space in bytes that a run needs in addition to its checkpoints: metrics, samples, traces."""
HARMFUL = {
    "xla_cpu_enable_fast_math": "hides non-finite values from the check that skips such steps",
    "xla_cpu_enable_fast_min_max": "hides non-finite values from the check that skips such steps",
    "xla_gpu_enable_fast_min_max": "hides non-finite values from the check that skips such steps",
    "xla_disable_all_hlo_passes": "disables all compiler passes",
}
"""XLA flags that must not be enabled, and their effects."""
SLOW = {
    "xla_backend_optimization_level": "compiles faster, but to slower code, unless it is 3",
    "xla_gpu_autotune_level": "selects kernels without measuring them if it is 0",
    "xla_force_host_platform_device_count": "simulates several devices on one CPU, for tests",
    "xla_dump_to": "writes files at every compilation and never deletes them",
}
"""XLA flags that are unsuitable for long runs, and their effects."""


class Gpu(NamedTuple):
    """An NVIDIA GPU, as reported by its driver."""

    name: str
    memory: str
    driver: str


def find_gpus() -> list[Gpu]:
    """Returns the NVIDIA GPUs of this machine, whether or not JAX uses them.

    Raises:
        UserError: nvidia-smi is installed, but fails.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        said = first_line(getattr(error, "stdout", None) or error)
        raise UserError(f"nvidia-smi fails ({said}): reinstall its driver") from error
    return [Gpu(*map(str.strip, line.split(","))) for line in done.stdout.splitlines() if line.count(",") == 2]


def find_devices() -> list[jax.Device]:
    """Returns the devices of JAX.

    Raises:
        RunError: JAX has no device.
    """
    try:
        return jax.devices()
    except RuntimeError as error:
        reason = one_line(error, None)
        raise RunError(f"JAX has no device ({reason}): unset JAX_PLATFORMS, or install that backend") from error


def check_accelerators(gpus: list[Gpu], backend: str) -> Iterator[str]:
    """Yields a problem if this machine has accelerators that JAX does not use."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    tpus = sorted(Path("/dev").glob("accel*"))
    if backend != "cpu" or not (gpus or tpus):
        return
    there = f"{len(gpus)} x {gpus[0].name}" if gpus else f"{len(tpus)} TPU chips"
    if wanted == "cpu":
        yield f"this machine has {there}, but JAX_PLATFORMS=cpu hides it: unset JAX_PLATFORMS"
        return
    driver = re.match(r"\d+", gpus[0].driver) if gpus else None
    extra = "tpu" if not gpus else "cuda13" if driver and int(driver[0]) >= CUDA13_DRIVER else "cuda12"
    yield f'this machine has {there}, but JAX uses the CPU: pip install -e ".[{extra}]"'


def check_packages() -> Iterator[str]:
    """Yields required packages that are missing or of an unsupported version, and plugins that do not match jaxlib."""
    if version(PACKAGE) is None:
        yield f"{PACKAGE} is not installed: pip install -e ."
        return
    for requirement in map(Requirement, importlib.metadata.requires(PACKAGE) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = version(requirement.name)
        if installed is None:
            yield f"the package {requirement.name} is missing: pip install -e ."
        elif not requirement.specifier.contains(installed, prereleases=True):
            wanted = f'"{requirement.name}{requirement.specifier}"'
            yield f"{requirement.name} {installed} is not supported; required: {wanted}: pip install {wanted}"
    for plugin in PLUGINS:
        if (installed := version(plugin)) and installed != version("jaxlib"):
            extra = plugin.split("-")[1]
            yield f'{plugin} {installed} does not match jaxlib {version("jaxlib")}: pip install -U -e ".[{extra}]"'


def check_unknown_flags() -> Iterator[str]:
    """Yields XLA flags that jaxlib rejects, and removes them from this process's environment.

    A separate process tries them, so that jaxlib itself determines which flags are known.
    """
    given = os.environ.get("XLA_FLAGS")
    if not given:
        return
    trial = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(command, env=trial, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", done.stderr)
    names = unknown[1].split() if unknown else given.split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in given.split() if flag not in names)
    tpu = "; flags of TPUs belong in LIBTPU_INIT_ARGS" if any("xla_tpu" in name for name in names) else ""
    what = "does not know" if unknown else "cannot read"
    yield f"XLA_FLAGS has {' '.join(names)}, which jaxlib {version('jaxlib')} {what}: remove it{tpu}"


def check_harmful_flags() -> Iterator[str]:
    """Yields flags in effect that make results wrong."""
    for name, value in _xla_flags():
        if name in HARMFUL and value not in ("false", "0"):
            yield f"XLA_FLAGS has --{name}, which {HARMFUL[name]}: remove it"


def check_slow_flags() -> Iterator[str]:
    """Yields flags in effect that are meant for tests and for debugging the compiler."""
    for name, value in _xla_flags():
        if name in SLOW and (name, value) not in (("xla_backend_optimization_level", "3"), ("xla_dump_to", "")):
            yield f"XLA_FLAGS has --{name}={value}, which {SLOW[name]}"


def check_folder(run: Path, checkpoint: int, count: int) -> Iterator[str]:
    """Yields a problem if a run cannot be written, or its checkpoints do not fit on the disk.

    Args:
        checkpoint: bytes per checkpoint.
        count: number of checkpoints on the disk at the same time.
    """
    parent = existing_parent(run)
    try:
        run_folder.holds_run(run)
        if is_remote(run):
            return
        with tempfile.TemporaryFile(dir=parent):
            pass
    except UserError as error:
        yield str(error)
        return
    except OSError as error:
        yield f"{run} cannot be written ({error.strerror}): choose another --run"
        return
    free, needed = shutil.disk_usage(parent).free, checkpoint * count + MIN_FREE
    if free < needed:
        held = f" ({count} checkpoints take {format_size(checkpoint * count)})" if checkpoint else ""
        yield (
            f"the disk of {run} has {format_size(free)} free, but a run needs {format_size(needed)}{held}: free some "
            "space, choose another --run, or keep fewer (train.keep_checkpoints, train.keep_best, "
            "train.permanent_every)"
        )


def existing_parent(path: Path) -> Path:
    """Returns `path`, or its nearest parent that exists; for a bucket, the working directory."""
    path = Path.cwd() if is_remote(path) else path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def check_data(cfg: Config, root: Path | None) -> Iterator[str]:
    """Yields missing data files of a config, without reading the corpus."""
    tokenizer = None if cfg.data.source == "prepared" else cfg.data.tokenizer_file
    try:
        kinds.load(kinds.CORPORA, cfg.data.source).check_present(cfg, root)
        if tokenizer and not (Path(root or "") / tokenizer).is_dir():
            locate(root, tokenizer)
    except UserError as error:
        yield str(error)


def _xla_flags() -> Iterator[tuple[str, str]]:
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, equals, value = flag.removeprefix("--").partition("=")
        yield name, value if equals else "true"
