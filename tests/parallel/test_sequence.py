"""Training with rows split over devices equals training with whole rows, for ring attention and all other backends."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.helpers import assert_close, randomized, rest_slow, with_settings
from tests.parallel import test_inference, test_presets
from tests.parallel.hlo import collectives
from tests.parallel.test_collectives import lowered, plain
from tformer_jax.config import Config
from tformer_jax.inference.text import Translator
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.special_tokens import PAD
from tformer_jax.tasks.evaluators.likelihood import Likelihood
from tformer_jax.train.step import accumulated_gradients

MESHES = {
    "data=2, sequence=4": {"data": 2, "sequence": 4},
    "fsdp=2, sequence=2, tensor=2": {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2},
}


def config(kind: str, sizes: dict[str, int], backend: str = "ring", **model) -> Config:
    cfg = test_presets.config(kind, **sizes)
    settings = {"attention_backend": backend, "attention_dropout": 0.0} | model
    return dataclasses.replace(cfg, model=with_settings(cfg.model, **settings))


@functools.cache
def alone(kind: str):
    return test_presets.trained(config(kind, {}, "reference"), devices=1)


WITHOUT_SEQUENCE = "latents and states"
"""A recurrent state reads its tokens in order."""
WITH_SINKS = "widths that no mesh divides"
SUPPORTED = [
    (kind, backend)
    for kind in test_presets.MODELS
    for backend in ("ring", "blockwise", "xla")
    if kind != WITHOUT_SEQUENCE and (kind, backend) != (WITH_SINKS, "xla")
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("kind", "backend"), SUPPORTED)
def test_losses_and_parameters_of_one_device(kind, mesh, backend):
    losses, end = test_presets.trained(config(kind, MESHES[mesh], backend))
    expected_losses, expected = alone(kind)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for actual, wanted in zip(jax.tree.leaves(end.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


DOCUMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3], [1] * 8, [1, 2, 2, 2, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]] * 2)
OTHERS = DOCUMENTS[::-1].copy()
VARIANTS = {
    "packed, relative, GQA": (
        "decoder_lm",
        {"position": "relative", "relative": {"buckets": 8, "distance": 9}, "num_kv_heads": 2},
        {"segments": DOCUMENTS},
    ),
    "packed pairs, ALiBi, scanned": (
        "seq2seq",
        {"position": "alibi", "scan_layers": True, "decoder_layers": 2, "remat": "nothing_saveable"},
        {"source_segments": OTHERS, "target_segments": DOCUMENTS},
    ),
    "packed, learned positions, window": (
        "decoder_lm",
        {"position": "learned", "layer_pattern": ("window", "full"), "decoder_layers": 2, "window": 3},
        {"segments": DOCUMENTS},
    ),
    "prefix, MQA, capped, remat": (
        "decoder_lm",
        {"prefix_lm": True, "num_kv_heads": 1, "attention_softcap": 2.0, "remat": "dots_saveable"},
        {"prefix": np.array([0, 3, 8, 5] * 2, np.int32)},
    ),
    "experts with little room": ("experts", {"moe": {"expert_capacity": 1.0}}, {}),
    "last token": ("classifier", {"pooling": "last", "position": "sinusoidal_halves"}, {}),
    "first token": ("classifier", {"pooling": "first", "position": "learned"}, {}),
}


def gradients(cfg: Config, extra: dict[str, np.ndarray], devices: int = 8):
    """Returns the loss sums of a batch and the gradients of random parameters, in two parts, with chunked logits."""
    mesh, model = make_mesh(cfg.parallel, jax.devices()[:devices]), registry.build(cfg.model)
    boxed = registry.shapes(model)
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), rules.parameter_specs(boxed, mesh.shape))
    rows, inputs = test_presets.batch(cfg, 0), cfg.model.model_class.inputs
    rows |= {key: np.where(rows[key] < 7, PAD, rows[key]) for key in inputs}

    def both(params, rows):
        with rules.use_mesh(mesh):
            sums, _, grads, _ = accumulated_gradients(model, params, rows, jax.random.key(1), cfg)
        return sums._asdict(), grads

    params = jax.device_put(randomized(boxed), where)
    return jax.device_get(jax.jit(both)(params, jax.device_put(rows | extra, rules.batch_sharding(mesh))))


@functools.cache
def expected_gradients(variant: str):
    kind, model, extra = VARIANTS[variant]
    return gradients(piecewise(config(kind, {}, "reference", **model)), extra, devices=1)


def piecewise(cfg: Config) -> Config:
    chunk = None if cfg.model.family == "classifier" else 3
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, accumulate=2, loss_chunk=chunk))


@pytest.mark.long
@pytest.mark.parametrize("backend", rest_slow(["ring", "reference"], 1))
@pytest.mark.parametrize("mesh", rest_slow(reversed(MESHES), 1))
@pytest.mark.parametrize("variant", rest_slow(VARIANTS.keys(), 1))
def test_gradients_of_one_device(variant, mesh, backend):
    kind, model, extra = VARIANTS[variant]
    actual = gradients(piecewise(config(kind, MESHES[mesh], backend, **model)), extra)
    for part, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected_gradients(variant)), strict=True):
        assert_close(part, wanted, proves=(f"mesh: {mesh}, {backend} attention, gradients", "one device"))


@pytest.mark.slow
def test_the_likelihood_and_the_translations_of_one_device():
    cfg, model, params = test_inference.built("seq2seq", max_new_tokens=6)
    ring = registry.build(with_settings(cfg.model, attention_backend="ring"))
    split = test_inference.on(MESHES["data=2, sequence=4"], ring, params)
    draw = np.random.default_rng(0)
    keys = ("source", "target_in", "target_out")
    batches = [{key: draw.integers(4, 11, (rows, 8)).astype(np.int32) for key in keys} for rows in (8, 5)]
    actual, expected = Likelihood(ring, lambda: batches)(split), Likelihood(model, lambda: batches)(params)
    np.testing.assert_allclose(actual[:2], expected[:2], rtol=1e-5)
    texts = []
    for chosen, place in ((ring, split), (model, params)):
        run = Translator(cfg, chosen, test_inference.TOKENIZERS).stream(place, test_inference.TEXTS)
        texts.append([output.text for outputs in run for output in outputs])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2


def sent_by_a_step(backend: str):
    cfg = plain(config("decoder_lm", MESHES["data=2, sequence=4"], backend))
    return collectives(lowered(cfg).compile().as_text())


@pytest.mark.long
def test_a_step_with_ring_attention_gathers_neither_keys_nor_values():
    """Of activations, only each device's keys and values [B, K, S, H] and their gradients are communicated."""
    actual = sent_by_a_step("ring")
    sent = [shape for each in actual if each.kind == "collective-permute" for shape in each.shapes]
    assert sent.count((4, 8, 2, 2)) >= 6
    gathered = [each.name for each in actual if each.kind in ("all-gather", "all-to-all") and "attention" in each.name]
    assert gathered == []


@pytest.mark.slow
def test_a_step_with_blockwise_attention_gathers_keys_and_values():
    """The names by which the test above looks for gathered keys are those of the compiled program."""
    actual = sent_by_a_step("blockwise")
    assert [each for each in actual if each.kind == "all-gather" and "attention" in each.name]
