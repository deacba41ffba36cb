"""Ensembles: the mean of several models in full passes, in decoding with caches, and in scores."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.helpers import build, tiny
from tests.inference.test_text import TEXTS, TOKENIZERS, setup
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig, DecodeConfig
from tformer_jax.config.layers import MEANS
from tformer_jax.inference.encoding import wrap_prompt
from tformer_jax.inference.scores import Scorer
from tformer_jax.inference.text import TextGenerator, Translator
from tformer_jax.models import registry
from tformer_jax.models.ensemble import Ensemble, check_member
from tformer_jax.special_tokens import BOS, EOS, PAD

SOURCES = ["abc", "gg"]
WIDTHS = ({}, {"dim": 12, "num_heads": 3, "decoder_layers": 2})
"""Members differ in width and depth."""


def members(family, end=0.0):
    """Returns models and parameters; `end` is added to the logits of EOS."""
    pairs = [build(tiny(family, output_bias=True, **width), seed=seed) for seed, width in enumerate(WIDTHS, start=1)]
    bias = np.zeros(TOKENIZERS.target.vocab_size, np.float32)
    bias[EOS] = end
    return tuple(model for model, _ in pairs), tuple(params | {"head": {"bias": bias}} for _, params in pairs)


@functools.partial(jax.jit, static_argnames="models")
def all_logits(models, params, batch):
    return [registry.forward(model, own, batch).values for model, own in zip(models, params, strict=True)]


def mean_log_probabilities(models, params, mean, rows):
    """Oracle: the mean of the probabilities of the next token, or of their logarithms, in float64."""
    batch = {key: np.array([ids + [PAD] * (16 - len(ids))]) for key, ids in rows.items()}
    place = len(rows[models[0].inputs[-1]]) - 1
    batch[models[0].labels] = batch[models[0].inputs[-1]]
    logits = [np.float64(each[0, place]) for each in all_logits(models, params, batch)]
    p = np.stack([np.exp(each - each.max()) / np.exp(each - each.max()).sum() for each in logits])
    joint = p.mean(0) if mean == "probabilities" else np.exp(np.log(p).mean(0))
    return np.log(joint / joint.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mean"), [("seq2seq", MEANS[0]), pytest.param("decoder_lm", MEANS[1], marks=pytest.mark.slow)]
)
def test_greedy_outputs_and_scores_are_those_of_the_mean(family, mean):
    models, params = members(family)
    cfg, texts = setup(family), [text for text in TEXTS if text]
    kind = Translator if family == "seq2seq" else TextGenerator
    outputs = kind(cfg, Ensemble(models, mean), TOKENIZERS).outputs(params, texts, scores=True)
    for text, output in zip(texts, outputs, strict=True):
        tokens, written, total = TOKENIZERS.source.encode(text), [], 0.0
        rows = {"tokens": wrap_prompt(TOKENIZERS.target, text, tokens, ())}
        if family == "seq2seq":
            rows = {"source": TOKENIZERS.source.special.wrap_side(tokens), "target_in": [BOS]}
        while len(written) < cfg.decode.max_new_tokens and EOS not in written:
            log_p = mean_log_probabilities(models, params, mean, rows)
            written.append(int(log_p.argmax()))
            total += log_p.max()
            rows[models[0].inputs[-1]] = [*rows[models[0].inputs[-1]], written[-1]]
        assert output.text == TOKENIZERS.target.decode(written)
        assert output.score == pytest.approx(total, rel=1e-4)


@pytest.mark.slow
def test_outputs_of_beam_search_have_the_scores_of_full_passes():
    models, params = members("seq2seq", end=1.0)
    cfg = setup("seq2seq")
    cfg = dataclasses.replace(cfg, decode=DecodeConfig(strategy="beam", beams=4, length_alpha=0.0, max_new_tokens=8))
    both = Ensemble(models)
    outputs = list(Translator(cfg, both, TOKENIZERS).stream(params, SOURCES, outputs=4))
    complete = [
        (text, output) for text, row in zip(SOURCES, outputs, strict=True) for output in row if not output.limit
    ]
    scored = Scorer(cfg, both, TOKENIZERS).stream(params, [(text, output.text) for text, output in complete])
    assert len(complete) > 4
    for (_, output), scores in zip(complete, scored, strict=True):
        assert output.score == pytest.approx(sum(scores.log_probabilities), rel=1e-4)
    for model, own in zip(models, params, strict=True):
        assert list(Translator(cfg, model, TOKENIZERS).stream(own, SOURCES, outputs=4)) != outputs


@pytest.mark.slow
def test_a_model_with_itself_is_the_model():
    (model, _), (params, _) = members("seq2seq")
    cfg = dataclasses.replace(setup("seq2seq"), decode=DecodeConfig(strategy="beam", beams=3, max_new_tokens=5))
    twice = Translator(cfg, Ensemble((model, model)), TOKENIZERS)
    assert twice((params, params), TEXTS) == Translator(cfg, model, TOKENIZERS)(params, TEXTS)


def test_a_cache_has_the_layers_of_all_members():
    """Also that of language models, which read no source."""
    models = tuple(registry.build(tiny("decoder_lm", **width)) for width in WIDTHS)
    cache = jax.eval_shape(lambda: Ensemble(models).apply({"params": ({}, {})}, 2, 4, method="init_cache"))
    assert len(cache.layers) == sum(model.cfg.decoder_layers for model in models)


def test_members_share_what_decoding_needs():
    cfg = setup("seq2seq")
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, max_length=32))
    with pytest.raises(UserError, match="runs/b cannot decode together with the first run: model.max_length is 32"):
        check_member(cfg, other, "runs/b")
    other = dataclasses.replace(cfg, embed=dataclasses.replace(cfg.embed, only=True))
    with pytest.raises(UserError, match="embed.only is True, not False"):
        check_member(cfg, other, "runs/b")
    tags = ("target",)
    many = {"directions": ("en-de", "en-fr"), "train": ("{src}-{tgt}.tsv",), "source": "tsv"}
    many["bucket_lengths"] = (16,)
    many |= {"validation": ("{src}-{tgt}.v.tsv",)}
    first, second = (
        dataclasses.replace(cfg, data=DataConfig(**many, source_tags=of_source, target_tags=of_target))
        for of_source, of_target in ((tags, ()), ((), tags))
    )
    with pytest.raises(UserError, match=r"data.source_tags is \(\), not \('target',\); train it with the same value"):
        check_member(first, second, "runs/b")
    with pytest.raises(UserError, match="needs models that decode, unlike the classifier"):
        check_member(setup("classifier"), cfg, "runs/b")
    check_member(cfg, dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dim=cfg.model.dim * 2)), "runs/b")
