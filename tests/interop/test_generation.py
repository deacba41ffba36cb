"""Decoding settings of checkpoints: what is read, what is reported, and what an export writes."""

import dataclasses
import json

import pytest

from tests.helpers import build, tiny
from tformer_jax.cli import export_hf
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.interop import generation
from tformer_jax.runs import run_folder, weights

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
GPT2 = {"attention_projections": "fused_qkv", "position": "learned", "activation": "gelu_tanh"}
GPT2 |= {"scale_embeddings": False, "tie_embeddings": "output"}
WRITTEN = {
    "greedy": {"max_new_tokens": 9, "min_new_tokens": 3, "repetition_penalty": 1.3, "no_repeat_ngram": 2},
    "stop": {"stop": ("\n\n", "END"), "max_new_tokens": 9},
    "beam": {"strategy": "beam", "beams": 3, "length_alpha": 0.6, "max_new_tokens": 9},
    "beam, first": {"strategy": "beam", "beams": 2, "early_stopping": "first", "max_new_tokens": 9},
    "beam, never": {"strategy": "beam", "beams": 2, "early_stopping": "never", "max_new_tokens": 9},
    "beam, renormalized": {"strategy": "beam", "beams": 2, "renormalize": True, "max_new_tokens": 9},
    "sample": {"strategy": "sample", "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 9},
    "no limit": {},
    "sample, all tokens": {"strategy": "sample", "top_k": None, "top_p": 1.0, "max_new_tokens": 9},
}


@pytest.mark.parametrize("ends", [2, [2, 9]])
def test_a_forced_end_that_ends_no_output_is_reported(ends, tmp_path):
    """Regression test: outputs were one token shorter, without a word."""
    given = {"max_new_tokens": 8, "eos_token_id": ends}
    read = {}
    for forced in (2, 9):
        (tmp_path / "generation_config.json").write_text(json.dumps(given | {"forced_eos_token_id": forced}))
        cfg, left = generation.read_decoding(tmp_path, {}, tiny("decoder_lm"))
        read[forced] = cfg.max_new_tokens, left
    assert read == {2: (7, []), 9: (8, ["forced_eos_token_id=9"]) if ends == 2 else (7, [])}


@pytest.mark.parametrize("family", ["decoder_lm", "seq2seq"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_as_the_same_settings(name, family, tmp_path):
    cfg = DecodeConfig(**WRITTEN[name])
    fields, left = generation.generation_fields(cfg, tiny(family))
    assert left == []
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert generation.read_decoding(tmp_path, {}, tiny(family)) == (cfg, [])


def test_all_tokens_are_sampled_from_unless_a_limit_is_set():
    fields, left = generation.generation_fields(DecodeConfig(strategy="sample", candidates=4), tiny("decoder_lm"))
    assert left == ["decode.candidates=4"]
    assert (fields["top_k"], fields["top_p"]) == (0, 1.0)


@pytest.mark.parametrize(("family", "longest"), [("decoder_lm", 16), ("seq2seq", 17)])
def test_an_export_asks_for_no_more_tokens_than_the_model_has_positions(family, longest):
    """With 16 positions, a prompt and its output have 16 tokens; a decoder reads BOS and 15 tokens, and writes 16."""
    for new in (None, 16, 128):
        fields, _ = generation.generation_fields(DecodeConfig(max_new_tokens=new), tiny(family))
        assert (fields.get("max_length"), fields.get("max_new_tokens")) == (longest, None)
    fields, _ = generation.generation_fields(DecodeConfig(max_new_tokens=15), tiny(family))
    assert (fields.get("max_length"), fields.get("max_new_tokens")) == (None, 15)


@pytest.mark.long
def test_the_export_holds_the_decoding_settings(tmp_path, capsys):
    cfg = Config(
        model=tiny("decoder_lm", **GPT2),
        data=DataConfig(source="stdlib_text", batching="windows", window=8),
        decode=DecodeConfig(strategy="beam", beams=3, length_penalty="gnmt", max_new_tokens=5, prefix="a"),
    )
    run_folder.create(tmp_path / "run", cfg, Tokenizers(LETTERS, LETTERS), None)
    weights.save(tmp_path / "run", build(cfg.model)[1], "last", [], 0)
    export_hf.main(["--run", str(tmp_path / "run"), "--model-type", "gpt2", str(tmp_path / "out"), "--no-check"])
    actual = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (actual["eos_token_id"], actual["bad_words_ids"]) == (2, [[0], [1]])
    back, _ = generation.read_decoding(tmp_path / "out", {}, cfg.model)
    assert back == dataclasses.replace(cfg.decode, length_penalty="average", prefix="")
    assert "not written: decode.length_penalty='gnmt', decode.prefix='a'\n" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "stop"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())])
def test_texts_that_end_outputs(given, stop, tmp_path):
    cfg, unapplied = generation.read_decoding(tmp_path, {"stop_strings": given}, tiny("decoder_lm"))
    assert (cfg.stop, unapplied) == (stop, [])


LACKING = {
    "sequence_bias": [[[5], -1.0]],
    "top_h": 0.4,
    "token_healing": True,
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "constraints": [1],
    "watermarking_config": {"bias": 2.0},
    "max_time": 3.0,
}


@pytest.mark.parametrize("name", LACKING)
def test_settings_that_are_not_applied_are_reported(name, tmp_path):
    for family in ("decoder_lm", "seq2seq"):
        for value in (LACKING[name], generation.NEUTRAL[name]):
            expected = [] if value == generation.NEUTRAL[name] else [f"{name}={value!r}"]
            assert generation.read_decoding(tmp_path, {name: value}, tiny(family))[1] == expected


def test_sampling_at_temperature_zero_is_greedy_decoding_and_said(tmp_path):
    """Regression test: the checkpoint could not be imported. transformers refuses to generate with these settings."""
    given = {"do_sample": True, "temperature": 0.0, "top_k": 5}
    decode, unapplied = generation.read_decoding(tmp_path, given, tiny("decoder_lm"))
    assert decode.strategy == "greedy"
    assert unapplied == ["do_sample=True", "temperature=0.0", "top_k=5"]


def test_unknown_fields_of_a_generation_config_are_reported(tmp_path):
    """Fields of transformers 5 are read, reported or do not change the best output; others are reported."""
    fields = vars(pytest.importorskip("transformers").GenerationConfig())
    known = generation.READ | generation.IRRELEVANT | {*generation.NEUTRAL, *generation.SAMPLING, *generation.LENGTHS}
    assert fields.keys() - known == set()
    (tmp_path / "generation_config.json").write_text(json.dumps({"contrast": 0.5, "temperature": 0.7}))
    assert generation.read_decoding(tmp_path, {}, tiny("decoder_lm"))[1] == ["contrast=0.5"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"min_length": 5, "max_length": 9}, ["min_length=5", "max_length=9"]),
        ({"min_length": 0, "max_length": 20}, []),  # their defaults
        ({"min_length": 5, "max_length": 9, "max_new_tokens": 7}, ["min_length=5"]),
        ({"min_length": 5, "max_length": 9, "min_new_tokens": 3}, ["max_length=9"]),
        ({"max_length": 15}, ["max_length=15"]),
        ({"max_length": 16}, []),  # all positions of the model, which is what is applied
    ],
)
def test_lengths_with_the_prompt_are_reported(given, expected, tmp_path):
    assert generation.read_decoding(tmp_path, given, tiny("decoder_lm"))[1] == expected
    assert generation.read_decoding(tmp_path, given, tiny("seq2seq"))[1] == []


def test_settings_without_a_counterpart_are_named(tmp_path):
    """transformers forces BOS after a prompt of one token alone; it takes length penalties below 0."""
    fields = {"forced_bos_token_id": 7, "num_beams": 3, "length_penalty": -0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    cfg, unapplied = generation.read_decoding(tmp_path, {}, tiny("decoder_lm"))
    assert (cfg.strategy, cfg.beams, cfg.length_alpha) == ("beam", 3, 0.0)
    assert {"forced_bos_token_id=7", "length_penalty=-0.5"} <= {*unapplied}
    _, unapplied = generation.read_decoding(tmp_path, {}, tiny("seq2seq"))
    assert "forced_bos_token_id=7" not in unapplied
