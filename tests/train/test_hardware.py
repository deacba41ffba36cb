"""Warnings about a config that depend on the device."""

import jax
import pytest

from tformer_jax.train import hardware


@pytest.mark.parametrize(
    ("device", "dtype", "warns"), [("cpu", "bfloat16", True), ("cpu", "float32", False), ("gpu", "bfloat16", False)]
)
def test_bfloat16_is_slow_on_a_cpu_only(monkeypatch, device, dtype, warns):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert bool(hardware.slow_dtype(dtype)) == warns


def test_chips_are_distinguished():
    peaks = {"TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "NVIDIA H100 80GB HBM3": 989e12}
    for kind, peak in peaks.items():
        device = type("Device", (), {"device_kind": kind})()
        assert hardware.peak_flops([device, device]) == 2 * peak
    assert hardware.peak_flops([type("Device", (), {"device_kind": "cpu"})()]) is None
