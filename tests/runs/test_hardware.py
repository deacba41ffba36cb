"""What depends on the device: warnings, peak rates, memory, and the name of the processor."""

import dataclasses
import platform
import types
from importlib import metadata
from pathlib import Path
from unittest import mock

import jax
import pytest

from tests.runs.conftest import small_config
from tformer_jax.config import Config, ModelConfig, TrainConfig
from tformer_jax.runs import experiment, hardware, provenance
from tformer_jax.runs.hardware import CHIPS


@pytest.mark.parametrize(
    ("device", "dtype", "warns"), [("cpu", "bfloat16", True), ("cpu", "float32", False), ("gpu", "bfloat16", False)]
)
def test_bfloat16_is_slow_on_a_cpu_only(monkeypatch, device, dtype, warns):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert bool([*hardware.dtype_warnings(Config(model=ModelConfig(dtype=dtype)))]) == warns


def test_processes_must_have_the_same_matmul_precision(tmp_path):
    group = mock.Mock(from_first=lambda get: get())
    with jax.default_matmul_precision("bfloat16"):
        experiment._continues(small_config(), tmp_path, group, resume=False, overwrite=False)
    (facts,) = group.check_equal.call_args.args
    assert facts["JAX_DEFAULT_MATMUL_PRECISION"] == "bfloat16"


def test_a_matmul_precision_is_recorded():
    assert "matmul_precision" not in provenance.collect()
    with jax.default_matmul_precision("bfloat16"):
        assert provenance.collect()["matmul_precision"] == "bfloat16"


@pytest.mark.parametrize(("lora_rank", "warns"), [(0, True), (2, False)])
def test_parameters_in_bfloat16_are_coarse_unless_they_are_frozen(lora_rank, warns):
    cfg = Config(model=ModelConfig(param_dtype="bfloat16"), train=TrainConfig(lora_rank=lora_rank, start_from="run"))
    actual = [text for text in hardware.dtype_warnings(cfg) if "updates of less than 1/512 of a parameter" in text]
    assert bool(actual) == warns


def test_chips_are_distinguished():
    peaks = {"TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "NVIDIA H100 80GB HBM3": 989e12}
    peaks |= {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12}
    for kind, peak in peaks.items():
        device = type("Device", (), {"device_kind": kind})()
        assert hardware.peak_flops([device, device]) == 2 * peak
    for kind in ("cpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        assert hardware.peak_flops([type("Device", (), {"device_kind": kind})()]) is None
    memory, ici = 17_179_869_184, 1600e9 / 8  # of v5e's data sheet: 16 GiB of HBM with 800 GB/s, 1600 Gbit/s
    assert dataclasses.astuple(CHIPS["v5e"]) == ("TPU v5 lite", 197e12, memory, 800e9, ici)


def test_the_memory_of_the_fullest_own_device(monkeypatch):
    def device(process: int, statistics: dict[str, int] | None):
        return types.SimpleNamespace(process_index=process, memory_stats=lambda: statistics)

    peaks = [device(0, {"peak_bytes_in_use": 5}), device(0, {"peak_bytes_in_use": 7}), device(0, {"bytes_in_use": 8})]
    assert hardware.memory_bytes([*peaks, device(1, {"peak_bytes_in_use": 9})]) == 7
    monkeypatch.setattr(hardware, "peak_bytes", lambda: 3)
    assert hardware.memory_bytes([device(0, None), device(0, {"bytes_in_use": 8})]) == 3


def test_the_processor_has_a_name(monkeypatch):
    """Where /proc/cpuinfo is missing or has no name, as on ARM, the architecture."""
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for exists in (False, True):
        monkeypatch.setattr(Path, "exists", lambda _, exists=exists: exists)
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor : 0\n")
        assert provenance._processor() == "aarch64"
    name = "processor : 0\nmodel name : Some CPU: fast\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: name)
    assert provenance._processor() == "Some CPU: fast"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"cpu family : 26\nmodel\t\t: 2\n{name}")
    assert provenance._processor() == "Some CPU: fast (family 26, model 2)"


def test_versions_do_not_need_an_installation(monkeypatch):
    """A source tree runs where only its dependencies are installed."""
    installed = metadata.version

    def version(name):
        if name == "tformer_jax":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    packages = provenance.versions()
    assert packages["jax"] == jax.__version__ and "tformer_jax" not in packages


def test_a_checkout_without_the_program_git_has_no_revision(monkeypatch, tmp_path):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "tformer_jax" / "train" / "provenance.py"))
    monkeypatch.setenv("PATH", "")
    assert provenance._git_revision() is None


def test_devices_that_are_not_used_are_said():
    """Regression test: a mesh of 1 of 4 devices was recorded as 4."""
    devices = jax.devices()
    count, kind = len(devices), devices[0].device_kind
    for used in (None, devices):
        assert provenance.describe_hardware(used)["devices"] == f"{count} x {kind}"
    expected = f"1 x {kind}" if count == 1 else f"1 of {count} x {kind}"
    assert provenance.collect(devices[:1])["hardware"]["devices"] == expected
