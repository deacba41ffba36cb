"""The Python API, as used in a notebook."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tformer_jax as tj
from tests.helpers import assert_close, build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ParallelConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.runs.trained import Trained

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
DATA = {
    "seq2seq": DataConfig(source="cldr_translation", bucket_lengths=(8,)),
    "decoder_lm": DataConfig(source="stdlib_text", batching="windows", window=8),
    "classifier": DataConfig(source="cldr_language", bucket_lengths=(8,)),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, tj.Run]:
    """Runs of each family with random parameters."""
    return {family: run_of(Config(model=tiny(family), data=data)) for family, data in DATA.items()}


def run_of(cfg: Config) -> tj.Run:
    cfg = dataclasses.replace(cfg, decode=DecodeConfig(max_new_tokens=5), eval=EvalConfig(batch_size=2))
    model, params = build(cfg.model)
    return tj.Run(Path("runs/x"), cfg, model, params, Tokenizers(LETTERS, LETTERS), ("x", "y", "z"))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log_softmax of logits [T, V] in float64."""
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_importing_the_package_does_not_import_jax():
    code = "import sys, tformer_jax; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_translator(runs):
    run = runs["seq2seq"]
    first, second = run.translate(["abc", "cab"], beams=2)
    assert [run.translate(["abc"], beams=2), run.translate(["cab"], beams=2)] == [[first], [second]]
    (best, other), _ = run.outputs(["abc", "cab"], 2)
    assert best.text == first and best.score >= other.score
    assert run.config.model.family == "seq2seq"
    assert "encoder" in run.params


@pytest.fixture(scope="module")
def translator_of_many_languages():
    letters = LETTERS.extended(["<2de>", "<2en>", "<2fr>"])
    files = {"train": ("{src}-{tgt}",), "validation": ("{src}-{tgt}",), "bucket_lengths": (8,)}
    data = DataConfig(source="tsv", **files, directions=("en-de", "en-fr", "de-fr"), target_tags=("source", "target"))
    model = tiny("seq2seq", vocab_size=letters.vocab_size, source_vocab_size=letters.vocab_size)
    return dataclasses.replace(run_of(Config(model=model, data=data)), tokenizers=Tokenizers(letters, letters))


@pytest.mark.slow
def test_a_translator_of_many_languages(translator_of_many_languages):
    """Languages are given for all texts, for each, or by requests; scores do not count the tags of targets."""
    run = translator_of_many_languages
    letters = run.tokenizers.target
    assert (run.languages.sources, run.languages.targets) == (("en", "de"), ("de", "fr"))
    german, french = ({"to": to, "source_language": "en", "beams": 2} for to in ("German", "fr"))
    requests = [tj.Request("abc", "fr"), tj.Request("abc", source_language="de"), "abc"]
    actual = run.outputs(requests, 2, to="de", source_language="en")
    for outputs, options in zip(actual, (french, german | {"source_language": "de"}, german), strict=True):
        (alone,) = run.outputs(["abc"], 2, **options)
        assert [output.text for output in outputs] == [output.text for output in alone]
        scores = [output.score for output in outputs]
        assert scores == pytest.approx([output.score for output in alone], rel=1e-6)  # JAX 0.12 rounds otherwise
    each = run.translate(["abc", "abc"], to=["fr", "de"], source_language="en", beams=2)
    assert each == [outputs[0].text for outputs in (actual[0], actual[2])]
    pairs = [("abc", "ba"), (tj.Request("abc", "fr"), "ba")]
    scores, logits = (
        run.score(pairs, to="de", source_language="en"),
        run.logits([(tj.Request("abc", to, "en"), "ba") for to in ("de", "fr")]),
    )
    for scored, rows in zip(scores, logits, strict=True):
        assert (letters.decode(scored.tokens), len(scored.tokens), len(rows)) == ("ba", 3, 5)
        expected = log_softmax(rows[2:])[np.arange(3), scored.tokens]
        assert_close(np.array(scored.log_probabilities), expected, 1e-5)
    assert scores[0].total != scores[1].total


def test_languages_of_texts_that_are_missing(translator_of_many_languages):
    run = translator_of_many_languages
    with pytest.raises(UserError, match="to has 1 languages for 2 texts: name one for each, or one for all"):
        run.translate(["a", "b"], to=["de"])
    with pytest.raises(UserError, match="text 1: the target language is missing: name one of de, fr"):
        run.score([("a", "b")], source_language="en")


@pytest.mark.slow
def test_a_language_model(runs):
    run = runs["decoder_lm"]
    assert run.generate(["ab", "c"], temperature=2.0, seed=3) == run.generate(["ab", "c"], temperature=2.0, seed=3)
    assert len(run.outputs(["ab"], 3)[0]) == 3
    (longest,) = run.generate(["a"], max_new_tokens=2)
    assert len(longest) <= 2


def test_a_classifier(runs):
    run = runs["classifier"]
    actual = run.classify(["abc", "b"])
    for (label, probability), logits in zip(actual, run.logits(["abc", "b"]), strict=True):
        p = np.exp(log_softmax(logits))
        assert label == run.labels[p.argmax()]
        assert probability == pytest.approx(p.max(), rel=1e-5)


@pytest.mark.long
def test_scores_follow_from_the_logits(runs):
    lm, translator = runs["decoder_lm"], runs["seq2seq"]
    for run, example in ((lm, "abca"), (translator, ("abc", "cba"))):
        (scored,), (logits,) = run.score([example]), run.logits([example])
        expected = log_softmax(logits)[np.arange(len(scored.tokens)), scored.tokens]
        assert_close(np.array(scored.log_probabilities), expected, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("prefix_lm", [False, True])
def test_the_score_of_a_continuation_follows_from_the_logits(prefix_lm):
    """Rows of texts and of pairs are in one batch."""
    run = run_of(Config(model=tiny("decoder_lm", prefix_lm=prefix_lm), data=DATA["decoder_lm"]))
    examples = ["abcab", ("abc", "ab"), ("ab", "cabc"), ("abc", "")]
    for scored, logits, given in zip(run.score(examples), run.logits(examples), (1, 3, 2, 3), strict=True):
        rows = log_softmax(logits)[given - 1 :][: len(scored.tokens)]
        assert_close(scored.log_probabilities, rows[np.arange(len(rows)), scored.tokens], 1e-5)
    assert [LETTERS.decode(scored.tokens) for scored in run.score(examples)] == ["bcab", "ab", "cabc", ""]


def test_logits_do_not_depend_on_the_batch(runs):
    run, texts = runs["decoder_lm"], ["abca", "b", "cabbac"]
    for text, together in zip(texts, run.logits(texts), strict=True):
        assert_close(together, run.logits([text])[0], 1e-5)


CHAT = tj.Chat.read([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("family", "call", "problem"),
    [
        ("classifier", lambda run: run.translate(["a"]), "translate: .* holds a classifier model; use classify"),
        ("seq2seq", lambda run: run.generate(["a"]), "generate: .* holds a seq2seq model; use translate"),
        ("seq2seq", lambda run: run.translate("abc"), "'abc' is a single text: write a list of texts"),
        ("seq2seq", lambda run: run.translate(["a"], beam=2), "unknown setting 'decode.beam'; .* 'decode.beams'"),
        ("seq2seq", lambda run: run.translate(["a"], beams=2, top_k=1), "top_k is for sampling and beams for beam"),
        ("seq2seq", lambda run: run.outputs(["a"], 3, beams=2), "3 outputs need beams of at least 3"),
        ("seq2seq", lambda run: run.outputs(["a"], 0), "0 outputs per text: write an integer, at least 1"),
        ("seq2seq", lambda run: run.translate(["a"], seed=0.5), "seed=0.5: must be an integer from 0 to 4294967295"),
        ("seq2seq", lambda run: run.logits(["a"]), r"example 1 must be a pair \(source, target\)"),
        ("seq2seq", lambda run: run.score([("a", "b"), "a"]), r"example 2 must be a pair \(source, target\)"),
        ("classifier", lambda run: run.logits([("a", "b")]), "example 1 must be one text"),
        ("decoder_lm", lambda run: run.score([("a", "b", "c")]), r"example 1 must be one text or a pair \(prompt, c"),
        ("decoder_lm", lambda run: run.score("abc"), "'abc' is a single text: write a list of texts"),
        ("decoder_lm", lambda run: run.logits("abc"), "'abc' is a single text: write a list of texts"),
        ("decoder_lm", lambda run: run.watch("abc"), "'abc' is a single text: write a list of texts"),
        ("seq2seq", lambda run: run.translate(["a", None]), r"text 2 is None: it must be a text \(str\)"),
        ("decoder_lm", lambda run: run.generate([b"a"]), r"text 1 is b'a': it must be a text \(str\)"),
        ("classifier", lambda run: run.classify([float("nan")]), r"text 1 is nan: it must be a text \(str\)"),
        ("seq2seq", lambda run: run.score([("a", None)]), r"example 1 is \('a', None\): it must be a text \(str\) or"),
        ("decoder_lm", lambda run: run.generate(["a", "\ud800"]), "text 2 has a lone surrogate, which is not a char"),
        ("decoder_lm", lambda run: run.score(["a", "\ud800"]), "example 2 has a lone surrogate, which is not a char"),
        ("seq2seq", lambda run: run.score([(tj.Request("a", prefix="b"), "b")]), "text 1: has a prefix, which is for"),
        ("seq2seq", lambda run: run.score([tj.Request("a")]), r"example 1 is Request\(.*: it must be a text"),
        ("seq2seq", lambda run: run.score([CHAT], to="de"), r"example 1 is not a \(source, target\) pair, and only"),
        ("decoder_lm", lambda run: run.score(["a"], to="de"), r"example 1 is not a \(source, target\) pair, and only"),
        ("decoder_lm", lambda run: run.score([("a", "b")], to="de"), "example 1 has a Request or a language, which on"),
        ("decoder_lm", lambda run: run.logits([(tj.Request("a"), "b")]), "example 1 has a Request or a language, whic"),
        ("decoder_lm", lambda run: run.chat([{"role": "user", "content": "a"}]), "is a single conversation: write a l"),
        ("decoder_lm", lambda run: run.chat([[]]), "conversation 1 must be a list of messages, such as"),
        ("decoder_lm", lambda run: run.logits(["a", 5]), r"example 2 is 5: it must be a text \(str\) or several"),
        (
            "decoder_lm",
            lambda run: run.generate(["a" * 15], prefix="abc"),
            "text 1: decode.prefix='abc' has 3 tokens, but only 1 fit after the prompt: shorten one",
        ),
        ("decoder_lm", lambda run: run.generate(["a"], seed=-1), "seed=-1: must be an integer from 0 to 4294967295"),
        ("classifier", lambda run: run.embed(["a"], normalize="no"), "normalize is a str: pass True, False or None"),
        ("seq2seq", lambda run: run.translate(["a"], to=5), "to is an int: pass a language for all texts, or a list"),
        ("seq2seq", lambda run: run.translate(["a"], to=[5]), "a language of to is an int: pass a code or an English"),
        ("decoder_lm", lambda run: run.chat(5), "conversations is an int: pass a list of conversations, which are"),
        ("classifier", lambda run: run.embed(["a"], pooling="sum"), "pooling='sum': must be one of mean, first, last"),
        ("decoder_lm", lambda run: run.logits(["a" * 17]), "text 1 has 17 tokens, but the model takes at most 16"),
    ],
)  # fmt: skip
def test_mistakes(runs, family, call, problem):
    with pytest.raises(UserError, match=problem):
        call(runs[family])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"mesh": 5}, "mesh is an int: pass a text such as 'data=2,tensor=4', or None"),
        ({"step": "20"}, "step='20': must be the number of a step, such as 100, or None"),
        ({"step": True}, "step=True: must be the number of a step"),
        ({"step": 20.0}, "step=20.0: must be the number of a step"),
        ({"ensemble": 5}, "ensemble is an int: pass a list of run folders"),
        ({"ensemble": "runs/a"}, r"ensemble='runs/a': must be a list of run folders: write \['runs/a'\]"),
    ],
)
def test_arguments_of_load_that_have_another_type(tmp_path, given, problem):
    with pytest.raises(UserError, match=problem):
        tj.load(tmp_path, **given)


def test_a_mean_is_that_of_an_ensemble(tmp_path):
    """Regression test: without one, any value was accepted."""
    for mean, problem in (("log_probabilities", "is for an ensemble: pass"), ("sum", "must be 'probabilities' or")):
        with pytest.raises(UserError, match=f"mean='{mean}': {problem}"):
            tj.load(tmp_path, mean=mean)


def test_a_target_may_be_as_long_as_an_output(runs):
    """The model predicts no end after it; regression test: `attention.py` refused its own translations."""
    run = runs["seq2seq"]
    (logits,) = run.logits([("a", "b" * 16)])
    np.testing.assert_allclose(logits[:15], run.logits([("a", "b" * 15)])[0][:15], rtol=1e-4, atol=1e-5)
    assert len(logits) == 16
    with pytest.raises(UserError, match="text 1: the target has 17 tokens, but the model takes at most 16"):
        run.logits([("a", "b" * 17)])


def test_a_mesh_for_inference_need_not_divide_the_state_of_training(runs, monkeypatch):
    run = runs["decoder_lm"]
    cfg = dataclasses.replace(run.config, parallel=ParallelConfig(preset="zero1"))
    trained = Trained(cfg, run.model, run.params, run.tokenizers, None)
    monkeypatch.setattr(tj.api, "load_trained", lambda path, mesh, step: trained)
    assert tj.load("runs/x", mesh="data=3").config == cfg
    sentence = r"^runs/x does not fit the mesh 'tensor=3' \(model.num_heads=.*\): write other sizes$"
    with pytest.raises(UserError, match=sentence):  # regression test: it asked for another model, and named no mesh
        tj.load("runs/x", mesh="tensor=3")


def test_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        tj.load(tmp_path / "nothing")
