"""Low-rank adaptation: kernels, gradients and updates in NumPy, and runs that train only the factors."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from tests.helpers import assert_close, build, equations, randomized, rest_slow, tiny
from tests.nn.test_quantized import to_grid
from tests.train.test_step import batch, settings
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.models.losses import batch_loss
from tformer_jax.parallel import placement
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import weights
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.train import lora, optimizers, state
from tformer_jax.train.step import accumulated_gradients, jitted, make_train_step, training_flops

ALPHA, RANK = 6.0, 2
MODELS = {
    "decoder": tiny("decoder_lm", decoder_layers=2, num_kv_heads=2),
    "scanned, fused": tiny("decoder_lm", decoder_layers=2, scan_layers=True, attention_projections="fused_qkv"),
    "encoder-decoder, gated": tiny("seq2seq", ffn="gated", attention_projections="fused_kv"),
    "experts": tiny("decoder_lm", ffn="moe"),
}


def flat(tree) -> dict:
    return flatten_dict(nn.unbox(tree), sep="/")


def low_rank(optim: dict | None = None, **train) -> Config:
    """Returns a config that trains factors, and `lora_whole`."""
    return settings(train={"lora_rank": RANK, **train}, optim={"weight_decay": 0.0, **(optim or {})})


def adapted(cfg: ModelConfig, seed: int = 1, **train) -> lora.Adapted:
    """Returns random parameters with random factors; with `lora_base`, those of `registry.quantized`."""
    train = TrainConfig(**{"lora_rank": RANK, "lora_alpha": ALPHA, **train})
    model, params = build(cfg)
    shapes = registry.shapes(model)
    start = jax.eval_shape(lambda: lora.adapt(train, model, params, jax.random.key(0)))
    base = registry.quantized(model, params) if train.lora_base else params
    return start.replace(base=base, trainable=randomized(lora.trainable_shapes(train, shapes), seed))


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_those_of_the_formula(name):
    """W + (alpha / r) A B of each layer and expert, in NumPy."""
    params = adapted(MODELS[name])
    factors, base, actual = flat(params.trainable), flat(params.base), flat(lora.merged(params))
    kernels = {path.rpartition("/")[0] for path in factors}
    assert actual.keys() == base.keys() > kernels
    for path, leaf in base.items():
        if path not in kernels:
            assert actual[path] is leaf
            continue
        a, b = (np.asarray(factors[f"{path}/{side}"], np.float64) for side in "ab")
        stacked = "periods" in path or ("ffn" in path and "moe" in str(MODELS[name].ffn))
        layers = len(leaf) if stacked else 1
        updates = [
            x.reshape(-1, RANK) @ y.reshape(RANK, -1)
            for x, y in zip(a if stacked else [a], b if stacked else [b], strict=True)
        ]
        assert len(updates) == layers
        assert_close(actual[path], np.float64(leaf) + ALPHA / RANK * np.reshape(updates, leaf.shape), 1e-6)


def test_the_kernels_of_layers_are_adapted():
    names = {path.split("/", 2)[2] for path in flat(adapted(MODELS["decoder"]).trainable) if "layers_0" in path}
    attention = {
        f"self_attention/{role}/kernel/{side}" for role in ("query", "key", "value", "output") for side in "ab"
    }
    assert names == attention | {f"ffn/{role}/kernel/{side}" for role in ("expand", "contract") for side in "ab"}


def test_globs_select_kernels_and_whole_parameters():
    params = adapted(tiny("classifier"), lora_kernels=("*query/kernel", "*value/kernel"), lora_whole=("head/*",))
    assert {path.rpartition("attention/")[2] for path in flat(params.trainable)} == {
        *("query/kernel/a", "query/kernel/b", "value/kernel/a", "value/kernel/b"),
        *("head/kernel", "head/bias"),
    }
    actual = flat(lora.merged(params))
    np.testing.assert_array_equal(actual["head/kernel"], flat(params.trainable)["head/kernel"])


@pytest.mark.long
@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float32"], 1))
def test_the_model_is_unchanged_at_first(dtype):
    train = TrainConfig(lora_rank=4)
    cfg = tiny("decoder_lm", ffn_dim=400, dim=100, param_dtype=dtype)
    model, params = build(cfg)
    start = jax.jit(lambda params: lora.adapt(train, model, params, jax.random.key(0)))(params)
    for path, leaf in flat(lora.merged(start)).items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf, flat(params)[path])
    a = flat(start.trainable)["decoder/layers_0/ffn/contract/kernel/a"]
    assert a.shape == (400, 4)
    assert np.std(a) == pytest.approx(400**-0.5, rel=0.1)
    for number, (name, factor) in enumerate(flat(start.trainable).items()):  # each has a key of its own
        if name.endswith("/a"):
            draws = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), factor.shape)
            assert_close(factor, draws / len(factor.reshape(-1, 4)) ** 0.5, 1e-6)


@pytest.mark.long
def test_a_step_of_adamw_in_numpy():
    """Gradients by the chain rule from those of the kernels; the first update is -rate * g / (|g| + eps)."""
    optim = {"clip_norm": 0.0, "eps": 1e-3, "schedule": "constant", "learning_rate": 0.01, "warmup_steps": 1}
    cfg = low_rank(optim, lora_alpha=ALPHA, label_smoothing=0.0)
    model, data = registry.build(cfg.model), batch()
    optimizer = optimizers.build(cfg, registry.shapes(model))
    params = adapted(cfg.model)
    start = state.create(model, optimizer, cfg, make_mesh(ParallelConfig(data=1)), params.base)
    start = start.replace(params=params)
    after, _ = jax.jit(make_train_step(model, optimizer, cfg))(start, data)

    def loss(full):
        sums, _ = batch_loss(model, full, data)
        return sums.loss / sums.labels

    gradients = flat(jax.jit(jax.grad(loss))(lora.merged(params)))
    before, actual, scale = flat(params.trainable), flat(after.params.trainable), ALPHA / RANK
    for path in {path.rpartition("/")[0] for path in before}:
        a, b = (np.asarray(before[f"{path}/{side}"], np.float64) for side in "ab")
        left, right = a.reshape(-1, RANK), b.reshape(RANK, -1)
        gradient = np.asarray(gradients[path], np.float64).reshape(len(left), -1)
        for side, g, old in (("a", scale * gradient @ right.T, a), ("b", scale * left.T @ gradient, b)):
            expected = old - 0.01 * (g / (np.abs(g) + 1e-3)).reshape(old.shape)
            assert_close(actual[f"{path}/{side}"], expected, 1e-5, proves=("train.lora_rank", "NumPy float64, AdamW"))
    for path, leaf in flat(params.base).items():
        np.testing.assert_array_equal(flat(after.params.base)[path], leaf)
    moments = [leaf.shape for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert sorted(moments) == sorted(2 * [leaf.shape for leaf in before.values()])


@pytest.mark.long
def test_a_step_computes_no_gradients_of_frozen_kernels():
    """Of products with the shape of a kernel, the compiled step has that of the FFN's kernel that is trained."""
    train = {"lora_kernels": ("*attention/*",), "lora_whole": ("*ffn/*/kernel",)}
    cfg = settings(
        train={"lora_rank": RANK, **train},
        optim={"learning_rate_factors": ("*ffn/expand/*=0",)},
        scan_layers=True,
        decoder_layers=2,
    )
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    abstract = state.abstract(model, optimizer, cfg, make_mesh(ParallelConfig(data=1)))
    text = jax.jit(make_train_step(model, optimizer, cfg)).lower(abstract, batch()).compile().as_text()
    products = collections.Counter(re.findall(r"= f32\[(\d+,\d+)\]\S* dot\(", text))
    assert (products["8,8"], products["8,12"] + products["12,8"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow(["scanned, fused", "encoder-decoder, gated"], 1))
def test_a_base_of_int8_is_that_of_rounded_kernels(name):
    """The step's loss and gradients equal those of a float32 base with the kernels rounded in NumPy."""
    family = MODELS[name].family
    cfg = settings(family, train={"lora_rank": RANK, "lora_alpha": ALPHA, "lora_base": "int8"})
    cfg = dataclasses.replace(cfg, model=MODELS[name])
    model, params = registry.build(cfg.model), adapted(MODELS[name], lora_base="int8")
    kernels, (_, exact) = registry.linear_kernels(model), build(cfg.model)
    plain, stored = flatten_dict(exact), flatten_dict(params.base)
    for path, (inputs, outputs) in kernels.items():
        first = plain[path].ndim - inputs - outputs
        plain[path] = jnp.float32(to_grid(plain[path], tuple(range(first, first + inputs))))
        assert stored[path].qvalue.dtype == "int8"
    data = {key: np.random.default_rng(2).integers(4, 11, (4, 6)) for key in (*model.inputs, model.labels)}
    step = jax.jit(functools.partial(accumulated_gradients, model, batch=data, key=jax.random.key(0), cfg=cfg))
    rounded = params.replace(base=unflatten_dict(plain))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-4), step(params)[:3], step(rounded)[:3])
    merged, expected = (jax.jit(lora.merged)(each) for each in (params, rounded))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), merged, expected)


@pytest.mark.long
def test_chunks_of_the_loss_read_a_base_of_int8():
    """Regression test: the integers of the transform before the output head became float32."""
    cfg = tiny("masked_lm", head_transform=True)
    model, params = registry.build(cfg), adapted(cfg, lora_base="int8")
    full, factors = lora.split(params, registry.linear_kernels(model))
    data = {key: np.random.default_rng(2).integers(4, 11, (4, 6)) for key in (*model.inputs, model.labels)}
    plain, chunked = (batch_loss(model, full, data, chunk=chunk, low_rank=factors)[0].loss for chunk in (None, 4))
    assert_close(chunked, plain, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_flops_are_those_of_the_products_of_a_step(rank):
    """Kernels without gradients have one product in the backward pass; those of the factors are small."""
    cfg = settings(train={"lora_rank": rank}, dim=64, ffn_dim=256, decoder_layers=3)
    model, data = registry.build(cfg.model), batch()
    step = functools.partial(accumulated_gradients, model, batch=data, key=jax.random.key(0), cfg=cfg)
    start = nn.unbox(registry.init(model, jax.random.key(0)))
    params = lora.adapt(cfg.train, model, start, jax.random.key(0)) if rank else start
    total = 0
    for product in equations(jax.make_jaxpr(step)(params).jaxpr, "dot_general"):
        (contracted, _), _ = product.params["dimension_numbers"]
        shape = product.invars[0].aval.shape
        total += 2 * math.prod(product.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    assert training_flops(cfg, data) == pytest.approx(total, rel=0.15)


@pytest.mark.slow
def test_a_base_of_int8_is_created_sharded_and_saved(tmp_path):
    cfg = low_rank(lora_base="int8")
    cfg = dataclasses.replace(cfg, parallel=ParallelConfig(data=1, fsdp=2, tensor=2))
    model, mesh = registry.build(cfg.model), make_mesh(cfg.parallel)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    saved = state.create(model, optimizer, cfg, mesh)
    kernel = saved.params.base["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]
    assert kernel.qvalue.sharding.spec == PartitionSpec("fsdp", "tensor", None)
    assert (kernel.scale.shape, kernel.scale.sharding.spec) == ((1, 4, 2), PartitionSpec(None, "tensor", None))
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, saved, {})
    checkpointer.wait()
    actual, _ = checkpointer.restore(state.abstract(model, optimizer, cfg, mesh))
    checkpointer.close()
    jax.tree.map(np.testing.assert_array_equal, actual, saved)
    final = weights.to_evaluate(cfg, actual)
    where = registry.sharded_shapes(model, mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, final) == jax.tree.map(lambda leaf: leaf.sharding, where)


def test_factors_and_their_moments_are_sharded_like_their_kernels():
    cfg = low_rank()
    cfg = dataclasses.replace(cfg, parallel=ParallelConfig(data=1, fsdp=4, tensor=2))
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    actual = state.abstract(model, optimizer, cfg, make_mesh(cfg.parallel))
    specs = {
        "/".join(str(getattr(key, "key", getattr(key, "name", ""))) for key in path): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(actual)
    }
    query, output = (f"decoder/layers_0/self_attention/{role}/kernel" for role in ("query", "output"))
    assert specs[f"params/base/{query}"] == PartitionSpec("fsdp", "tensor", None)
    assert specs[f"params/trainable/{query}/a"] == PartitionSpec("fsdp", None)
    assert specs[f"params/trainable/{query}/b"] == PartitionSpec(None, "tensor", None)
    assert specs[f"params/trainable/{output}/a"] == PartitionSpec("tensor", None, None)
    assert specs[f"params/trainable/{output}/b"] == PartitionSpec(None, "fsdp")
    moments = {spec for path, spec in specs.items() if path.startswith("opt_state") and path.endswith(f"{query}/a")}
    assert moments == {PartitionSpec("fsdp", None)}


@pytest.mark.long
def test_checkpoints_hold_the_base_and_the_factors(tmp_path):
    cfg = low_rank(lora_alpha=ALPHA)
    model, mesh = registry.build(cfg.model), make_mesh(ParallelConfig(data=1))
    optimizer = optimizers.build(cfg, registry.shapes(model))
    params = adapted(cfg.model)
    saved = state.create(model, optimizer, cfg, mesh, params.base).replace(params=params)
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, saved, {})
    checkpointer.wait()
    abstract = state.abstract(model, optimizer, cfg, mesh)
    actual, _ = checkpointer.restore(abstract)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    restored = weights.restored(cfg, checkpointer, abstract)
    checkpointer.close()
    for path, leaf in flat(lora.merged(params)).items():
        assert_close(flat(restored)[path], leaf, 1e-6)


@pytest.mark.slow
def test_a_sharded_step_equals_that_of_one_device():
    actual = []
    for parallel in (ParallelConfig(data=1), ParallelConfig(data=2, fsdp=2, tensor=2)):
        cfg = dataclasses.replace(low_rank(), parallel=parallel)
        model = registry.build(cfg.model)
        optimizer = optimizers.build(cfg, registry.shapes(model))
        mesh = make_mesh(parallel)
        start = state.create(model, optimizer, cfg, mesh)
        step = jitted(make_train_step(model, optimizer, cfg), start, mesh)
        for seed in range(2):
            start, _ = step(start, placement.shard_batch(mesh, batch(seed=seed)))
        actual.append(flat(weights.to_evaluate(cfg, start)))
    for path, leaf in actual[0].items():
        assert_close(actual[1][path], leaf, 1e-4)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"lora_rank": 9}, "train.lora_rank=9: must be at most 8, the smaller side of decoder/layers_0/"),
        ({"lora_rank": 2, "lora_kernels": "*/q/*"}, r"'\*/q/\*' matches no parameter name, such as 'dec"),
        ({"lora_rank": 2, "lora_whole": "top/*"}, r"'top/\*' matches no parameter name, such as '"),
        ({"lora_rank": 2, "lora_kernels": ()}, r"train.lora_kernels=\(\): must name parameters to train"),
        ({"lora_alpha": 2.0}, "train.lora_alpha=2.0: is used only with train.lora_rank; leave it out"),
    ],
)
def test_settings_that_do_not_fit(train, sentence):
    with pytest.raises(UserError, match=sentence):
        lora.trainable_shapes(TrainConfig(**train), registry.shapes(registry.build(tiny("decoder_lm"))))


def test_a_model_without_kernels_of_layers():
    shapes = registry.shapes(registry.build(tiny("classifier", encoder_layers=0)))
    with pytest.raises(UserError, match="train.lora_kernels=.*the model has no kernels of layers; write"):
        lora.trainable_shapes(TrainConfig(lora_rank=2), shapes)
    actual = lora.trainable_shapes(TrainConfig(lora_rank=2, lora_kernels=(), lora_whole=("head/*",)), shapes)
    assert set(actual) == {"head"}


def test_learning_rates_of_a_kernel_are_those_of_its_factors():
    """Regression test: the globs of weight decay named them, those of learning rates did not."""
    cfg = low_rank({"learning_rate_factors": ("*ffn/*/kernel=0", "*kernel=0.5", "*/a=2")})
    shapes = lora.trainable_shapes(cfg.train, registry.shapes(registry.build(cfg.model)))
    keep = flat(optimizers.not_frozen(cfg.optim, shapes))
    assert (
        {name for name in keep if "/ffn/" in name}
        == {name for name, remaining in keep.items() if not remaining}
        != set()
    )


@pytest.mark.parametrize("whole", [(), ("*embedding",)])
def test_weight_decay_is_for_factors_and_trained_kernels(whole):
    """Regression test: if other parameters were trained, too, the factors had none, silently."""
    cfg = low_rank({"weight_decay": 0.1, "optimizer": "sgd"}, lora_whole=whole)
    shapes = lora.trainable_shapes(cfg.train, registry.shapes(registry.build(cfg.model)))
    decayed = flat(optimizers.decay_mask(cfg.optim, optimizers.parameter_names(shapes)))
    assert all(decayed.values()) and any(name.endswith("kernel/a") for name in decayed)
    assert any(name.endswith("embedding") for name in decayed) == bool(whole)


@pytest.mark.parametrize(
    ("decayed", "sentence"),
    [
        ((), r"optim.weight_decay=0.1: optim.decayed=.* matches no trainable parameter, such as 'dec"),
        (("*/kernel/c",), r"'\*/kernel/c' matches no parameter name, such as 'dec"),
    ],
)
def test_globs_of_weight_decay_that_match_nothing(decayed, sentence):
    with pytest.raises(UserError, match=sentence):
        build_optimizer(low_rank({"weight_decay": 0.1, "decayed": decayed}))


def build_optimizer(cfg: Config):
    return optimizers.build(cfg, registry.shapes(registry.build(cfg.model)))


def test_maximal_update_parametrization_is_refused():
    model = {"family": "decoder_lm", "parameterization": "mup", "base_dim": 64}
    data = {"source": "stdlib_text", "batching": "windows"}
    with pytest.raises(UserError, match="train.lora_rank=2: must be 0 for model.parameterization='mup'"):
        Config.from_dict({"model": model, "data": data, "train": {"lora_rank": 2}})
