"""Updates do not depend on the layout of parameters: scanned layers and fused projections."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.helpers import assert_close, randomized, rest_slow, tiny
from tests.train.test_optimizers import boxed, settings
from tformer_jax import axes
from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.config.task import tasks_of_family
from tformer_jax.models import conversions, registry
from tformer_jax.train import optimizers


def steps(cfg: Config, shapes, params, all_grads):
    """Returns the parameters after steps with gradients that do not depend on them."""
    optimizer = optimizers.build(cfg, shapes)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for grads in all_grads:
        params, state = step(params, state, grads)
    return params


BY_TENSOR = {name: {"optimizer": name} for name in ("lamb", "muon", "adafactor")}
BY_TENSOR["adaptive_clip"] = {"optimizer": "sgd", "adaptive_clip": 0.1}
EACH = BY_TENSOR | {name: {"optimizer": name} for name in kinds.OPTIMIZERS if name != "python"}


@pytest.mark.long
@pytest.mark.parametrize("changes", rest_slow(EACH, 2))
def test_updates_of_scanned_layers_equal_those_of_a_loop(changes):
    """Stacks of different depth, and parameters outside of layers."""
    loops = {"encoder": 2, "decoder": 1}
    loop_shapes = {stack: {str(i): boxed() for i in range(depth)} for stack, depth in loops.items()} | boxed()
    scan_shapes = boxed() | {
        stack: jax.tree.map(
            lambda box, depth=depth: nn.LogicallyPartitioned(
                jax.ShapeDtypeStruct((depth, *box.value.shape), box.value.dtype), (axes.LAYERS, *box.names)
            ),
            boxed(),
            is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned),
        )
        for stack, depth in loops.items()
    }
    params, *grads = (randomized(loop_shapes, seed, 1.0) for seed in range(4))

    def stacked(tree):
        layers = {stack: [tree[stack][str(i)] for i in range(depth)] for stack, depth in loops.items()}
        return tree | {
            stack: jax.tree.map(lambda *leaves: np.stack(leaves), *actual) for stack, actual in layers.items()
        }

    cfg = settings(**changes, clip_norm=1.0)
    looped = stacked(steps(cfg, loop_shapes, params, grads))
    scanned = steps(cfg, scan_shapes, stacked(params), map(stacked, grads))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), scanned, looped)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    rest_slow(
        [
            ("decoder_lm", "fused_qkv", False),
            ("classifier", "fused_kv", True),
            ("seq2seq", "fused_qkv", True),
            ("seq2seq", "fused_kv", False),
        ],
        1,
    ),
)
@pytest.mark.parametrize("changes", rest_slow(EACH, 1))
def test_updates_of_fused_projections_equal_those_of_separate_ones(changes, layout):
    family, kind, scan = layout
    biases = {"attention_bias": ("query", "key", "value")}
    model = tiny(family, num_kv_heads=2, max_length=64, scan_layers=scan, encoder_layers=2, **biases)
    fused = dataclasses.replace(model, attention_projections=kind)
    params, *grads = (randomized(registry.shapes(registry.build(model)), seed, 1.0) for seed in range(4))
    changes = {"decayed": ("*attention/[qkv]*/kernel",), **changes}
    of_both = []
    for cfg in (model, fused):
        own = [conversions.convert_projections(tree, model, cfg.attention_projections) for tree in (params, *grads)]
        data = DataConfig(
            source=tasks_of_family(family)[0].sources[0], batching=tasks_of_family(family)[0].batchings[0], window=32
        )
        actual = steps(
            dataclasses.replace(settings(**changes), model=cfg, data=data),
            registry.shapes(registry.build(cfg)),
            own[0],
            own[1:],
        )
        of_both.append(conversions.convert_projections(actual, cfg, "separate"))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), *of_both)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_averages_of_a_schedule_free_optimizer_have_fused_projections(clip):
    model = tiny("seq2seq", attention_projections="fused_qkv")
    cfg = settings(optimizer="schedule_free_adamw", adaptive_clip=clip)
    cfg = dataclasses.replace(cfg, model=model, data=DataConfig(bucket_lengths=(8,)))
    shapes = registry.shapes(registry.build(model))
    params, optimizer = nn.unbox(shapes), optimizers.build(cfg, shapes)
    actual = jax.eval_shape(lambda tree: optimizers.evaluation_params(optimizer.init(tree), tree), params)
    assert actual == params
