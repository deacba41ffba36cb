"""muP: activations, and their changes by training, that do not depend on the width ("Tensor Programs V", 2022)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.helpers import apply, assert_close, build, rest_slow, tiny, with_settings
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, OptimConfig, kinds
from tformer_jax.config.task import tasks_of_family
from tformer_jax.models import registry
from tformer_jax.train import optimizers

BASE, STEPS = 64, 4
MODERN = {"norm": "rmsnorm", "ffn": "gated", "position": "rotary", "num_kv_heads": 2, "qk_norm": True}
KINDS = {
    "decoder_lm": {},
    "seq2seq": {},
    "classifier": {},
    "masked_lm": {},
    "decoder_lm, RMSNorm, gated FFN, RoPE, GQA, QK-norm": MODERN,
    "decoder_lm, post-norm": {"norm_placement": "post"},
}
"""Kinds of model: a family and its settings."""
RATES = {"adamw": 1e-2, "muon": 3e-2}


TWO_LAYERS = {"encoder_layers": 2, "decoder_layers": 2}


def config(kind: str, dim: int, optimizer: str, *, base: int | None = BASE, **model) -> Config:
    family = kind.partition(",")[0]
    settings = {
        "position": "learned",
        "dim": dim,
        "ffn_dim": 2 * dim,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_heads": 4,
    }
    mup = {"parameterization": "mup", "base_dim": base} if base else {}
    return Config(
        model=tiny(family, **{**settings, **mup, **KINDS[kind], **model}),
        data=DataConfig(
            source=tasks_of_family(family)[0].sources[0],
            batching=tasks_of_family(family)[0].batchings[0],
            objective="masked_tokens" if family == "masked_lm" else None,
            window=8,
            bucket_lengths=(8,),
        ),
        optim=OptimConfig(
            optimizer=optimizer, schedule="constant", learning_rate=RATES[optimizer], warmup_steps=1, clip_norm=0.0
        ),
    )


def batch(family: str) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    keys = kinds.load(kinds.FAMILIES, family).inputs
    actual = {key: draw.integers(4, 11, (4, 8)).astype(np.int32) for key in keys}
    labels = (4,) if family == "classifier" else (4, 8)
    return actual | {kinds.load(kinds.FAMILIES, family).labels: draw.integers(0, 3, labels).astype(np.int32)}


def layers(collected: dict, path: str = "") -> dict[str, jax.Array]:
    """Returns the outputs of the layers, by name."""
    actual = {}
    for name, value in collected.items():
        if name.startswith("layers_"):
            actual[f"{path}/{name}"] = jax.tree.leaves(value["__call__"])[0]
        elif isinstance(value, dict):
            actual |= layers(value, f"{path}/{name}")
    return actual


@functools.cache
def sizes(cfg: Config, seeds: int = 2) -> dict[str, float]:
    """Trains for some steps and returns the RMS of each layer's output, of the logits, and of their changes."""
    model, family = registry.build(cfg.model), cfg.model.model_class
    optimizer, data = optimizers.build(cfg, registry.shapes(model)), batch(cfg.model.family)

    def activations(params):
        inputs = [data[key] for key in family.inputs]
        out, state = model.apply({"params": params}, *inputs, capture_intermediates=True, mutable=["intermediates"])
        return layers(state["intermediates"]) | {"logits": jax.tree.leaves(out)[0]}

    def loss(params):
        logits = activations(params)["logits"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), data[family.labels][..., None], -1)
        return -picked.mean()

    def step(_, current):
        params, state = current
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    @jax.jit
    def trained(key):
        params = nn.unbox(registry.init(model, key))
        first = activations(params)
        last = activations(jax.lax.fori_loop(0, STEPS, step, (params, optimizer.init(params)))[0])
        changes = {f"change of {name}": last[name] - first[name] for name in last}
        return {name: jnp.sqrt((x**2).mean()) for name, x in (last | changes).items()}

    actual = [jax.device_get(trained(jax.random.key(seed))) for seed in range(seeds)]
    return {name: float(np.mean([each[name] for each in actual])) for name in actual[0]}


def spread(actual: list[dict[str, float]]) -> dict[str, float]:
    """Returns the largest value of each size divided by its smallest."""
    return {name: max(each[name] for each in actual) / min(each[name] for each in actual) for name in actual[0]}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", rest_slow(RATES.keys(), 1))
@pytest.mark.parametrize("kind", rest_slow(KINDS.keys(), 1))
def test_sizes_do_not_depend_on_the_width(kind, optimizer):
    ratios = spread([sizes(config(kind, dim, optimizer), seeds=1) for dim in (64, 256)])
    assert max(ratios.values()) < 2, ratios


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_do_not_depend_on_widths_from_64_to_1024(kind, optimizer, tied):
    tie = {} if kind == "classifier" else {"tie_embeddings": "output" if tied else "none"}
    ratios = spread([sizes(config(kind, dim, optimizer, **tie, **TWO_LAYERS)) for dim in (64, 256, 1024)])
    assert max(ratios.values()) < 2, ratios


@pytest.mark.slow
def test_the_standard_parameterization_grows_with_the_width():
    ratios = spread([sizes(config("decoder_lm", dim, "adamw", base=None), seeds=1) for dim in (64, 256)])
    assert max(ratios.values()) > 3, ratios


@pytest.mark.slow
def test_mup_equals_the_standard_parameterization_at_the_base_width():
    cfg = config("decoder_lm", BASE, "adamw")
    standard = config("decoder_lm", BASE, "adamw", base=None)
    assert sizes(cfg, seeds=1) == sizes(standard, seeds=1)


def test_only_learning_rates_of_hidden_matrices_decrease_with_the_width():
    cfg = config("decoder_lm", 4 * BASE, "adamw", tie_embeddings="none")
    model = registry.build(cfg.model)
    for optimizer, hidden in (("adamw", 1 / 4), ("muon", 1 / 2)):
        cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, optimizer=optimizer))
        factors = optimizers.width_factors(cfg, registry.shapes(model))
        actual = jax.tree_util.tree_leaves_with_path(factors)
        matrices = [value for path, value in actual if "layers" in str(path) and path[-1].key == "kernel"]
        assert set(matrices) == {hidden}
        assert len(matrices) == 4 + 2
        assert sum(value == 1.0 for _, value in actual) == len(actual) - len(matrices)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("projections", rest_slow(["separate", "fused_qkv"], 1))
def test_weight_decay_does_not_depend_on_the_width(optimizer, projections):
    """Without gradients, a step multiplies each decayed parameter by 1 - learning rate * weight decay."""
    cfg = config("decoder_lm", 2 * BASE, "adamw", attention_projections=projections)
    cfg = dataclasses.replace(
        cfg, optim=dataclasses.replace(cfg.optim, optimizer=optimizer, weight_decay=0.5, learning_rate=0.1)
    )
    model, params = build(cfg.model)
    built = optimizers.build(cfg, registry.shapes(model))
    updates, _ = jax.jit(lambda params: built.update(jax.tree.map(jnp.zeros_like, params), built.init(params), params))(
        params
    )
    decays = optimizers.decay_mask(cfg.optim, optimizers.parameter_names(params))
    expected = jax.tree.map(lambda param, decayed: -0.1 * 0.5 * decayed * param, params, decays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), updates, expected)


def test_updates_are_those_of_the_learning_rates():
    """The first update of AdamW has the size of the learning rate."""
    cfg = config("decoder_lm", 8, "adamw", base=2, tie_embeddings="none")
    shapes = registry.shapes(registry.build(cfg.model))
    start, grads = (jax.tree.map(lambda leaf, x=x: np.full(leaf.shape, x), nn.unbox(shapes)) for x in (0.0, 1.0))
    optimizer = optimizers.build(cfg, shapes)
    updates = jax.jit(lambda grads, start: optimizer.update(grads, optimizer.init(start), start)[0])(grads, start)
    for names, hidden in ((("embedding", "embedding"), 1), (("decoder", "layers_0", "ffn", "expand", "kernel"), 1 / 4)):
        leaf = functools.reduce(lambda tree, name: tree[name], names, updates)
        assert_close(leaf, np.full(leaf.shape, -RATES["adamw"] * hidden), 1e-7)


@pytest.mark.long
def test_initialization_follows_the_table():
    """Table 8 at m = 4: embeddings and heads start as at the base width, hidden kernels with 1 / inputs."""
    for initializer, hidden in (("fan_in", (4 * BASE) ** -0.5), ("normal", 0.02 / 2)):
        cfg = config("decoder_lm", 4 * BASE, "adamw", tie_embeddings="none", initializer=initializer).model

        def started(cfg=cfg):
            params = nn.unbox(registry.init(registry.build(cfg), jax.random.key(0)))
            kernel = params["decoder"]["layers_0"]["ffn"]["expand"]["kernel"]
            return params["embedding"]["embedding"], params["head"]["kernel"], kernel

        table, head, kernel = jax.jit(started)()
        fixed = BASE**-0.5 if initializer == "fan_in" else 0.02
        assert table.std() == pytest.approx(fixed, rel=0.05)
        assert head.std() == pytest.approx(fixed, rel=0.05)
        assert kernel.std() == pytest.approx(hidden, rel=0.05)


def test_embeddings_scores_and_logits_are_scaled_by_the_base_width():
    """The standard model with these factors written out is the same function."""
    cfg = config("decoder_lm", 4 * BASE, "adamw", tie_embeddings="none", scale_embeddings=True).model
    model, params = build(cfg, scale=0.1)
    head_size = BASE  # of 4 heads; 16 at the base width, where the scale is 1 / 4
    standard = {"parameterization": "standard", "base_dim": None, "scale_embeddings": False}
    plain = registry.build(with_settings(cfg, **standard, attention_scale=16**0.5 / head_size))
    table, kernel = params["embedding"]["embedding"], params["head"]["kernel"]
    written_out = params | {"embedding": {"embedding": BASE**0.5 * table}, "head": {"kernel": kernel / 4}}
    tokens = batch("decoder_lm")["tokens"]
    assert_close(apply(model, params, tokens), apply(plain, written_out, tokens), 1e-6)


def test_refused_settings():
    with pytest.raises(UserError, match="base_dim=None: must be a width for model.parameterization='mup'"):
        tiny("decoder_lm", parameterization="mup")
    with pytest.raises(UserError, match="has no rule for routers"):
        tiny("decoder_lm", parameterization="mup", base_dim=8, ffn="moe")
    with pytest.raises(UserError, match="must be adamw, lion, muon"):
        cfg = config("decoder_lm", 64, "adamw")
        dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, optimizer="lamb"))
