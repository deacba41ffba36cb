"""`benchmark.py attention`: what the process of a backend measures."""

import types

from tformer_jax.lab.benchmarks import attention
from tformer_jax.runs import hardware


def results(backend, shapes, dtype="float32"):
    passes = attention.Passes(backend, dtype, forward=True, repeat=2)
    remote = types.SimpleNamespace(call=lambda method, *arguments: getattr(passes, method)(*arguments))
    return [attention.measure_shape(remote, shape) for shape in shapes]


def test_without_a_report_of_the_device_the_peak_is_that_of_the_process(monkeypatch):
    """`peak_bytes` does not include the peak of the parent process."""
    monkeypatch.setattr(hardware, "peak_bytes", iter([1000, 1300, 1700]).__next__)
    cases = results("reference", [(1, 4, 1, 2), (1, 4, 1, 2)])
    assert [case["peak_bytes_beyond_inputs"] for case in cases] == [300, 700]


def test_a_refused_backend_is_recorded_with_the_reason():
    for case in results("cudnn", [(1, 4, 1, 8), (1, 8, 1, 8)]):
        assert case["failure"].startswith("model.attention_backend='cudnn' needs a gpu")
        assert case["seconds"] is None


def test_each_length_is_measured():
    for case in results("reference", [(1, 4, 1, 2), (1, 6, 1, 2)], "bfloat16"):
        assert case["failure"] is None
        assert case["finite"]
        assert case["seconds"] > 0
        assert case["planned_bytes"] >= 0
        assert isinstance(case["peak_bytes_beyond_inputs"], int)
