"""Runs the launch recipes unchanged, with substitutes for `python`, `srun` and `gcloud` that record their calls."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tformer_jax.cli import train
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config
from tformer_jax.data.pipeline import check_divisible
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import BATCH_AXES, axis_sizes
from tformer_jax.parallel.xla_flags import VARIABLES, choose_flags

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "scripts" / "launch"
SHELL = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "exclusive", "time", "signal",
    "requeue", "open-mode", "output",
}  # fmt: skip
"""The long options of sbatch, from its manual, that the recipe may use."""
NOTE = 'printf "%s\\0" "$0" "$@" >> "$CALLS"; printf "\\036" >> "$CALLS"\n'
FAKES = {
    "python": f'if [ "$1" = scripts/train.py ]; then {NOTE} env > "$CALLS.env"; else exec "$PYTHON" "$@"; fi\n',
    "srun": NOTE + '[ "$STATUS" = 0 ] || exit "$STATUS"\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "scontrol": f'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else {NOTE} fi\n',
    "gcloud": NOTE + "echo ACTIVE\n",
    "nohup": 'exec "$@"\n',
}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a shell command in a copy of the repository; returns its status, the calls, and the training's variables."""
    (tmp_path / "bin").mkdir()
    for name, body in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    checkout = tmp_path / "tformer_jax"
    checkout.mkdir()
    for name in ("scripts", "configs"):
        shutil.copytree(ROOT / name, checkout / name)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "activate").write_text("")
    monkeypatch.chdir(checkout)
    calls = tmp_path / "calls"
    fixed = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "CALLS": str(calls), "STATUS": "0", "XLA_FLAGS": ""}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def run(command: list[str], **variables: str) -> tuple[int, list[list[str]], dict[str, str]]:
        calls.write_text("")
        environment = {**os.environ, **fixed, "PATH": path, **variables}
        done = subprocess.run(command, cwd=variables.get("FOLDER"), env=environment, timeout=60, check=False)
        made = [call.rstrip("\0").split("\0") for call in calls.read_text().split("\036") if call]
        seen = Path(f"{calls}.env")
        lines = seen.read_text().splitlines() if seen.exists() else []
        return done.returncode, made, dict(line.split("=", 1) for line in lines if "=" in line)

    return run


def trained(calls: list[list[str]]) -> tuple[Any, Config]:
    """Returns the flags and the config of the only training command among the calls."""
    (command,) = [call for call in calls if call[1:2] == ["scripts/train.py"]]
    options, overrides = train.parser().parse_known_args(command[2:])
    return options, read_config(options.config, overrides)


def check_fits(cfg: Config, devices: int, variable: str, environment: dict[str, str]) -> None:
    """The config uses exactly `devices` devices, and the XLA flags are those of its mesh."""
    sizes = axis_sizes(cfg.parallel, devices)
    assert math.prod(sizes.values()) == devices
    rules.check(cfg, sizes)
    check_divisible(cfg, math.prod(sizes[axis] for axis in BATCH_AXES))
    kind = next(kind for kind, name in VARIABLES.items() if name == variable)
    axes = [axis for axis, size in sizes.items() if size > 1]
    assert environment[variable].split() == [str(flag) for flag in choose_flags(kind, axes)]
    assert cfg.model.dtype == "bfloat16"


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_are_clean(path):
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, 'pip install -e ".[test]"'
    done = subprocess.run([shellcheck, "-s", "bash", "-e", "SC1091", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert path.suffix == ".sbatch" or os.access(path, os.X_OK)


def test_one_gpu(shell):
    status, calls, environment = shell(["scripts/launch/one_gpu.sh", "--run", "here", "--config.train.steps=3"])
    options, cfg = trained(calls)
    assert status == 0 and options.resume and cfg.train.steps == 3 and options.run == Path("here")
    assert axis_sizes(cfg.parallel, 1)["data"] == 1
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert cfg.model.dtype == "bfloat16"


@pytest.mark.parametrize("config", ["configs/translate_cldr.py", "configs/translate_multi30k.py"])
def test_eight_gpus(shell, config):
    script = Path("scripts/launch/eight_gpus.sh").absolute()
    status, calls, environment = shell([str(script)], CONFIG=config, FOLDER="/")
    options, cfg = trained(calls)
    assert status == 0 and options.resume and options.config == config
    check_fits(cfg, 8, "XLA_FLAGS", environment)


@pytest.mark.long
def test_slurm(shell):
    job = {"SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "96", "SLURM_JOB_NODELIST": "node[7-8]"}
    job |= {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    command = ["bash", "scripts/launch/slurm.sbatch", "--config.train.steps=3"]
    status, calls, environment = shell(command, **job)
    options, cfg = trained(calls)
    assert status == 0 and options.resume and cfg.train.steps == 3
    check_fits(cfg, 16, "XLA_FLAGS", environment)
    _, four, environment = shell(command, **job | {"SLURM_NNODES": "4"})
    check_fits(trained(four)[1], 32, "XLA_FLAGS", environment)
    assert (options.coordinator, options.processes, options.process) == ("node7:23456", 2, 1)
    assert not [call for call in calls if call[0].endswith("scontrol")]
    for ended, restarts, again in ((130, 0, True), (3, 19, True), (1, 20, False), (2, 0, False)):
        status, calls, _ = shell(command, **job, STATUS=str(ended), SLURM_RESTART_COUNT=str(restarts))
        assert status == ended
        assert [call[1:] for call in calls if call[0].endswith("scontrol")] == [["requeue", "123456"]] * again


def test_sbatch_directives():
    text = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    head, _, body = text.partition("\nset -euo")
    assert "#SBATCH" not in body
    actual = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE))
    assert len(actual) == head.count("#SBATCH") and set(actual) <= SBATCH
    assert (actual["nodes"], actual["ntasks-per-node"], actual["gpus-per-node"]) == ("2", "1", "8")
    assert re.fullmatch(r"TERM@\d+", actual["signal"])  # to the steps, not to the shell


def test_cloud_tpu(shell, tmp_path):
    place = {"PROJECT": "mine", "FILES": "10.0.0.2:/share", "HOME": str(tmp_path)}
    status, calls, _ = shell(["scripts/launch/cloud_tpu.sh", "create"], **place)
    assert status == 0
    assert [call[1:5] for call in calls] == [
        ["compute", "tpus", "queued-resources", "create"],
        ["compute", "tpus", "queued-resources", "describe"],
    ]
    assert {"--accelerator-type=v6e-16", "--node-id=tformer", "--project=mine"} <= set(calls[0])
    status, ((*_, remote),), _ = shell(["scripts/launch/cloud_tpu.sh", "train"], **place)
    assert status == 0 and remote.startswith("--command=")
    status, calls, environment = shell(
        ["bash", "-c", remote.removeprefix("--command=") + " wait"], FOLDER=str(tmp_path), **place
    )
    options, cfg = trained(calls)
    assert options.resume and options.run == Path("/mnt/shared/runs/tformer")
    check_fits(cfg, 16, "LIBTPU_INIT_ARGS", environment)
    for arguments in (["creat"], []):
        assert shell(["scripts/launch/cloud_tpu.sh", *arguments])[0] == 2


def jobset() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text(encoding="utf-8")))
    claim, actual = documents
    assert (claim["kind"], claim["spec"]["accessModes"]) == ("PersistentVolumeClaim", ["ReadWriteMany"])
    assert (actual["apiVersion"], actual["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    return actual


def test_jobset_restarts_resumable_failures():
    spec = jobset()["spec"]
    (workers,) = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert spec["failurePolicy"]["maxRestarts"] > 1
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 2
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    (mistake,) = job["podFailurePolicy"]["rules"]
    assert mistake["onExitCodes"]["values"] == [2] and mistake["action"] == "FailJob"
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert mistake["onExitCodes"]["containerName"] == container["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_jobset_trains(shell):
    actual = jobset()
    (workers,) = actual["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    status, calls, environment = shell(command, JOB_COMPLETION_INDEX="1")
    options, cfg = trained(calls)
    name = actual["metadata"]["name"]
    (port,) = container["ports"]
    first = f"{name}-{workers['name']}-0-0.{name}:{port['containerPort']}"
    assert status == 0 and options.resume
    assert (options.coordinator, options.processes, options.process) == (first, job["completions"], 1)
    check_fits(cfg, 8 * job["completions"], "XLA_FLAGS", environment)


def test_probes_read_the_records_of_a_run(tmp_path):
    (workers,) = jobset()["spec"]["replicatedJobs"]
    (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    assert "--run /shared/runs/tformer" in container["args"][0] and "touch /tmp/started" in container["args"][0]
    records, started = tmp_path / "metrics.jsonl", tmp_path / "started"

    def passes(probe: str) -> bool:
        *shell, command = container[probe]["exec"]["command"]
        command = command.replace("/shared/runs/tformer", str(tmp_path)).replace("/tmp/started", str(started))
        return subprocess.run([*shell, command], check=False, stderr=subprocess.DEVNULL).returncode == 0

    started.touch()
    assert not passes("startupProbe") and not passes("livenessProbe")
    now = started.stat().st_mtime
    for age, live in ((2 * 3600, False), (600, True)):
        records.touch()
        os.utime(records, (now - age, now - age))
        assert passes("livenessProbe") == live
        assert not passes("startupProbe")  # left over from an earlier start
    os.utime(records, (now + 1, now + 1))
    assert passes("startupProbe") and passes("livenessProbe")


def test_the_image_has_what_the_commands_need():
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    assert '".[cuda13]"' in text
