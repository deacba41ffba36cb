"""The figures that `scripts/explain.py --run` computes with a trained run."""

import dataclasses
import json

import numpy as np
import pytest

import tformer_jax as tj
from tests.helpers import tiny
from tests.report.folders import write_run
from tests.test_api import DATA, run_of
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DecodeConfig
from tformer_jax.lab.commands import explain
from tformer_jax.lab.explain import page
from tformer_jax.lab.explain.trained import default_text, search_outputs, trained_example


@pytest.fixture(scope="module")
def run():
    """A translator with random parameters."""
    return run_of(Config(model=tiny("seq2seq"), data=DATA["seq2seq"]))


@pytest.fixture(scope="module")
def computed(run):
    return trained_example(run, "abc", "bca")


def figures(computed, name: str):
    example, trained = computed
    return {each.title: each for each in trained.add({name: page.TOPICS[name](example)})[name].figures}


@pytest.mark.long
def test_tokens_are_those_of_the_run(computed):
    example, _ = computed
    assert example.source == ("a", "b", "c")
    assert example.target == ("b", "c", "a")


@pytest.mark.long
def test_attention_is_that_of_the_last_layer(run, computed):
    (actual,) = run.watch([("abc", "bca")])
    name = run.path.name
    shown = figures(computed, "heads")
    assert list(shown)[: actual.weights["encoder"].shape[1]] == [f"Head {n} of {name}" for n in range(4)]
    np.testing.assert_array_equal(shown[f"Head 2 of {name}"].values, actual.weights["encoder"][-1, 2])
    cross = figures(computed, "encoder-decoder")[f"Cross-attention of {name}"]
    np.testing.assert_allclose(cross.values.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(cross.values, actual.weights["cross"][-1].mean(axis=0))
    assert (cross.rows, cross.columns) == (["<s>", "b", "c", "a"], ["a", "b", "c", "</s>"])
    stream = figures(computed, "placement")[f"Norms of the residual stream of {name}, decoder"]
    np.testing.assert_allclose(stream.values, actual.norms["decoder"], rtol=1e-3)


def test_sums_of_outputs_are_their_log_probabilities(run, computed):
    shown = figures(computed, "beams")
    lines, scores, *_ = shown.values()
    assert len(lines.curves) > 1
    for curve, row in zip(lines.curves, scores.values, strict=True):
        length = len(curve.x) - 1
        np.testing.assert_allclose(row, curve.y[-1] / length ** np.array([0, 0.6, 1]), rtol=1e-5)
        text = curve.name.removesuffix("</s>")
        if curve.name.endswith("</s>") and "<" not in text:
            (scored,) = run.score([("abc", text)])
            assert curve.y[-1] == pytest.approx(scored.total, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_lm", [True, False])
def test_outputs_of_a_language_model_have_the_scores_of_its_beam_search(prefix_lm):
    """With a run whose shortest output is longer than those of the figures."""
    model = tiny("decoder_lm", prefix_lm=prefix_lm, max_length=32, decoder_layers=2)
    language_model = run_of(Config(model=model, data=DATA["decoder_lm"]))
    decode = DecodeConfig(max_new_tokens=20, min_new_tokens=10, length_penalty="average", length_alpha=1.0)
    changed = dataclasses.replace(language_model.config, decode=decode)
    language_model = dataclasses.replace(language_model, config=changed)
    settings = {"strategy": "beam", "beams": 3, "max_new_tokens": 6, "min_new_tokens": 6}
    (actual,) = language_model.outputs(["abca"], 3, **settings)
    texts = {each.text: 6 * each.score for each in actual if each.text.strip()}
    shown = search_outputs(language_model, "abca")
    assert len(shown) == len(texts) > 1
    for (_, scored), total in zip(shown, texts.values(), strict=True):
        assert scored.total == pytest.approx(total, rel=1e-4)
        assert len(scored.tokens) == 6
    _, trained = trained_example(language_model, "abca", None)
    (wanted,) = language_model.watch([("abca", "") if prefix_lm else "abca"])
    np.testing.assert_array_equal(trained.watched.weights["decoder"], wanted.weights["decoder"])
    assert bool((np.triu(trained.watched.weights["decoder"], 1) > 0).any()) == prefix_lm


def test_topics_without_a_part_of_the_run_are_unchanged(computed):
    example, trained = computed
    topic = page.TOPICS["alibi"](example)
    assert trained.add({"alibi": topic}) == {"alibi": topic}


def test_the_command_names_the_run(run, monkeypatch, tmp_path):
    monkeypatch.setattr("tformer_jax.load", lambda path, **options: run)
    path = tmp_path / "page.html"
    explain.main(["encoder-decoder", "--run", "runs/x", "--text", "abc", "--target", "bca", "--output", str(path)])
    text = path.read_text(encoding="utf-8")
    assert "python scripts/explain.py encoder-decoder --run runs/x --text abc" in text
    assert f"with random weights, or with those of {run.path.name} where the title names it" in text


def test_the_default_text_has_few_tokens(run, tmp_path):
    folder = write_run(tmp_path / "run")
    outputs = folder / "outputs" / "test.json"
    actual = json.loads(outputs.read_text())
    actual["outputs"][3]["source"] = "a short one"
    outputs.write_text(json.dumps(actual))
    assert default_text(dataclasses.replace(run, path=folder), explain.TEXT) == "a short one"
    outputs.unlink()
    (folder / "outputs" / "validation.json").unlink()
    for max_length, text in ((32, "The cat sat on the mat because"), (16, "The cat sat on")):
        cfg = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, max_length=max_length))
        assert default_text(dataclasses.replace(run, path=folder, config=cfg), explain.TEXT) == text


def test_a_text_without_enough_tokens(run):
    with pytest.raises(UserError, match=r"--text: write 2 to 32 tokens \(of the run's tokenizer\), not 1$"):
        trained_example(run, " ", None)


def test_a_translation_without_enough_tokens(run, monkeypatch):
    monkeypatch.setattr(tj.Run, "translate", lambda *_: ["b"])
    problem = "^--target, in place of the run's translation 'b': write 2 to 32 tokens .*, not 1$"
    with pytest.raises(UserError, match=problem):
        trained_example(run, "abc", None)
    with pytest.raises(UserError, match="^--target: write 2 to 32 tokens .*, not 1$"):
        trained_example(run, "abc", "b")
