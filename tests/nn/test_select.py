"""The choice of `attention_backend="auto"`, and what backends receive of a mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, build, normal, on_platform, rest_slow, tiny
from tformer_jax.config import ParallelConfig
from tformer_jax.models import registry
from tformer_jax.nn import attention_ops
from tformer_jax.nn.attention_ops import dot_product, select
from tformer_jax.nn.masks import Mask
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh

PLAIN = attention_ops.Needs(
    dtype="float32",
    head_size=64,
    softcap=False,
    bias=False,
    dropout=False,
    conditions=frozenset({"causal", "padding_mask"}),
)
SCORING = attention_ops.Scoring(0.5, None, 0.0)


@pytest.mark.parametrize(
    ("platform", "changes", "sizes", "expected"),
    [
        ("cpu", {}, (512, 512), "reference"),
        ("cpu", {}, (512, 1024), "reference"),
        ("cpu", {}, (1024, 1024), "blockwise"),
        ("cpu", {"dtype": "bfloat16"}, (4096, 4096), "blockwise"),
        ("gpu", {"dtype": "bfloat16"}, (16, 16), "cudnn"),
        ("gpu", {}, (16, 16), "reference"),
        ("gpu", {}, (4096, 4096), "blockwise"),
        ("gpu", {"dtype": "bfloat16", "softcap": True}, (4096, 4096), "blockwise"),
        ("gpu", {"dtype": "bfloat16", "dropout": True}, (64, 64), "reference"),
        ("tpu", {}, (64, 64), "splash"),
        ("tpu", {"bias": True}, (64, 64), "reference"),
        ("gpu", {"dtype": "bfloat16"}, (64, 65), "reference"),
        ("gpu", {"dtype": "bfloat16", "head_size": 60}, (64, 64), "reference"),
        ("tpu", {"conditions": frozenset({"padding_mask", "cross"}), "softcap": True}, (64, 64), "splash"),
        ("tpu", {"conditions": frozenset({"causal", "prefix"})}, (4096, 4096), "blockwise"),
    ],
)
def test_the_choice(platform, changes, sizes, expected):
    with on_platform(platform):
        assert select.choose(dataclasses.replace(PLAIN, **changes), *sizes) == expected


def test_sharded_rows_use_the_reference():
    with rules.use_mesh(make_mesh(ParallelConfig(data=1, sequence=8))):
        assert select.choose(PLAIN, 4096, 4096) == "reference"


def test_the_backends_of_a_model():
    assert registry.attention_backends(tiny("seq2seq"), 2048) == dict.fromkeys(
        ("encoder", "decoder", "cross"), "blockwise"
    )
    assert registry.attention_backends(tiny("decoder_lm", attention_backend="xla"), 2048) == {"decoder": "xla"}


@pytest.mark.parametrize(
    ("name", "T", "mask", "expected"),
    [
        ("blockwise", 1, Mask(), "reference"),
        ("blockwise", 4, Mask(explicit=jnp.ones((1, 1, 4, 9), bool)), "reference"),
        ("blockwise", 4, Mask(), "blockwise"),
        ("auto", 4, Mask(), "auto"),
        ("splash", 4, Mask(), "auto"),
    ],
)
def test_the_choice_with_a_cache(name, T, mask, expected):
    assert select.backend_for_cache(name, T, mask) == expected


def test_auto_runs_the_chosen_backend(monkeypatch):
    monkeypatch.setattr(select, "MAX_REFERENCE_SCORES", 5 * 6 - 1)
    q, k, v = normal(1, 5, 4, 8), normal(1, 6, 4, 8, seed=1), normal(1, 6, 4, 8, seed=2)

    def traced(T):
        return str(jax.make_jaxpr(lambda q: attention_ops.attend(q, k, v, Mask(causal=True)))(q[:, :T]))

    assert "custom_vjp" in traced(5)
    assert "custom_vjp" not in traced(4)


def prompt_read(T, backend):
    cfg = tiny("decoder_lm", max_length=T, attention_backend=backend, decoder_layers=1, vocab_size=5)
    model, params = build(cfg)

    def read(params, tokens):
        cache = model.apply({}, 1, T, method="init_cache")
        return model.apply({"params": params}, tokens, cache, last_only=True, method="decode_step")[0]

    return jax.jit(read).lower(params, jnp.ones((1, T), jnp.int32)).compile(), params


def test_a_prompt_of_4096_tokens_is_read_without_all_weights():
    N, T = 4, 4096
    compiled, _ = prompt_read(T, "auto")
    assert compiled.memory_analysis().temp_size_in_bytes < N * T * T * 4 / 10


@pytest.mark.long
def test_prompts_read_by_blockwise_and_by_reference_agree(monkeypatch):
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 5, (1, 40)), jnp.int32)
    expected, params = prompt_read(40, "reference")
    monkeypatch.setattr(select, "MAX_REFERENCE_SCORES", 0)
    actual, _ = prompt_read(40, "auto")
    assert_close(
        actual(params, tokens), expected(params, tokens), proves=("attention_backend=auto", "reference backend")
    )


REAL = jnp.array([[True, True, True, False, False], [False, False, True, True, True]])
SEGMENTS = jnp.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
MASKS = {
    "causal": Mask(causal=True),
    "causal window": Mask(causal=True, window=2),
    "window": Mask(window=2),
    "causal, padding": Mask(causal=True, padding_mask=REAL),
    "padding": Mask(padding_mask=REAL),
    "nothing real": Mask(padding_mask=jnp.zeros((2, 5), bool)),
    "causal prefix": Mask(causal=True, prefix=jnp.array([3, 0])),
    "packed": Mask(causal=True, segments=(SEGMENTS, SEGMENTS), self_attention=True),
    "packed window": Mask(causal=True, window=2, segments=(SEGMENTS, SEGMENTS), self_attention=True),
    "pairs": Mask(segments=(SEGMENTS, 2 * SEGMENTS)),
    "cached": Mask(causal=True, positions=(jnp.arange(5)[None], jnp.array([[0, 1, -1, -1, 2]]))),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attends_to_any_follows_from_the_rules(mask):
    dense = mask.dense(5, 5)
    expected = np.broadcast_to(np.asarray(dense).any(-1).swapaxes(1, 2), (2, 5, 1))
    actual = mask.attends_to_any(5, 5)
    np.testing.assert_array_equal(True if actual is None else np.broadcast_to(actual, (2, 5, 1)), expected)


def test_queries_beyond_the_window_attend_to_nothing():
    assert not Mask(causal=True, window=2).attends_to_any(5, 3)[0, 4, 0]


@pytest.mark.parametrize("rule", ["causal", "causal window", "packed", "causal prefix"])
def test_attends_to_any_is_evaluated_only_for_padding(rule):
    own = dataclasses.replace(MASKS[rule], self_attention=True)
    assert own.attends_to_any(5, 5) is None


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_xla_equals_reference_for_every_rule(mask):
    q, k, v, weights = (normal(2, 5, 2, 4, seed=seed) for seed in range(4))

    def run(backend):
        out, pull = jax.vjp(lambda *qkv: attention_ops.attend(*qkv, mask, backend=backend), q, k, v)
        return out, *pull(weights)

    found_ones, expected_ones = jax.jit(lambda: (run("xla"), run("reference")))()
    for actual, expected in zip(found_ones, expected_ones, strict=True):
        assert_close(actual, expected, 1e-6, proves=("attention_backend=xla", "reference backend"))


@pytest.mark.parametrize(
    ("rule", "causal", "window", "dense"),
    [
        ("causal", True, None, None),
        ("causal window", True, (1, 0), None),
        ("packed", True, None, (2, 1, 5, 5)),
        ("causal, padding", True, None, (2, 1, 5, 5)),
        ("window", False, None, (1, 1, 5, 5)),
        ("causal prefix", False, None, (2, 1, 5, 5)),
        ("cached", False, None, (1, 1, 5, 5)),
    ],
)
def test_arguments_of_cudnn_by_mask(rule, causal, window, dense, monkeypatch):
    told = {}
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: told.update(options) or q)
    qkv = [normal(2, 5, 2, 4)] * 3
    dot_product.dot_product(attention_ops.Operands(*qkv, MASKS[rule], SCORING), implementation="cudnn")
    mask = told["mask"]
    assert (told["is_causal"], told["local_window_size"], mask if mask is None else mask.shape) == (
        causal,
        window,
        dense,
    )


def test_causal_rows_need_no_array_of_the_mask(monkeypatch):
    """Padding is at the end of rows, where a causal mask hides it: kernels get no array [B, 1, T, S]."""
    calls = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: calls.append(options) or q)
    cfg = tiny("decoder_lm", attention_backend="xla")
    model = registry.build(cfg)
    batch = registry.example_batch(cfg, 2, 4)
    jax.eval_shape(lambda params: registry.forward(model, params, batch), registry.shapes(model))
    assert calls and all(call["is_causal"] and call["mask"] is None and call["bias"] is None for call in calls)


@pytest.mark.parametrize("heads", rest_slow([2, 8, 4, 1], 1))
def test_cudnn_gets_keys_sharded_like_queries(heads, monkeypatch):
    """JAX partitions cuDNN's kernel only if q, k and v are sharded in the same way."""
    mesh, computed = make_mesh(ParallelConfig(data=2, tensor=4)), jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *qkv, implementation, **options: computed(*qkv, **options)
    )
    q, k, v = normal(2, 6, 8, 4), normal(2, 6, heads, 4, seed=1), normal(2, 6, heads, 4, seed=2)
    mask = Mask(causal=True, self_attention=True)

    def run(q, k, v):
        with rules.use_mesh(mesh):
            return dot_product.dot_product(attention_ops.Operands.pack(q, k, v, mask), implementation="cudnn")

    assert_close(jax.jit(run)(q, k, v), attention_ops.attend(q, k, v, mask, backend="reference"), 1e-5)
    equations = jax.make_jaxpr(run)(q, k, v).eqns
    specs = [each.params["sharding"].spec for each in equations if each.primitive.name == "sharding_constraint"]
    assert specs == [jax.sharding.PartitionSpec("data", None, "tensor", None)] * 2
