"""What the device says of a config."""

import jax
import pytest

from tformer_jax.train import hardware


@pytest.mark.parametrize(
    ("device", "dtype", "warns"), [("cpu", "bfloat16", True), ("cpu", "float32", False), ("gpu", "bfloat16", False)]
)
def test_bfloat16_is_slow_on_a_cpu_only(monkeypatch, device, dtype, warns):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert bool(hardware.slow_dtype(dtype)) == warns
