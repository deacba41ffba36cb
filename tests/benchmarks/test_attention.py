"""`benchmark.py attention`: what the process of a backend sends."""

import types

from tformer_jax.benchmarks import attention


def results(backend, shapes, dtype="float32"):
    found = [{} for _ in shapes]
    pipe = types.SimpleNamespace(send=lambda message: found[message[0]].update(message[1]))
    attention.measure_attention(pipe, backend, shapes, dtype, forward=True, repeat=2)
    return found


def test_a_refused_backend_is_recorded_with_the_reason():
    for case in results("cudnn", [(1, 4, 1, 8), (1, 8, 1, 8)]):
        assert case["failure"].startswith("model.attention_backend='cudnn' needs a gpu")
        assert "seconds" not in case


def test_each_length_is_measured():
    for case in results("reference", [(1, 4, 1, 2), (1, 6, 1, 2)], "bfloat16"):
        assert case["failure"] is None
        assert case["finite"]
        assert case["seconds"] > 0
        assert case["planned_bytes"] >= 0
        assert isinstance(case["peak_bytes_beyond_inputs"], int)
