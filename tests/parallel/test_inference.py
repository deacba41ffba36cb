"""Evaluation and decoding on a mesh give the results of one device."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.helpers import build, rest_slow, tiny
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ParallelConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.scores import Scorer
from tformer_jax.inference.text import LabelClassifier, TextGenerator, Translator
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.special_tokens import EOS, IGNORED, PAD
from tformer_jax.tasks.evaluators.likelihood import Likelihood

LETTERS = CharacterTokenizer("abcdefg")
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc", "gfedcba", "a", "abcabc", "bb", "cab", "fade"]
MESHES = {"both": {"data": 2, "fsdp": 2, "tensor": 2}, "rows": {"data": 8}}
SEEDS = {"seq2seq": 7, "decoder_lm": 3, "classifier": 4}  # whose outputs differ from text to text
MIXED = {"layer_pattern": ("gated_delta", "full"), "decoder_layers": 2, "attention": "mla"}
MODELS = {"seq2seq": ("seq2seq", {}), "decoder_lm": ("decoder_lm", {}), "latents and states": ("decoder_lm", MIXED)}
DECODINGS = {"beam": {"strategy": "beam", "beams": 3}, "greedy": {}, "sample": {"strategy": "sample"}}


def built(family: str, changes=None, **decode):
    """Returns a config, a model, and its random parameters on one device."""
    data = {
        "seq2seq": DataConfig(source="cldr_translation", bucket_lengths=(8, 16)),
        "decoder_lm": DataConfig(source="stdlib_text", batching="windows", window=8),
        "classifier": DataConfig(source="cldr_language", bucket_lengths=(8, 16)),
    }[family]
    model = tiny(family, num_heads=2, **(changes or {}))
    cfg = Config(model=model, data=data, decode=DecodeConfig(**decode), eval=EvalConfig(batch_size=4))
    return cfg, *build(model, SEEDS[family])


def on(sizes: dict[str, int], model, params):
    """Places the parameters on a mesh."""
    mesh = make_mesh(ParallelConfig(**sizes))
    specs = rules.parameter_specs(registry.shapes(model), mesh.shape)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", rest_slow(MESHES, 1))
@pytest.mark.parametrize("decoding", rest_slow(DECODINGS, 1))
@pytest.mark.parametrize("kind", rest_slow(MODELS, 1))
def test_outputs_and_their_scores(kind, decoding, mesh):
    family, changes = kind
    cfg, model, params = built(family, changes, max_new_tokens=6, **decoding)
    generator = Translator if family == "seq2seq" else TextGenerator
    texts, scores = [], []
    for place in (params, on(mesh, model, params)):
        run = generator(cfg, model, TOKENIZERS).stream(place, TEXTS[:5], outputs=2, seed=3, scores=True)
        actual = [output for outputs in run for output in outputs]
        texts.append([output.text for output in actual])
        scores.append([output.score for output in actual])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2
    np.testing.assert_allclose(*scores, rtol=1e-4)


@pytest.mark.slow
def test_rows_and_heads_of_a_cache_are_sharded():
    cfg, model, params = built("seq2seq", max_new_tokens=6)
    engine = Engine(cfg, model, on(MESHES["both"], model, params), TOKENIZERS, max_rows=4)
    engine.submit(Request((5, 6, EOS), cfg.decode))
    engine.step()
    (lane,) = engine._lanes.values()
    cache = lane.state.cache
    for keys_values in (cache.layers[0].self_attention, cache.layers[0].cross_attention):
        assert keys_values.k.sharding.spec[:2] == (("data", "fsdp"), "tensor")
    assert cache.lengths.sharding.spec[0] == ("data", "fsdp")


@pytest.mark.long
@pytest.mark.parametrize("mesh", rest_slow(MESHES, 1))
def test_the_likelihood_of_uneven_batches(mesh):
    _, model, params = built("decoder_lm")
    draw = np.random.default_rng(0)
    batches = []
    for rows in (8, 5):
        tokens = draw.integers(4, 11, (rows, 8)).astype(np.int32)
        targets = draw.integers(4, 11, (rows, 8)).astype(np.int32)
        tokens[-1, 5:], targets[-1, 5:] = PAD, IGNORED
        batches.append({"tokens": tokens, "targets": targets})
    *alone, losses, _ = Likelihood(model, lambda: batches)(params)
    *actual, parts, _ = Likelihood(model, lambda: batches)(on(mesh, model, params))
    np.testing.assert_allclose(actual, alone, rtol=1e-5)
    np.testing.assert_allclose(parts.nll, losses.nll, rtol=1e-5)
    assert parts.labels == losses.labels


@pytest.mark.slow
def test_scores_and_labels():
    cfg, model, params = built("seq2seq")
    pairs = [(text, text[::-1]) for text in TEXTS]
    places = (params, on(MESHES["both"], model, params))
    for alone, split in zip(*(Scorer(cfg, model, TOKENIZERS).stream(place, pairs) for place in places), strict=True):
        np.testing.assert_allclose(split.log_probabilities, alone.log_probabilities, rtol=1e-4)

    cfg, model, params = built("classifier")
    classify = LabelClassifier(cfg, model, TOKENIZERS, "xyz")
    alone, split = (classify(place, TEXTS) for place in (params, on({"data": 4}, model, params)))
    assert [label for label, _ in alone] == [label for label, _ in split]
    assert len({label for label, _ in alone}) > 1
