"""Texts by speculative decoding are those of `Translator` and `TextGenerator`."""

import dataclasses

import numpy as np
import pytest

from tests.helpers import build, tiny
from tformer_jax.config import Config, ConfigError, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference import batching
from tformer_jax.inference.speculative_text import SpeculativeDecoder
from tformer_jax.inference.text import TextGenerator, Translator
from tformer_jax.special_tokens import EOS, UNK

pytestmark = pytest.mark.slow

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = {"seq2seq": ["abc", "g", "", "fedcba"], "decoder_lm": ["abc", "g", "abcdefgabcdefg"]}
SOURCES = {"seq2seq": ("cldr_translation", "buckets"), "decoder_lm": ("stdlib_text", "windows")}


def setup(family: str, **decode):
    """A config, a model and its parameters, of which those of another seed are the draft's."""
    source, batches = SOURCES[family]
    cfg = Config(
        model=tiny(family, output_bias=True),
        data=DataConfig(source=source, batching=batches, window=8, bucket_lengths=(8, 16)),
        decode=DecodeConfig(max_new_tokens=6, **decode),
        eval=EvalConfig(batch_size=2),
    )
    model, params = build(cfg.model, seed=1)
    params["head"]["bias"] = params["head"]["bias"].at[np.array([UNK, EOS])].set(np.array([-30, 0.5]))
    return cfg, model, params


def with_draft(cfg, model, seed: int = 2) -> SpeculativeDecoder:
    return SpeculativeDecoder(cfg, model, TOKENIZERS, model, build(cfg.model, seed=seed)[1])


@pytest.mark.parametrize("family", TEXTS)
def test_texts_and_scores_are_those_of_the_model_alone(family):
    cfg, model, params = setup(family)
    plain = (Translator if family == "seq2seq" else TextGenerator)(cfg, model, TOKENIZERS)
    drafted, texts = with_draft(cfg, model), TEXTS[family]
    expected = list(plain.stream(params, texts, outputs=2))
    found = list(drafted.stream(params, texts, outputs=2))
    assert len({outputs[0].text for outputs in found}) > 1
    for mine, theirs in zip(found, expected, strict=True):
        assert [output.text for output in mine] == [output.text for output in theirs]
        assert [output.score for output in mine] == [
            None if output.score is None else pytest.approx(output.score, rel=1e-4) for output in theirs
        ]
    assert list(drafted.stream_pieces(params, "abc")) == [found[0][0].text]


def test_the_acceptance_counts_each_row_once():
    cfg, model, params = setup("decoder_lm")
    drafted = SpeculativeDecoder(cfg, model, TOKENIZERS, model, params)
    assert drafted.acceptance() == "draft: 0 of 0 proposed tokens kept"
    (((one,),), proposed) = list(drafted.stream(params, ["abc"])), drafted.proposed
    assert proposed == drafted.accepted > 0
    assert [output for (output,) in drafted.stream(params, ["abc"] * 3)] == [one] * 3
    assert drafted.proposed == drafted.accepted == 4 * proposed
    assert drafted.acceptance() == f"draft: {4 * proposed} of {4 * proposed} proposed tokens kept (100.0 %)"


def test_samples_depend_on_their_place_alone(monkeypatch):
    cfg, model, params = setup("decoder_lm", strategy="sample", temperature=2.0)
    drafted, texts = with_draft(cfg, model), ["abc", "a", "abc"]
    found = list(drafted.stream(params, texts, outputs=2, seed=3))
    assert len({output.text for place in (0, 2) for output in found[place]}) == 4
    assert list(drafted.stream(params, texts, outputs=2, seed=3, skip=1)) == found[1:]
    monkeypatch.setattr(batching.in_chunks, "__kwdefaults__", {"skip": 0, "size": 2})
    assert list(drafted.stream(params, texts, outputs=2, seed=3)) == found
    assert list(drafted.stream(params, texts, outputs=2, seed=4)) != found


def test_outputs_end_before_a_text_that_stops():
    cfg, model, params = setup("decoder_lm")
    ((whole,),) = with_draft(cfg, model).stream(params, ["abc"])
    assert len(whole.text) > 3
    end = whole.text[2]
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, stop=(end,)))
    ((found,),) = with_draft(cfg, model).stream(params, ["abc"])
    assert found.text == whole.text[: whole.text.index(end)]
    assert 0 > found.score > whole.score


def test_outputs_begin_with_what_is_forced():
    cfg, model, params = setup("decoder_lm", prefix="gag")
    assert all(output.text.startswith("gag") for (output,) in with_draft(cfg, model).stream(params, ["abc", "d"]))


def test_mistakes():
    cfg, model, params = setup("decoder_lm")
    with pytest.raises(ConfigError, match="prompt 2 is empty"):
        list(with_draft(cfg, model).stream(params, ["a", ""]))
    with pytest.raises(ConfigError, match="prefix='x': the vocabulary cannot write it"):
        with_draft(setup("decoder_lm", prefix="x")[0], model)
    cfg, model, params = setup("decoder_lm", strategy="beam")
    with pytest.raises(ConfigError, match="does not go together with a draft"):
        list(with_draft(cfg, model).stream(params, ["a"]))
