"""The decoding flags are derived from the settings, and select the strategy."""

import argparse
import dataclasses
from pathlib import Path

import pytest

import tformer_jax as tj
from tests.helpers import tiny
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, generation
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.config.fields import flag, setting

DATA = {
    "seq2seq": DataConfig(source="cldr_translation", bucket_lengths=(8,)),
    "decoder_lm": DataConfig(source="stdlib_text", batching="windows", window=8),
}


def parse(*flags: str, family: str = "seq2seq") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generation.add_flags(parser, "--n-best" if family == "seq2seq" else "--samples")
    return parser.parse_args(flags)


def chosen(*flags: str, saved: DecodeConfig | None = None, family: str = "seq2seq") -> DecodeConfig:
    """Returns the settings of a run with settings `saved` and these flags."""
    cfg = Config(model=tiny(family), data=DATA[family], decode=saved or DecodeConfig())
    run = tj.Run(Path("runs/x"), cfg, None, None, None, None)
    options = parse(*flags, family=family)
    return run.decoding(generation.given_settings(options), options.outputs, flag)


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_has_a_flag_and_its_opposite(value):
    saved = DecodeConfig(strategy="beam", renormalize=not value)
    assert chosen("--renormalize" if value else "--no-renormalize", saved=saved).renormalize is value
    assert chosen(saved=saved) == saved


def test_every_setting_has_a_flag_with_its_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # no line is wrapped
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(DecodeConfig):
        assert flag(field.name) in shown
        assert field.metadata["meaning"] in shown


def test_defaults_are_the_settings_of_the_run():
    for saved in (DecodeConfig(), DecodeConfig(strategy="beam", beams=3), DecodeConfig(strategy="sample", top_k=5)):
        assert chosen(saved=saved) == saved


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--beams", "3"], {"strategy": "beam", "beams": 3}),
        (["--length-penalty", "gnmt", "--length-alpha", "0.6"], {"strategy": "beam", "length_alpha": 0.6}),
        (["--top-k", "3", "--temperature", "2"], {"strategy": "sample", "top_k": 3, "temperature": 2.0}),
        (["--top-p", "0.5"], {"strategy": "sample", "top_p": 0.5}),
        (["--max-new-tokens", "7"], {"strategy": "greedy", "max_new_tokens": 7}),
        (["--n-best", "5"], {"strategy": "beam", "beams": 5}),
        (["--n-best", "5", "--beams", "6"], {"strategy": "beam", "beams": 6}),
        (["--n-best", "5", "--temperature", "2"], {"strategy": "sample", "temperature": 2.0}),
        (["--strategy", "beam"], {"strategy": "beam", "beams": 4}),
        (["--strategy", "sample", "--n-best", "5"], {"strategy": "sample"}),
        (["--temperature", "0"], {"strategy": "greedy", "temperature": 1.0}),
        (["--temperature", "0", "--top-p", "0.5"], {"strategy": "greedy"}),
    ],
)
def test_flags_select_the_strategy(flags, settings):
    actual = dataclasses.asdict(chosen(*flags))
    assert {name: actual[name] for name in settings} == settings


def test_several_outputs_are_sampled_unless_beams_are_given():
    assert chosen("--samples", "3", family="decoder_lm").strategy == "sample"
    assert chosen("--samples", "3", "--beams", "3", family="decoder_lm").strategy == "beam"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--top-k", "3", "--beams", "2"], "--top-k is for sampling and --beams for beam search: write one of them"),
        (["--n-best", "3", "--beams", "2"], "3 outputs need --beams of at least 3"),
        (["--length-penalty", "gnm"], r"decode.length_penalty='gnm': is not a known value; did you mean 'gnmt'"),
        (["--strategy", "greedy", "--top-k", "2"], "--top-k needs --strategy sample, but it is greedy"),
        (["--strategy", "sample", "--beams", "2"], "--beams needs --strategy beam, but it is sample"),
        (["--strategy", "beem"], r"decode.strategy='beem': is not a known value; did you mean 'beam'"),
        (["--n-best", "2", "--temperature", "0"], "greedy decoding has one output, not 2"),
        (["--strategy", "beam", "--temperature", "0"], "--temperature needs --strategy sample, but it is beam"),
        (["--beams", "2", "--strategy", "beam", "--temperature", "0"], "--temperature is for sampling and --beams for"),
        (["--temperature", "inf"], r"decode.temperature=inf: must be a finite number"),
        (["--length-alpha", "nan"], r"decode.length_alpha=nan: must be a finite number"),
        (["--top-p", "2"], r"decode.top_p=2.0: must be at most 1"),
    ],
)
def test_mistakes(flags, problem):
    with pytest.raises(UserError, match=problem):
        chosen(*flags)


@pytest.mark.parametrize("objective", [None, "span_corruption"])
def test_the_loss_of_a_pretrained_model_does_not_depend_on_decoding(objective):
    data = DATA["seq2seq"]
    if objective:
        data = DataConfig(source="text", train="a.txt", batching="windows", window=8, objective=objective)
    run = tj.Run(Path("runs/x"), Config(model=tiny("seq2seq"), data=data), None, None, None, None)
    if objective is None:
        assert evaluate.change_decoding(run, {"beams": 3}).decode.beams == 3
        return
    with pytest.raises(UserError, match="--beams changes no metric of a run with data.objective='span_corrupt"):
        evaluate.change_decoding(run, {"beams": 3})


def test_settings_of_any_type_become_flags(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class More(DecodeConfig):
        forbidden: tuple[str, ...] = setting((), "texts that are 100 % excluded")
        min_p: float | None = setting(None, "a floor", used_by={"strategy": ("sample",)})

    monkeypatch.setattr(generation, "DecodeConfig", More)
    actual = chosen("--forbidden", "a b", "--forbidden", "c", "--min-p", "0.1", saved=More())
    assert actual == More(strategy="sample", forbidden=("a b", "c"), min_p=0.1)
