"""The model card of an export says what the run's folder says, and its program computes what the run computes."""

import dataclasses
import json
import re
import types

import numpy as np
import pytest

import tformer_jax as tj
from tests.data.test_directions import experiment
from tests.helpers import rest_slow
from tests.parity import own_runs
from tests.report.folders import SIGNATURES, write_run
from tformer_jax import config
from tformer_jax.cli import export_hf, model_card
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.languages import Languages
from tformer_jax.report.run import load_all


def test_it_has_languages_scores_data_and_the_command(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "corpus.json").write_text(json.dumps({"the number of train examples": 1200}))
    cfg = config.load(folder / "config.json")
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=900))
    run = tj.Run(folder, cfg, None, {"kernel": np.zeros((30, 40))}, None, None)
    given = {"auto": "AutoModelForSeq2SeqLM", "kind": "huggingface", "license_name": None}
    origin = {"checkpoint": "org/name", "sha256": {"model.safetensors": "0f"}}
    model_card.write(tmp_path, "out", run, origin, **given)
    card = (tmp_path / "README.md").read_text()
    head, text = card.removeprefix("---\n").split("\n---\n", 1)
    assert {name: json.loads(value) for name, _, value in (line.partition(": ") for line in head.splitlines())} == {
        "language": ["de", "en"],
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "base_model": "org/name",
    }
    test, command = (
        json.loads((folder / name).read_text())[key]
        for name, key in (("result.json", "test"), ("provenance.json", "command"))
    )
    for row in (
        "| Languages | en to de |",
        "| Parameters | 1,200 |",
        "| Data | `cldr_translation`: 1,200 train examples |",
        "| Training | 40 of 40 steps, 36 k tokens, seed 0 |",
        "| Licence | unknown: ",
        f"| {test['bleu']:.2f} |\n",
        f"BLEU: `{SIGNATURES['bleu']}`",
        command,
        "- SHA-256 of `model.safetensors`: `0f`",
    ):
        assert row in text, row


def test_scores_are_said_to_be_of_the_weights_before_they_were_rounded(tmp_path):
    folder = write_run(tmp_path / "run")
    cfg = config.load(folder / "config.json")
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=900))
    run = tj.Run(folder, cfg, None, {}, None, None)
    for quantization, told in ((None, False), ("int8", True)):
        given = {"auto": "AutoModelForSeq2SeqLM", "kind": "huggingface", "quantization": quantization}
        model_card.write(tmp_path, "out", run, {}, **given)
        card = (tmp_path / "README.md").read_text()
        assert ("| Weights | rounded to int8 after training; scores are of the weights before that |" in card) is told


def test_validation_scores_are_of_the_exported_weights(tmp_path):
    """Regression test: an export of averaged weights had the validation scores of the last weights."""
    folder = write_run(tmp_path / "run")
    path = folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "validation": {"bleu": 33.25}}))
    [scores] = model_card._scores(load_all([folder])[0])
    assert "| BLEU | 33.25 |" in scores


def test_a_checkpoint_has_no_scores_of_the_final_weights(tmp_path):
    """Regression test: the export of an earlier step had the scores, steps and tokens of the end of the run."""
    folder = write_run(tmp_path / "run")
    cfg = config.load(folder / "config.json")
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=900))
    run = tj.Run(folder, cfg, None, {"kernel": np.zeros((30, 40))}, None, None, step=20)
    model_card.write(tmp_path, "out", run, {}, auto="AutoModelForSeq2SeqLM", kind="huggingface")
    card = (tmp_path / "README.md").read_text()
    assert "| Training | 20 of 40 steps, seed 0 |" in card
    assert "Scores" not in card


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    rest_slow(
        [("huggingface", "marian"), ("ctranslate2", "llama"), ("ctranslate2", "marian"), ("huggingface", "llama")], 1
    ),
)
def test_its_program_writes_what_the_run_writes(case, tmp_path, monkeypatch, capsys):
    kind, name = case
    pytest.importorskip("transformers" if kind == "huggingface" else "ctranslate2")
    decode = DecodeConfig(strategy="beam", beams=3, max_new_tokens=5, early_stopping="first", unknown="omit")
    run = own_runs.make(tmp_path / "run", name, decode=decode)
    export_hf.main(["--run", str(run), str(tmp_path / "out"), "--format", kind, "--license", "cc0-1.0", "--no-check"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: "cc0-1.0"' in card and "| Licence | cc0-1.0 |" in card
    program = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("TEXT", "the cat sat")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(program, "README.md", "exec"), {})
    loaded = tj.load(run)
    expected = loaded.translate(["the cat sat"]) if name == "marian" else loaded.generate(["the cat sat"])
    written = capsys.readouterr().out.removesuffix("\n")
    assert expected[0].strip() and written.removeprefix("the cat sat") == expected[0]


def test_its_program_names_tokens_that_are_not_special(tmp_path):
    """Regression test: it was no valid call where an ordinary token ends outputs, or is never written."""
    run = tj.load(own_runs.make(tmp_path / "run", "llama"))
    target = run.tokenizers.target
    token = target.encode("the")[0]
    special = dataclasses.replace(target.special, eos=(*target.special.eos, token), suppressed=(token,))
    tokenizers = types.SimpleNamespace(
        target=types.SimpleNamespace(special=special, vocab_size=target.vocab_size, vocabulary=target.vocabulary)
    )
    own = types.SimpleNamespace(config=run.config, tokenizers=tokenizers)
    program = model_card._converted_program("out", own, model_card.Tags())
    name = next(text for text, i in target.vocabulary()[1].items() if i == token)
    assert f"{name!r}]" in program and f"suppress_sequences=[[{name!r}]]" in program and "None" not in program


@pytest.mark.parametrize(
    ("decode", "options"),
    [
        (
            {"min_new_tokens": 3, "repetition_penalty": 2.0, "no_repeat_ngram": 1},
            ["min_decoding_length=3", "repetition_penalty=2.0", "no_repeat_ngram_size=1"],
        ),
        ({"strategy": "sample", "top_k": 5}, ["sampling_topk=5", "sampling_topp=1.0", "sampling_temperature=1.0"]),
        ({}, ["beam_size=1"]),
    ],
)
def test_its_program_has_the_settings_of_decoding(tmp_path, decode, options):
    """Regression test: the program for CTranslate2 lost them, and that for transformers failed with stop texts."""
    cfg, _, tokenizers = experiment(tmp_path)
    cfg = tj.configs.change(cfg, decode=decode, model={"vocab_size": tokenizers.target.vocab_size})
    languages = Languages(cfg.data, tokenizers)
    run = types.SimpleNamespace(config=cfg, tokenizers=tokenizers, languages=languages)
    program = model_card._program("out", run, "AutoModelForSeq2SeqLM", "ctranslate2", "")
    given = re.findall(r"(\w+=[\w.]+)", program.partition("translate_batch")[2])
    optional = {"min_decoding_length", "repetition_penalty", "no_repeat_ngram_size", "sampling_topk"}
    assert {*options} <= {*given}
    assert {text.partition("=")[0] for text in given} & optional == {
        text.partition("=")[0] for text in options
    } & optional
    run.config = tj.configs.change(cfg, decode={"stop": ("q",)})
    program = model_card._program("out", run, "AutoModelForSeq2SeqLM", "huggingface", "")
    assert "model.generate(**inputs, tokenizer=tokenizer)" in program


@pytest.mark.parametrize(
    ("tags", "lines"),
    [
        ({}, ['tags = tokenizer.convert_tokens_to_ids(["<2en>"])']),
        (
            {"source_tags": ("source",), "target_tags": ("target",)},
            ['convert_tokens_to_ids(["<2de>"])', '*tokenizer.convert_tokens_to_ids(["<2en>"])]'],
        ),
        ({"source_tags": (), "target_tags": ()}, ["convert_tokens_to_ids([])"]),
    ],
)
def test_its_program_has_the_tags_of_languages(tmp_path, tags, lines):
    """Regression test: no model of many languages was told into which to translate."""
    cfg, _, tokenizers = experiment(tmp_path, both_directions=True, **tags)
    run = types.SimpleNamespace(config=cfg, tokenizers=tokenizers, languages=Languages(cfg.data, tokenizers))
    program = model_card._program("out", run, "AutoModelForSeq2SeqLM", "huggingface", "")
    compile(program, "README.md", "exec")
    assert all(line in program for line in lines)
    assert ("decoder_input_ids" in program) == bool(tags.get("target_tags"))
