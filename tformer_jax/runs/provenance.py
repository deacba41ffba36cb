"""Records the environment of a run: versions, revision, command and hardware."""

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tformer_jax.base.cpu import usable_cores

PACKAGES = (
    "tformer_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tokenizers",
    "babel",
    "sacrebleu",
)
MATMUL_PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"
"""Environment variable of `matmul_precision`."""
PROGRAM = "tformer"
"""Name of the installed command."""


def collect(used: Sequence[Any] | None = None) -> dict[str, Any]:
    """Returns the versions of packages, the git revision, the command as typed, and what `describe_hardware` returns.

    Also JAX's matmul precision, if it is set.
    """
    precision = matmul_precision()
    return {
        "command": command(),
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "packages": versions(),
        "hardware": describe_hardware(used),
        **({"matmul_precision": precision} if precision else {}),
    }


def matmul_precision() -> str | None:
    """Returns JAX's matmul precision; None by default."""
    import jax

    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision


def command() -> str:
    """Returns the command as typed: `python scripts/train.py ...`, or `tformer train ...` as installed."""
    return shlex.join([*(program() or ["python", sys.argv[0]]), *sys.argv[1:]])


def program() -> list[str] | None:
    """Returns the words before a command: `tformer` or `python -m tformer_jax`; None in a script."""
    path = Path(sys.argv[0])
    if path.parts[-2:] == ("tformer_jax", "__main__.py"):
        return ["python", "-m", "tformer_jax"]
    return [PROGRAM] if path.stem == PROGRAM else None


def versions() -> dict[str, str]:
    """Returns the versions of this package (if it is installed) and of its dependencies."""
    return {name: number for name in PACKAGES if (number := version(name))}


def version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_hardware(used: Sequence[Any] | None = None) -> dict[str, Any]:
    """Returns the processor, the number of usable cores and the JAX devices.

    Args:
        used: the devices that are used; None: all.
    """
    import jax  # imported here, so that run folders can be read without JAX

    devices = jax.devices()
    count = f"{len(devices)}" if used is None or len(used) == len(devices) else f"{len(used)} of {len(devices)}"
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "devices": f"{count} x {devices[0].device_kind}",
    }


def _processor() -> str:
    """Returns the processor's name, on x86 with its family and model, which tell generations of one name apart."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields and "model" in fields:
        return f"{name} (family {fields['cpu family']}, model {fields['model']})"
    return name


def _git_revision() -> str | None:
    """Returns the revision of the source tree, with `-dirty` for uncommitted changes; None outside a git checkout.

    Also None if the program git is missing.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(describe, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
