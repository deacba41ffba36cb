"""Scanning over layers, activation checkpointing and layer patterns change only the program, not the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.helpers import apply, assert_close, build, rest_slow, tiny, with_settings
from tests.inference.jitted_continuation import continue_text
from tformer_jax.base.cpu import train_step_options
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig, layers
from tformer_jax.models import conversions, registry
from tformer_jax.nn import stacks
from tformer_jax.special_tokens import PAD

TOKENS = np.array([[5, 6, 7, 8, 9], [4, 10, 4, PAD, PAD]], np.int32)
BATCH = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}
PAIRS = {"source": TOKENS[:, :3], "target_in": TOKENS, "target_out": np.roll(TOKENS, -1, 1)}
WINDOWS = {"layer_pattern": ("window", "full"), "window": 2, "position": "rotary", "head_dim": 4}
MODELS = {
    "decoder_lm": ({"decoder_layers": 2}, BATCH),
    "a pattern with one layer left over": ({"decoder_layers": 5, **WINDOWS}, BATCH),
    "experts": ({"decoder_layers": 2, "ffn": "moe", "moe": {"num_experts": 3}}, BATCH),
    "experts in every other layer": (
        {"decoder_layers": 5, "ffn": "moe", "moe": {"num_experts": 3, "every": 2, "shared_dim": 5}},
        BATCH,
    ),
    "every sixth layer alike": (
        {
            "decoder_layers": 7,
            "layer_pattern": ("full", "full", "nope"),
            "position": "rotary",
            "head_dim": 4,
            "ffn": "moe",
            "moe": {"num_experts": 3, "every": 2},
        },
        BATCH,
    ),
    "shared relative bias": ({"decoder_layers": 2, "position": "relative"}, BATCH),
    "seq2seq": ({"encoder_layers": 2, "decoder_layers": 3}, PAIRS),
    "relative biases by layer": ({"decoder_layers": 2, "position": "relative", "relative": {"by_layer": True}}, BATCH),
}


def run(model, params, batch):
    """Returns logits and gradients."""

    def total(params):
        outputs = registry.forward(model, params, batch, train=True)
        return (outputs.values**2).mean() + outputs.auxiliary_loss, outputs.values

    gradients, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    return logits, gradients


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow(MODELS.keys(), 1))
def test_scan_equals_loop_and_parameters_convert_both_ways(name):
    changes, batch = MODELS[name]
    family = "seq2seq" if name == "seq2seq" else "decoder_lm"
    loop, params = build(tiny(family, **changes))
    scan, fresh = build(with_settings(loop.cfg, scan_layers=True))
    stacked = conversions.convert_layers(params, loop.cfg, scan_layers=True)
    assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, fresh)
    jax.tree.map(
        np.testing.assert_array_equal, conversions.convert_layers(stacked, scan.cfg, scan_layers=False), params
    )
    jax.tree.map(np.testing.assert_array_equal, conversions.convert_layers(params, loop.cfg, scan_layers=False), params)

    logits, gradients = run(loop, params, batch)
    scanned_logits, scanned_gradients = run(scan, stacked, batch)
    proves = ("scan_layers=True", "a loop over layers")
    assert_close(scanned_logits, logits, proves=proves)
    back = conversions.convert_layers(scanned_gradients, scan.cfg, scan_layers=False)
    jax.tree.map(lambda a, b: assert_close(a, b, proves=proves), back, gradients)


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", rest_slow([True, False], 1))
@pytest.mark.parametrize("policy", rest_slow([policy for policy in layers.REMAT_POLICIES if policy != "none"], 1))
def test_checkpointing_changes_nothing(policy, scan_layers):
    plain, params = build(tiny("decoder_lm", decoder_layers=2, scan_layers=scan_layers))
    remat, _ = build(with_settings(plain.cfg, remat=policy))
    (logits, gradients), (expected, expected_gradients) = run(remat, params, BATCH), run(plain, params, BATCH)
    proves = (f"remat={policy}", "no checkpointing")
    assert_close(logits, expected, 1e-6, proves=proves)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6, proves=proves), gradients, expected_gradients)


@pytest.mark.slow
def test_checkpointing_saves_memory():
    def temporary_bytes(policy):
        model, params = build(tiny("decoder_lm", decoder_layers=4, ffn_dim=512, remat=policy))
        batch = jax.tree.map(lambda array: jnp.tile(array, (64, 1)), BATCH)
        loss = jax.grad(lambda params: registry.forward(model, params, batch).values.sum())
        options = train_step_options(jax.default_backend())
        compiled = jax.jit(loss, compiler_options=options).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("nothing_saveable") < temporary_bytes("dots_saveable") < 0.8 * temporary_bytes("none")


@pytest.mark.long
def test_dropout_differs_from_layer_to_layer_of_a_scan():
    model, params = build(tiny("decoder_lm", decoder_layers=2, scan_layers=True, dropout=0.5))
    twice = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[:1], 2, axis=0), params["decoder"]["periods"])
    params["decoder"]["periods"] = twice
    forward = jax.jit(lambda key: registry.forward(model, params, BATCH, train=True, dropout_key=key).values)
    outputs = [forward(jax.random.key(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert np.abs(outputs[0] - outputs[2]).max() > 1e-3


def test_scanned_layers_have_no_cache():
    model = registry.build(tiny("seq2seq", scan_layers=True))
    memory = np.ones((1, 3, model.cfg.dim), np.float32)
    with pytest.raises(UserError, match="decoding needs unrolled layers"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), memory, None, 4, method="init_cache"))


def test_a_prefix_needs_a_prefix_language_model():
    model, tokens = registry.build(tiny("decoder_lm")), np.ones((1, 3), int)
    with pytest.raises(UserError, match="model.prefix_lm=False: must be True"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, prefix=np.array([2])))


def test_stacks_name_arguments_that_do_not_fit():
    """Regression test: without memory, a decoder attended to later tokens; integers were combined bitwise."""
    cfg, x, memory = tiny("seq2seq"), jnp.ones((2, 5, 8)), jnp.ones((2, 7, 8))
    mask = jnp.ones((2, 5), bool)
    mistakes = {
        r"Decoder\(cross=True\) needs memory": (stacks.Decoder(cfg, 1, cross=True), (x,)),
        r"Decoder\(cross=False\) has no cross-attention to memory": (stacks.Decoder(cfg, 1), (x, None, memory)),
        "padding_mask has the dtype int32": (stacks.Decoder(cfg, 1), (x, mask * 2)),
        r"padding_mask has the shape \(2, 4\)": (stacks.Encoder(cfg, 1), (x, mask[:, 1:])),
        r"memory_padding_mask has the shape \(2, 5\)": (stacks.Decoder(cfg, 1, cross=True), (x, mask, memory, mask)),
    }
    for problem, (stack, arguments) in mistakes.items():
        with pytest.raises(UserError, match=problem):
            stack.init(jax.random.key(0), *arguments)


@pytest.mark.slow
def test_a_scanned_model_generates_as_its_loop():
    loop, params = build(tiny("decoder_lm", decoder_layers=3))
    scan, _ = build(with_settings(loop.cfg, scan_layers=True))
    stacked = conversions.convert_layers(params, loop.cfg, scan_layers=True)
    keys = jax.random.split(jax.random.key(0), 2)
    prompt = np.array([[5, 6, 7], [PAD, 4, 10]], np.int32)
    texts = [
        continue_text(model, weights, prompt, keys, length=6, cfg=DecodeConfig())
        for model, weights in ((loop, params), (scan, stacked))
    ]
    np.testing.assert_array_equal(*texts)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    rest_slow(
        [
            ("seq2seq", True, {"encoder": 2 * 2, "decoder": 3 * 3}),
            ("decoder_lm", False, {"decoder": 2 * 3}),
            ("classifier", False, {"encoder": 2 * 2}),
        ],
        1,
    ),
)
def test_residual_kernels_are_scaled_by_the_sublayers_of_their_stack(case):
    family, scan, sublayers = case
    sizes = {"dim": 64, "ffn_dim": 256, "encoder_layers": 2, "decoder_layers": 3, "vocab_size": 11}
    cfg = tiny(family, **sizes, initializer="normal", scale_residual_init=True, scan_layers=scan)

    @jax.jit
    def kernels():
        """Returns the kernels of each stack that end sub-layers, and one that does not."""
        params, actual = nn.unbox(registry.init(registry.build(cfg), jax.random.key(0))), {}
        for stack in sublayers:
            layer = params[stack]["periods"]["layers_0"] if scan else params[stack]["layers_0"]
            ending = [layer["self_attention"]["output"], layer["ffn"]["contract"]]
            ending += [layer["cross_attention"]["output"]] if (family, stack) == ("seq2seq", "decoder") else []
            actual[stack] = [linear["kernel"] for linear in ending], layer["ffn"]["expand"]["kernel"]
        return actual

    for stack, (ending, other) in jax.device_get(kernels()).items():
        for kernel in ending:
            assert abs(kernel.std() / 0.02 * sublayers[stack] ** 0.5 - 1) < 0.05
        assert abs(other.std() / 0.02 - 1) < 0.05


def test_a_stack_may_have_no_layers():
    cfg = tiny("seq2seq", decoder_layers=0, encoder_layers=0, scale_residual_init=True, ffn="moe")
    registry.shapes(registry.build(cfg))


@pytest.mark.slow
def test_scanned_layers_have_different_parameters_and_dropout():
    model = registry.build(
        tiny("decoder_lm", decoder_layers=3, scan_layers=True, dropout=0.5, final_norm=False, position="none")
    )
    params = jax.jit(lambda: nn.unbox(registry.init(model, jax.random.key(0))))()
    kernel = params["decoder"]["periods"]["layers_0"]["ffn"]["expand"]["kernel"]
    assert kernel.shape[0] == 3
    assert not np.allclose(kernel[0], kernel[1])
    silent = jax.tree.map(np.zeros_like, params)
    silent["decoder"]["periods"]["layers_0"]["ffn"]["contract"]["bias"] += 1.0
    rngs = {"dropout": jax.random.key(1)}
    _, state = apply(model, silent, TOKENS[:1], train=True, rngs=rngs, capture_intermediates=True)
    (sums,) = state["intermediates"]["decoder"]["__call__"]
    assert set(np.unique(sums)) == {0, 2, 4, 6}, "1 a layer, doubled or dropped; only 0 and 6 where layers drop alike"
