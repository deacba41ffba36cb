"""Three steps of every optimizer against its paper's formula in NumPy float64; decay masks, rates and clipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.helpers import assert_close, normal, tiny
from tests.train.formulas import B1, B2, DECAY, EPS, RATES, adafactor, adamw, lamb, lion, muon, schedule_free, sgd
from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, OptimConfig
from tformer_jax.models import registry
from tformer_jax.train import optimizers

NAMES = {
    "attention": {"query": {"kernel": (axes.EMBED, axes.HEADS, axes.HEAD_DIM), "bias": (axes.HEADS, axes.HEAD_DIM)}},
    "embedding": (axes.VOCAB, axes.EMBED),
    "experts": {"contract_kernel": (axes.EXPERTS, axes.MLP, axes.EMBED)},
    "ffn": {"kernel": (axes.MLP, axes.EMBED)},
    "wide": {"kernel": (axes.EMBED, axes.MLP)},
}
SHAPES = {
    "attention": {"query": {"kernel": (6, 2, 3), "bias": (2, 3)}},
    "embedding": (5, 8),
    "experts": {"contract_kernel": (2, 6, 8)},
    "ffn": {"kernel": (12, 8)},
    "wide": {"kernel": (130, 140)},
}


def is_shape(node) -> bool:
    return isinstance(node, tuple)


def boxed(dtype=jnp.float32):
    return jax.tree.map(
        lambda names, shape: nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, dtype), names),
        NAMES,
        SHAPES,
        is_leaf=is_shape,
    )


def trees(seed: int):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: draw.normal(size=shape), SHAPES, is_leaf=is_shape)


PARAMS, GRADS = trees(0), [trees(seed) for seed in (1, 2, 3)]


def settings(**changes) -> Config:
    optim = {
        "schedule": "constant",
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "beta1": B1,
        "beta2": B2,
        "eps": EPS,
        "weight_decay": DECAY,
        "clip_norm": 0.0,
    }
    optim |= changes
    chosen = optim.get("optimizer", "adamw")
    used = {
        name: value for name, value in optim.items() if chosen in OptimConfig.used_by(name).get("optimizer", [chosen])
    }
    return Config(optim=OptimConfig(**used))


@functools.cache
def three_steps(**changes):
    optimizer = optimizers.build(settings(**changes), boxed())
    params = jax.tree.map(jnp.float32, PARAMS)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for grads in GRADS:
        params, state = step(params, state, jax.tree.map(jnp.float32, grads))
    return params, state


def decay_of(path: str) -> float:
    return 0.0 if path.endswith("bias']") else DECAY


def each_expert(formula, p, grads, path):
    """Applies a formula of whole parameters to each expert separately."""
    if "experts" not in path:
        return formula(p, grads, path)
    return np.stack([formula(p[e], [g[e] for g in grads], path) for e in range(2)])


def muon_of(p, grads, path):
    """Applies Muon to matrices (inputs to outputs), and AdamW to embeddings and biases."""
    if "query']['kernel" in path:
        flat = muon(p.reshape(6, 6), [g.reshape(6, 6) for g in grads], DECAY)
        return flat.reshape(p.shape)
    return muon(p, grads, DECAY) if "kernel" in path else adamw(p, grads, decay_of(path))


def expected(formula):
    def of_parameter(path, p, *grads):
        return formula(p, grads, jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(of_parameter, PARAMS, *GRADS)


@pytest.mark.parametrize("formula", [adamw, lamb, lion, sgd, adafactor])
def test_equals_the_formula(formula):
    actual, _ = three_steps(optimizer=formula.__name__)
    wanted = expected(functools.partial(each_expert, lambda p, grads, path: formula(p, grads, decay_of(path))))
    proves = (f"optim.optimizer={formula.__name__}", "NumPy float64, three steps")
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6, proves=proves), actual, wanted)


def test_muon_equals_the_formula():
    actual, _ = three_steps(optimizer="muon")
    wanted = expected(functools.partial(each_expert, muon_of))
    proves = ("optim.optimizer=muon", "NumPy float64, three steps")
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6, proves=proves), actual, wanted)


@pytest.mark.parametrize("first", [0, 1])
def test_the_learning_rate_of_schedule_free_does_not_depend_on_the_first_count_of_optax(first, monkeypatch):
    """Releases of Optax start `step_count` at 1; a proposed change starts it at 0."""
    schedule_free_of_optax = optax.contrib.schedule_free

    def starting_at_first(*arguments, **settings):
        made = schedule_free_of_optax(*arguments, **settings)
        start = jnp.asarray(first, jnp.int32)
        return made._replace(init=lambda params: made.init(params)._replace(step_count=start))

    monkeypatch.setattr(optax.contrib, "schedule_free", starting_at_first)
    params, state = three_steps.__wrapped__(optimizer="schedule_free_adamw")
    wanted = expected(lambda p, grads, path: schedule_free(p, grads, decay_of(path))[0])
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), params, wanted)
    counts = [
        node.step_count
        for node in jax.tree.leaves(state, is_leaf=optimizers._is_schedule_free)
        if optimizers._is_schedule_free(node)
    ]
    assert counts == [4]  # a checkpoint continues with any release


def test_schedule_free_equals_the_formula():
    actual, state = three_steps(optimizer="schedule_free_adamw")
    wanted = expected(lambda p, grads, path: schedule_free(p, grads, decay_of(path))[0])
    averages = expected(lambda p, grads, path: schedule_free(p, grads, decay_of(path))[1])
    proves = ("optim.optimizer=schedule_free_adamw", "NumPy float64, three steps")
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6, proves=proves), actual, wanted)
    evaluated = jax.jit(optimizers.evaluation_params)(state, actual)
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6, proves=proves), evaluated, averages)


def test_other_optimizers_evaluate_the_parameters():
    actual, state = three_steps()
    assert optimizers.evaluation_params(state, actual) is actual


def test_groups_have_separate_learning_rates():
    actual, _ = three_steps(learning_rate_factors=("attention/*/bias=0", "embedding=0.5"))
    plain, _ = three_steps()
    np.testing.assert_array_equal(
        actual["attention"]["query"]["bias"], np.float32(PARAMS["attention"]["query"]["bias"])
    )
    np.testing.assert_array_equal(actual["ffn"]["kernel"], plain["ffn"]["kernel"])
    # without decay, AdamW's steps do not depend on the parameters: half the rate goes half the way
    half, _ = three_steps(learning_rate_factors=("embedding=0.5",), weight_decay=0.0)
    whole, _ = three_steps(weight_decay=0.0)
    start = PARAMS["embedding"]
    assert_close(2 * (half["embedding"] - start), whole["embedding"] - start)


def test_globs_select_decayed_parameters():
    plain, _ = three_steps(weight_decay=0.0)
    some, _ = three_steps(decayed=("ffn/*",))
    for path, same in (("ffn", False), ("embedding", True), ("wide", True)):
        equal = jax.tree.map(lambda a, b: bool((a == b).all()), plain[path], some[path])
        assert all(jax.tree.leaves(equal)) == same


MATRICES = ("kernel']", "['embedding']", "['router']", "['shared_gate']")


@pytest.mark.parametrize(
    "model",
    [
        tiny("seq2seq", position="learned", output_bias=True),
        tiny(
            "decoder_lm",
            decoder_layers=2,
            layer_pattern=("gated_delta", "full"),
            attention_sinks=True,
            ffn="moe",
            moe={"every": 2, "shared_dim": 5, "shared_gate": True},
        ),
    ],
    ids=lambda model: model.family,
)
def test_weight_decay_excludes_biases_and_norms(model):
    cfg = Config(optim=OptimConfig(schedule="constant", learning_rate=1.0, warmup_steps=1, weight_decay=0.5))
    shapes = registry.shapes(registry.build(model))
    optimizer = optimizers.build(cfg, shapes)
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), nn.unbox(shapes))
    zeros = jax.tree.map(np.zeros_like, ones)
    updates = jax.device_get(jax.jit(lambda ones: optimizer.update(zeros, optimizer.init(ones), ones)[0])(ones))
    flat = {jax.tree_util.keystr(path): float(u.min()) for path, u in jax.tree_util.tree_leaves_with_path(updates)}
    for name, update in flat.items():
        assert update == (-0.5 if name.endswith(MATRICES) else 0.0), name
    assert set(flat.values()) == {-0.5, 0.0}


def test_clipping_by_norm():
    actual, _ = three_steps(optimizer="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.5)
    wanted = PARAMS
    for grads, rate in zip(GRADS, RATES, strict=True):
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grads)))
        wanted = jax.tree.map(lambda p, g, s=rate * 0.5 / norm: p - s * g, wanted, grads)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), actual, wanted)


def test_clipping_by_adaptive_scale():
    """Brock et al. (2021), equation 3: a unit is the set of inputs of one output."""
    actual, _ = three_steps(optimizer="sgd", beta1=0.0, weight_decay=0.0, adaptive_clip=0.1)
    p = PARAMS["ffn"]["kernel"]
    for grads, rate in zip(GRADS, RATES, strict=True):
        g = grads["ffn"]["kernel"]
        bound = 0.1 * np.maximum(np.linalg.norm(p, axis=0), 1e-3)
        p = p - rate * g * np.minimum(bound / np.linalg.norm(g, axis=0), 1)
    assert_close(actual["ffn"]["kernel"], p, 1e-6)


def test_adaptive_clipping_units_are_the_inputs_of_one_output():
    """Each leaf by its own reduction, in float64: heads to width, width to heads, a whole bias, each expert alone."""
    actual, _ = three_steps(optimizer="sgd", beta1=0.0, weight_decay=0.0, adaptive_clip=0.1)
    inputs = {"query']['kernel": (0,), "bias": (0, 1), "embedding": (0,), "experts": (1,), "ffn": (0,), "wide": (0,)}

    def clipped(path, p, *grads):
        axis = next(axes for name, axes in inputs.items() if name in jax.tree_util.keystr(path))
        for g, rate in zip(grads, RATES, strict=True):
            bound = 0.1 * np.maximum(np.sqrt((p**2).sum(axis, keepdims=True)), 1e-3)
            p = p - rate * g * np.minimum(bound / np.sqrt((g**2).sum(axis, keepdims=True)), 1)
        return p

    wanted = jax.tree_util.tree_map_with_path(clipped, PARAMS, *GRADS)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), actual, wanted)


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        *((("embed", None), (0,)), ((None, "heads", "head_dim"), (0,)), ((None, "mlp"), (0,))),
        *((("heads", "head_dim", None), (0, 1)), (("mlp", None), (0,)), ((None, "embed"), (0,))),
    ],
)
def test_adaptive_clipping_units_of_lora_factors(names, unit):
    """A maps inputs to the rank, B the rank to outputs: the rank has no name."""
    g = np.float64(normal(*(4, 3, 2)[: len(names)]))
    box = nn.LogicallyPartitioned(jax.ShapeDtypeStruct(g.shape, jnp.float32), names)
    clip = optimizers._adaptive_clip(0.1, {"a": box})
    actual, _ = clip.update({"a": jnp.asarray(g)}, clip.init(None), {"a": jnp.ones_like(g)})
    bound = 0.1 * np.sqrt(np.prod([g.shape[axis] for axis in unit]))
    assert_close(actual["a"], g * np.minimum(bound / np.sqrt((g**2).sum(unit, keepdims=True)), 1), 1e-6)


def test_the_state_is_float32_for_bfloat16_parameters():
    optimizer = optimizers.build(settings(), boxed(jnp.bfloat16))
    params = jax.tree.map(jnp.bfloat16, PARAMS)
    grads = jax.tree.map(jnp.bfloat16, GRADS[0])
    for leaf in jax.tree.leaves(jax.eval_shape(lambda: optimizer.update(grads, optimizer.init(params), params))):
        assert leaf.dtype in (jnp.float32, jnp.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate_factors": ("*kernel",)}, r"'\*kernel' must be GLOB=FACTOR, such as '\*embedding=0.1'"),
        ({"learning_rate_factors": ("*=-1",)}, "must be GLOB=FACTOR"),
        ({"learning_rate_factors": ("*=inf",)}, "must be GLOB=FACTOR"),
        ({"optimizer": "schedule_free_adamw", "schedule": "cosine"}, "is not supported by .* write 'constant'"),
        ({"optimizer": "schedule_free_adamw", "learning_rate_factors": ("*=2",)}, "is not supported by"),
        ({"optimizer": "adam"}, "optim.optimizer='adam': is not a known value; did you mean 'adamw'?"),
        ({"cycles": 2}, "needs a schedule with an end"),
        ({"final_fraction": 0.0}, "optim.final_fraction=0.0: is used only by optim.schedule='cosine' or 'linear' or"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(UserError, match=message):
        settings(**changes)


def test_the_digest_of_an_optimizer_depends_on_its_constant_keys():
    def noisy(seed: int) -> optax.GradientTransformation:
        key = jax.random.key(seed)
        return optax.stateless(lambda grads, _: jax.tree.map(lambda g: g + jax.random.normal(key, g.shape), grads))

    digests = [optimizers.digest(noisy(seed), settings(), boxed()) for seed in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]
