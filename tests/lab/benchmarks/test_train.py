"""`benchmark.py train` and `growth` without PyTorch; tests/parity has the comparison."""

import dataclasses
import functools
import importlib.util
import json
import os

import jax
import numpy as np
import pytest

from tests.helpers import on_platform, rest_slow, tiny
from tformer_jax import config, presets
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config, DataConfig, OptimConfig, TrainConfig
from tformer_jax.config.layers import RotaryConfig
from tformer_jax.lab.benchmarks import growth, train, train_cases, turns
from tformer_jax.lab.benchmarks.processes import Remote
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.lab.commands import benchmark
from tformer_jax.models import cost, registry

CONFIG = """
from tformer_jax.config import Config, DataConfig, ModelConfig, to_config_dict

def get_config():
    model = ModelConfig(family="decoder_lm", dim=8, decoder_layers=1, num_heads=2, ffn_dim=8, position="alibi")
    data = DataConfig(source="text", train="absent.txt", batching="windows", batch_size=2, window=4, vocab_size=20)
    return to_config_dict(Config(name="small", model=model, data=data))
"""


def lm_case(**changes) -> Case:
    data = DataConfig(source="stdlib_text", batching="windows", batch_size=3, window=5)
    return train_cases.config_case(Config(model=tiny("decoder_lm", **changes), data=data))


def test_an_object_in_another_process():
    name = "tests.lab.benchmarks.counter:Counter"
    with Remote(name, 5) as counter:
        (process, value), (again, more) = counter.call("add", 2), counter.call("add", 3)
        assert process == again != os.getpid()
        assert (value, more) == (7, 10)
        with pytest.raises(RunError, match=f"^{name}: ValueError: first line$"):
            counter.call("fail")
        assert counter.call("add", 0) == (process, 10)
        with pytest.raises(RunError, match=f"the process of {name} was killed"):
            counter.call("die")
    with pytest.raises(UserError, match="start below 0"):
        Remote(name, -1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--config", "absent.py"], "config file absent.py does not exist"),
        (["--config.model.dim=8"], "unexpected argument '--config.model.dim=8'"),
        (["--record", "."], "--record .: cannot be written"),
    ],
)
def test_mistakes(flags, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        benchmark.main(["train", *flags])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_without_pytorch_only_this_library_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "small.py").write_text(CONFIG)
    record = tmp_path / "train.json"
    flags = ["--rounds", "2", "--steps", "3", "--dtype", "bfloat16", "--record", str(record)]
    benchmark.main(["train", "--config", f"{tmp_path}/small.py", "--config.model.num_heads=1", *flags])
    assert 'skipping PyTorch: it is not installed: pip install -e ".[benchmark]"' in capsys.readouterr().out
    actual = json.loads(record.read_text())
    (case,) = actual["cases"]
    assert actual["hardware"]["processor"]
    assert (case["case"], case["rows"], case["length"], case["dtype"]) == ("small", 2, 4, "bfloat16")
    assert len(case["seconds"]["tformer_jax"]) == 2
    assert case["tokens"] == 8
    assert case["times_as_fast"] == {}
    assert case["loss_difference"] == {}
    facts = case["systems"]["tformer_jax"]
    assert facts["compilations"] == facts["compilations_at_first_step"] > 0
    assert facts["peak_bytes"] > 2**20
    assert facts["peak_of"] == "process"
    assert facts["attention_backends"] == {"decoder": "reference"}


def test_settings_that_pytorch_does_not_support(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # as if it were installed
    assert train_cases.unsupported_settings(lm_case().cfg) == []
    assert train_cases.unsupported_settings(lm_case(**presets.LAYERS_OF_QWEN3, num_kv_heads=2).cfg) == []
    interleaved = RotaryConfig(pairing="interleaved", base=100.0)
    cfg = lm_case(ffn="moe", position="rotary", rotary=interleaved, attention_bias=("query", "output")).cfg
    cfg = dataclasses.replace(cfg, train=TrainConfig(accumulate=3), optim=OptimConfig(optimizer="muon"))
    assert train_cases.unsupported_settings(cfg) == [
        "model.attention_bias=('query', 'output')",
        "model.ffn='moe'",
        "model.rotary.pairing='interleaved'",
        "optim.optimizer='muon'",
        "train.accumulate=3",
    ]
    assert "model.ffn='moe'" in str(train.reason_to_skip(lm_case(ffn="moe"), "cpu", 1))
    assert "JAX uses the tpu: set JAX_PLATFORMS=cpu" in str(train.reason_to_skip(lm_case(), "tpu", 1))
    assert "JAX uses 2: set CUDA_VISIBLE_DEVICES=0" in str(train.reason_to_skip(lm_case(), "gpu", 2))
    assert train.reason_to_skip(lm_case(), "gpu", 1) is None


@pytest.mark.parametrize(
    ("dtype", "backend", "precision", "expected"),
    [
        ("float32", "cpu", None, "float32"),
        ("float32", "cpu", "highest", "float32"),
        ("float32", "cpu", "BF16_BF16_F32", "bfloat16"),
        ("float32", "gpu", None, "tensorfloat32"),
        ("float32", "gpu", "float32", "float32"),
        ("float32", "gpu", "bfloat16", "bfloat16"),
        ("float32", "tpu", None, "bfloat16"),
        ("bfloat16", "gpu", "highest", "bfloat16"),
    ],
)
def test_the_dtype_of_operands(dtype, backend, precision, expected):
    """It is the dtype of computation, unless the device or JAX's matmul precision rounds operands of float32."""
    assert train.product_dtype(dtype, {"backend": backend, "matmul_precision": precision}) == expected


@pytest.mark.parametrize("name", train_cases.PUBLISHED)
def test_published_architectures_are_supported_by_pytorch(name):
    case = train_cases.published_case(name)
    assert train_cases.unsupported_settings(case.cfg) == []
    assert case == train_cases.without_dropout(case)
    (batch,) = case.batches(1)
    assert set(batch) == {
        *case.cfg.model.model_class.inputs,
        case.cfg.model.model_class.labels,
    }
    assert all(array.shape == (case.rows, case.length) for array in batch.values())
    with on_platform("gpu"):
        backends = registry.attention_backends(train_cases.with_model(case, dtype="bfloat16").cfg.model, case.length)
    assert set(backends.values()) == {"cudnn"}


@pytest.mark.parametrize("name", train_cases.BUILT_IN)
def test_built_in_cases_follow_the_shipped_configs(name):
    shipped = train_cases.BUILT_IN[name]
    cfg = read_config(str(train_cases.CONFIGS / shipped.config))
    case = train_cases.built_in_case(name, cfg)
    changed = {"vocab_size": shipped.vocab_size} | ({} if shipped.dropout else {"dropout": 0, "attention_dropout": 0})
    changed |= {"source_vocab_size": shipped.vocab_size} if cfg.model.family == "seq2seq" else {}
    assert case.cfg.model == dataclasses.replace(cfg.model, **changed)
    assert train_cases.unsupported_settings(case.cfg) == []
    first, second = case.batches(2)
    family = cfg.model.model_class
    assert set(first) == {*family.inputs, family.labels}
    assert all(array.shape == (case.rows, case.length) for array in first.values())
    assert all(4 <= array.min() and array.max() < shipped.vocab_size for array in first.values())
    np.testing.assert_array_equal(first[family.inputs[-1]][:, 1:], first[family.labels][:, :-1])
    assert (first[family.labels] != second[family.labels]).mean() > 0.5
    np.testing.assert_array_equal(second[family.labels], case.batches(2)[1][family.labels])


def test_a_config_has_batches_of_its_middle_bucket():
    data = DataConfig(
        source="cldr_language", bucket_lengths=(4, 8, 16), batch_tokens=200, batch_multiple=8, vocab_size=30
    )
    cfg = Config(
        model=tiny("classifier", vocab_size=None, num_classes=None), data=data, train=TrainConfig(metric="loss")
    )
    case = train_cases.config_case(cfg)
    (batch,) = case.batches(1)
    assert batch["tokens"].shape == (24, 8)
    assert batch["label"].shape == (24,)
    assert case.cfg.model.vocab_size == 30
    assert case.cfg.model.num_classes == len(data.languages)


def test_speeds_are_medians_and_the_peak_is_the_rate_of_the_fastest_product():
    seconds = {"tformer_jax": [0.5, 9.0, 0.25], "PyTorch": [1.0, 1.0, 3.0]}
    rates = {"tformer_jax": [800.0, 400.0, 500.0], "PyTorch": [100.0, 1.0, 1000.0]}
    actual = train.compute_speeds({"tokens": 100, "flops": 200}, seconds, rates)
    assert actual["milliseconds"] == {"tformer_jax": 500, "PyTorch": 1000}
    assert actual["tokens_per_second"] == {"tformer_jax": 200, "PyTorch": 100}
    assert actual["share_of_product_rate"] == {"tformer_jax": 0.4, "PyTorch": 0.2}
    assert actual["times_as_fast"] == {"PyTorch": 2}


def test_different_losses_are_refused():
    ours = np.linspace(5, 4, 20)
    actual = train.loss_differences("small", {"tformer_jax": ours, "a": ours * (1 + 5e-5), "b": ours}, 1e-4)
    assert actual == {"a": pytest.approx(5e-5, 1e-2), "b": 0}
    for wrong in (ours[7] * (1 + 3e-4), np.nan):
        theirs = np.where(np.arange(20) == 7, wrong, ours)
        with pytest.raises(RunError, match="small: the loss of step 8 is 4.63158, but "):
            train.loss_differences("small", {"tformer_jax": ours, "a": theirs, "b": ours}, 1e-4)


def test_systems_alternate(monkeypatch):
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    calls = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def call(self, method, count):
            calls.append((self.name, method, count))
            return 0.5 * count, []

    runs = {name: functools.partial(train.time_steps, Fake(name), 2) for name in "ab"}
    seconds = turns.alternate_runs(runs, rounds=3)
    assert [name for name, _, _ in calls] == list("aabbbbaaaabb")
    assert [call[1:] for call in calls] == [("steps", 1), ("steps", 2)] * 6
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_exponents_of_growth():
    """Time per token grows with the size, and memory per token as its square root, while tokens grow as well."""
    rows = [
        {"context": size, "tokens": tokens, "milliseconds": 3.0 * size * tokens, "peak_bytes": 5 * size**0.5 * tokens}
        for size, tokens in ((4, 8), (16, 8), (64, 64))
    ]
    first, *others = growth.exponents("context", rows)
    assert first is None
    assert others == [pytest.approx((1.0, 0.5))] * 2


@pytest.mark.parametrize("name", rest_slow(growth.GROWTHS.keys(), 1))
def test_only_one_size_grows(name):
    grown = growth.GROWTHS[name]
    cases = dict(grown.cases(name))
    assert tuple(cases) == grown.values
    assert all(case.rows * case.length == max(grown.tokens, case.length) for case in cases.values())
    setting = {
        "depth": "model.decoder_layers",
        "vocabulary": "model.vocab_size",
        "experts": "model.moe.num_experts",
    }.get(name)
    if setting is None:
        assert [case.length for case in cases.values()] == list(grown.values)
    else:
        assert [config.flat(case.cfg)[setting] for case in cases.values()] == list(grown.values)
    same = [{key: value for key, value in config.flat(case.cfg).items() if key != setting} for case in cases.values()]
    assert same == same[:1] * len(same)
    first = cases[grown.values[0]]
    assert cost.forward_flops(first.cfg.model, jax.tree.map(np.asarray, first.batches(1)[0])) > 0
