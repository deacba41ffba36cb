"""The XLA flags are known to the installed jaxlib, which aborts at an unknown flag."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tformer_jax.config import MESH_AXES
from tformer_jax.lab.commands.xla_flags import main
from tformer_jax.parallel import xla_flags

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_jaxlib_knows_the_flags_of_gpus_and_has_other_defaults(tmp_path):
    """XLA dumps the flags that differ from their defaults with each compiled program."""
    flags = xla_flags.choose_flags("gpu", MESH_AXES)
    assert set(flags) == set(xla_flags.FLAGS["gpu"])
    environment = os.environ | {"XLA_FLAGS": " ".join(map(str, flags)) + f" --xla_dump_to={tmp_path}"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-c", "import jax; jax.jit(lambda x: x + 1)(1.0)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("*.debug_options")
    changed = dict(re.findall(r"(\w+): (\S+)", written.read_text()))
    expected = {flag.name: flag.value for flag in flags if flag.name not in default_flags()}
    assert expected.items() <= changed.items()


def default_flags() -> set[str]:
    """Returns the flags that the installed jaxlib sets by default, unlike jaxlib 0.10."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        return set()
    return {"xla_gpu_enable_pipelined_all_gather", "xla_gpu_enable_pipelined_all_reduce"}


def test_only_the_flags_of_a_mesh_are_chosen(capsys):
    main(["gpu"])
    assert capsys.readouterr().out == "--xla_gpu_enable_latency_hiding_scheduler=true\n"
    main(["gpu", "tensor"])
    assert capsys.readouterr().out.split()[1:] == ["--xla_gpu_threshold_for_windowed_einsum_mib=0"]
    main(["tpu"])
    assert capsys.readouterr().out == "\n"
    main(["tpu", "--explain"])
    explained = capsys.readouterr().out
    assert explained.startswith("LIBTPU_INIT_ARGS:\n")
    assert all(f"{flag}\n" in explained and flag.meaning in explained for flag in xla_flags.FLAGS["tpu"])
    with pytest.raises(SystemExit) as ended:
        main(["gpu", "pipeline"])
    assert ended.value.code == 2
    assert "'pipeline' is not a mesh axis; write one or more of data, fsdp" in capsys.readouterr().err


def test_uses_are_axes_of_the_mesh():
    assert {use for flags in xla_flags.FLAGS.values() for flag in flags for use in flag.uses} <= set(xla_flags.USES)
    assert set(xla_flags.USES[1:]) == set(MESH_AXES)


def test_the_command_does_not_import_jax():
    code = (
        "import runpy, sys; sys.argv = ['xla_flags.py', 'gpu']; runpy.run_path('scripts/xla_flags.py', "
        "run_name='__main__'); assert not {'jax', 'numpy', 'ml_collections'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"--xla_gpu")
