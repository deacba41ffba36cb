"""The shardings of the training state, from its initialization on."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.helpers import rest_slow
from tests.parallel.test_presets import MODELS, config, set_up
from tests.programs import shardings
from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig, ParallelConfig
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import axis_sizes, data_parallelism, make_mesh
from tformer_jax.parallel.placement import shard_batch
from tformer_jax.train import optimizers, state

FIRST = ("latents and states", "widths that no mesh divides", "experts", "seq2seq")


@pytest.mark.long
@pytest.mark.parametrize("kind", rest_slow([*FIRST, *(kind for kind in MODELS if kind not in FIRST)], len(FIRST)))
def test_shardings_equal_the_record(kind):
    assert json.loads(shardings.PATH.read_text(encoding="utf-8"))[kind] == shardings.snapshot(kind)


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow([("fsdp+tp", 8), ("zero1", 1), ("fsdp", 8), ("tp", 8)], 1))
def test_each_device_has_its_part_of_each_matrix(case):
    preset, parts = case
    _, start, _ = set_up(config("decoder_lm", preset=preset))
    matrices = [leaf for leaf in jax.tree.leaves(start.params) if leaf.ndim > 1]
    assert all(math.prod(leaf.addressable_shards[0].data.shape) * parts == leaf.size for leaf in matrices)
    moments = [leaf for leaf in jax.tree.leaves((start.opt_state, start.ema)) if leaf.ndim > 1]
    assert all(math.prod(leaf.addressable_shards[0].data.shape) * 8 == leaf.size for leaf in moments)


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_moments_of_fused_projections_are_sharded_like_them(optimizer):
    cfg = config("decoder_lm", preset="fsdp")
    model = registry.build(dataclasses.replace(cfg.model, attention_projections="fused_qkv", scan_layers=True))
    optim = dataclasses.replace(cfg.optim, optimizer=optimizer, adaptive_clip=0.1)
    cfg = dataclasses.replace(cfg, model=model.cfg, optim=optim)
    remaining = state.abstract(model, optimizers.build(cfg, registry.shapes(model)), cfg, make_mesh(cfg.parallel))
    moments = [leaf for leaf in jax.tree.leaves(remaining.opt_state) if leaf.ndim > 3]
    assert moments
    assert all(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 8 == leaf.size for leaf in moments)


@pytest.mark.long
@pytest.mark.parametrize("preset", rest_slow(["fsdp", "tp"], 1))
def test_initialization_is_sharded(preset):
    cfg = config("decoder_lm", preset=preset)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dim=256, ffn_dim=1024, vocab_size=2048))
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    init, start = state.initializer(model, optimizer, cfg, make_mesh(cfg.parallel))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, start)
    memory = jax.jit(init, out_shardings=shardings).lower().compile().memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(start))
    assert memory.output_size_in_bytes == pytest.approx(whole / 8, rel=0.05)
    assert memory.temp_size_in_bytes < whole / 8


def test_each_device_gets_its_rows_of_a_batch():
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    rows = np.arange(8 * 3).reshape(8, 3)
    placed = shard_batch(mesh, {"tokens": rows, "label": rows[:, 0], "uneven": rows[:6]})
    for name, whole, size in (("tokens", rows, 2), ("label", rows[:, 0], 2), ("uneven", rows[:6], 6)):
        np.testing.assert_array_equal(placed[name], whole)
        for shard in placed[name].addressable_shards:
            data, fsdp, *_ = (int(place[0]) for place in np.where(mesh.devices == shard.device))
            first = size * (2 * data + fsdp) % len(whole)
            np.testing.assert_array_equal(shard.data, whole[first : first + size])


def test_an_axis_that_does_not_divide_is_replicated():
    sizes = {"data": 1, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 4}
    names = (axes.VOCAB, axes.EMBED)
    assert rules.parameter_spec(names, (12, 6), sizes, rules.RULES) == PartitionSpec("tensor", "fsdp")
    assert rules.parameter_spec(names, (11, 6), sizes, rules.RULES) == PartitionSpec(None, "fsdp")
    assert rules.parameter_spec((axes.EMBED,), (6,), sizes, rules.RULES) == PartitionSpec(None)
    assert rules.parameter_spec((axes.LAYERS, axes.EMBED), (3, 6), sizes, rules.RULES) == PartitionSpec(None, None)
    assert rules.parameter_spec((axes.MLP,), (8,), sizes, rules.RULES) == PartitionSpec("tensor")


def test_an_axis_is_sharded_over_several_mesh_axes():
    sizes = {"data": 3, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 4}
    for width, expected in ((6, ("fsdp", "data")), (8, "fsdp"), (9, None)):
        spec = rules.parameter_spec((axes.EMBED, axes.MLP), (width, 8), sizes, rules.ZERO1)
        assert spec == PartitionSpec(expected, "tensor")


def test_sizes_of_the_mesh():
    def sizes(devices: int = 8, **parallel):
        return {name: size for name, size in axis_sizes(ParallelConfig(**parallel), devices).items() if size > 1}

    assert sizes() == {"data": 8}
    assert sizes(preset="fsdp+tp") == {"fsdp": 4, "tensor": 2}
    assert sizes(preset="fsdp+tp", tensor=4) == {"fsdp": 2, "tensor": 4}
    assert sizes(fsdp=4) == {"data": 2, "fsdp": 4}
    assert sizes(preset="fsdp", tensor=-1, fsdp=2) == {"fsdp": 2, "tensor": 4}
    assert sizes(tensor=-1) == {"tensor": 8}
    assert sizes(4096, preset="fsdp+tp", tensor=8, data=4) == {"data": 4, "fsdp": 128, "tensor": 8}
    assert data_parallelism(make_mesh(ParallelConfig(fsdp=2, tensor=2))) == 4


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 3}, "parallel.tensor=3 does not divide the 8 devices; write a size that does, such as 2"),
        ({"tensor": 3, "fsdp": 2}, r"parallel.fsdp=2 \* parallel.tensor=3 does not divide the 8 devices"),
        ({"tensor": 16}, "parallel.tensor=16 needs 16 devices, but there are 8"),
        ({"data": -1, "tensor": -1}, "parallel.data=-1: parallel.tensor is also -1; only one axis"),
        ({"fsdp": 0}, "parallel.fsdp=0: must be -1 or at least 1"),
        ({"preset": "fdsp"}, "parallel.preset='fdsp': is not a known value; did you mean 'fsdp'?"),
        ({"expert": 2}, "parallel.expert=2: the model has no experts"),
        ({"tensor": 8, "data": 1}, "model.num_heads=12: must be a multiple of the mesh's tensor=8"),
        ({"fsdp": 8}, "model.dim=36: must be a multiple of the mesh's fsdp=8"),
        ({"preset": "zero1"}, "dim=36: must be a multiple of the mesh's data=8 for parallel.preset='zero1'"),
        ({"preset": "zero1", "fsdp": 2, "data": 4}, r"dim=36: must be a multiple of the mesh's fsdp=2 \* data=4 for"),
        ({"tensor": 4, "data": 2}, "model.ffn_dim=18: must be a multiple of the mesh's tensor=4"),
        ({"sequence": 8}, "data.window=12: must be a multiple of the mesh's sequence=8"),
    ],
)
def test_a_mesh_that_does_not_fit(parallel, message):
    cfg = config("decoder_lm")
    model = dataclasses.replace(cfg.model, dim=36, num_heads=12, ffn_dim=18, position="learned")
    data = dataclasses.replace(cfg.data, window=12)
    with pytest.raises(UserError, match=message):
        changed = dataclasses.replace(cfg, model=model, data=data, parallel=ParallelConfig(**parallel))
        rules.check(changed, axis_sizes(changed.parallel, 8))


@pytest.mark.parametrize(
    ("window", "source_window", "wrong"), [(8, 6, "source_window"), (8, 10, "source_window"), (6, 8, "window")]
)
def test_rows_of_sources_are_sharded_too(window, source_window, wrong):
    cfg = config("seq2seq")
    data = DataConfig(source=cfg.data.source, batching="packed", window=window, source_window=source_window)
    cfg = dataclasses.replace(cfg, data=data)
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "sequence": 4, "tensor": 1}
    with pytest.raises(UserError, match=rf"data\.{wrong}=\d+: must be a multiple of the mesh's sequence=4"):
        rules.check(cfg, sizes)
    rules.check_model(cfg, sizes)
