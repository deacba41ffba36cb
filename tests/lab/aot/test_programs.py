"""Figures of programs compiled for simulated devices, and errors of the command."""

import dataclasses
import importlib.util
from unittest import mock

import jax
import pytest
from flax import linen as nn

from tests.helpers import tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ParallelConfig
from tformer_jax.lab.aot import programs, topology
from tformer_jax.lab.commands import describe
from tformer_jax.models import registry
from tformer_jax.runs.hardware import CHIPS

T = 16


def config(preset: str, **model) -> Config:
    data = DataConfig(source="stdlib_text", batching="windows", window=T)
    return Config(
        name="tiny", model=tiny("decoder_lm", dim=16, **model), data=data, parallel=ParallelConfig(preset=preset)
    )


@pytest.mark.slow
def test_a_train_step_on_eight_devices():
    cfg = config("dp")
    actual, _ = programs.train_step(cfg, jax.devices(), None, T)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(registry.shapes(registry.build(cfg.model)))))
    assert (actual.mesh, actual.rows, actual.length) == ({"data": 8}, 8, T)
    # parameters and two moments of each, four counts of steps, a row and its labels
    assert actual.arguments == pytest.approx(3 * 4 * numbers + 16 + 2 * 4 * T, abs=64)
    reduced = sum(each.times * each.size for each in actual.collectives if each.kind == "all-reduce")
    table = 4 * 11 * 16  # of tied embeddings, whose two gradients are summed apart
    assert 4 * numbers <= reduced <= 4 * numbers + table + 64
    assert actual.hbm == actual.arguments + actual.outputs + actual.temporaries + actual.code
    D, F, V = 16, 12, 11
    forward = T * (2 * 4 * D * D + 2 * 2 * D * F + 2 * 2 * T * D + 2 * D * V)
    assert actual.useful_flops == actual.flops == 3 * forward


def test_remat_computes_layers_twice():
    actual = programs._training_flops(config("dp", remat="nothing_saveable"), 1, T)
    head = 2 * T * 16 * 11
    assert actual[1] - actual[0] == actual[0] / 3 - head


@pytest.mark.parametrize("remat", ["dots_saveable", "everything_saveable"])
def test_saved_products_are_computed_once(remat):
    useful, executed = programs._training_flops(config("dp", remat=remat), 1, T)
    assert executed == useful > 0


def test_products_without_batch_dimensions_are_saved():
    """The policy of that name computes scores and weighted sums again, masked ones included."""
    length = 256
    useful, executed = programs._training_flops(
        config("dp", remat="dots_with_no_batch_dims_saveable", max_length=length), 1, length
    )
    D, F, V = 16, 12, 11
    scores = 2 * 2 * length * length * D
    assert executed - useful == scores
    assert useful == 3 * (length * (2 * 4 * D * D + 2 * 2 * D * F + 2 * D * V) + scores)


def test_remat_of_a_classifier_without_an_output_head_over_the_vocabulary():
    model = tiny("classifier", num_classes=2, dim=16, remat="nothing_saveable")
    cfg = Config(name="tiny", model=model, data=DataConfig(source="cldr_language", bucket_lengths=(T,)))
    useful, executed = programs._training_flops(cfg, 1, T)
    assert executed == useful * 4 / 3 > 0


def test_a_decoding_step_holds_its_cache():
    actual, program = programs.decode_step(config("tp"), jax.devices()[:4], 4, T)
    assert actual.rows == 4
    logits = program.out_info[0]
    assert logits.shape == (4, 1, 11)
    cache = 2 * 4 * T * 16 * 4  # keys and values, float32, of all heads
    assert actual.arguments >= cache / 4
    D, F, V = 16, 12, 11
    row = 2 * 4 * D * D + 2 * 2 * D * F + 2 * 2 * T * D + 2 * D * V
    assert actual.useful_flops == actual.flops == row  # of four rows on four devices


@pytest.mark.slow
def test_scanned_layers_are_unrolled_for_decoding():
    """Regression test: it was an error."""
    scanned, unrolled = (
        programs.decode_step(config("tp", decoder_layers=2, scan_layers=scan), jax.devices()[:4], 4, T)[0]
        for scan in (True, False)
    )
    assert scanned == unrolled


@pytest.mark.parametrize("overlap", [True, False])
def test_the_bound_on_utilization(overlap):
    chip = dataclasses.replace(CHIPS["v5e"], flops=100.0, hbm=50.0, ici=10.0)
    sent = (programs.Collective("collective-permute", "", 20, 2, 2),)
    actual = programs.Program(
        {}, 1, 1, arguments=100, outputs=10, results=60, temporaries=20, code=0, collectives=sent,
        useful_flops=300.0, flops=600.0,
    )  # fmt: skip
    assert (actual.seconds_computing(chip), actual.seconds_moving(chip), actual.seconds_sending(chip)) == (6, 4, 4)
    assert actual.utilization_bound(chip, overlap=overlap) == (3 / 6 if overlap else 3 / 10)
    slow = dataclasses.replace(chip, hbm=20.0)
    assert actual.seconds(slow, overlap=overlap) == (10 if overlap else 14)


def test_a_program_that_does_not_fit():
    def lowered(problem):
        return mock.Mock(compile=mock.Mock(side_effect=jax.errors.JaxRuntimeError(problem)))

    with pytest.raises(
        UserError, match=r"the step does not fit in device memory \(RESOURCE_EXHAUSTED: 9 of 8 GiB\): use"
    ):
        programs._compile(lowered("RESOURCE_EXHAUSTED: 9\nof 8 GiB"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a bug"):
        programs._compile(lowered("INTERNAL: a bug"))


def test_missing_libtpu_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'--topology needs libtpu: pip install -e "\.\[aot\]"'):
        topology.slice_devices("v5e:4x4")


@pytest.mark.parametrize("name", ["v5e", "h100:2x2", "v5e:16", "v5e:0x4", "v5e:4x4x4x4"])
def test_a_topology_is_a_kind_and_its_sides(name):
    with pytest.raises(UserError, match=r"write a kind \(v4, v5e, v5p, v6e\) and the sides of the slice"):
        topology.slice_devices(name)


@pytest.mark.parametrize(
    ("settings", "batch", "length", "sentence"),
    [
        ({"data": 2, "fsdp": 2}, 6, 8, r"--batch 6: must be a multiple of data=2 \* fsdp=2; write 8"),
        ({"sequence": 8}, None, 12, "--length 12: must be a multiple of the mesh's sequence=8"),
        ({"tensor": 8}, None, 8, "model.num_heads=4: must be a multiple of the mesh's tensor=8"),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_refused(settings, batch, length, sentence):
    cfg = dataclasses.replace(config("dp"), parallel=ParallelConfig(**{"data": 1} | settings))
    with pytest.raises(UserError, match=sentence):
        programs.train_step(cfg, jax.devices(), batch, length)


@pytest.mark.parametrize("flag", [["--mesh", "data=4"], ["--decode"]])
def test_slice_flags_need_a_topology(flag):
    with pytest.raises(UserError, match=f"{flag[0]}: add --topology"):
        describe.main(["--preset", "gpt2", *flag])


def test_a_row_is_singular(capsys):
    describe.main(["--preset", "gpt2", "--length", "1"])
    assert "batch of 1 row of 1 token" in capsys.readouterr().out


def test_a_classifier_does_not_decode():
    data = DataConfig(source="cldr_language", batching="buckets", bucket_lengths=(T,))
    cfg = Config(name="tiny", model=tiny("classifier"), data=data)
    with pytest.raises(UserError, match="--decode is for models of the family 'decoder_lm'"):
        programs.decode_step(cfg, jax.devices(), None, T)
