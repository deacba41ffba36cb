"""The pages that explain mechanisms: their numbers, shapes and sources, and the tests that they name."""

import ast
import inspect
import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests import oracles, position_oracles
from tformer_jax.base.errors import UserError
from tformer_jax.lab.commands import explain
from tformer_jax.lab.explain import page
from tformer_jax.lab.explain.mathml import formula, fraction
from tformer_jax.lab.explain.search import SMOOTHING
from tformer_jax.lab.explain.topic import CFG, Example, Heat, vectors
from tformer_jax.nn.norms import layer_norm

TESTS = Path(__file__).resolve().parents[1]
EXAMPLE = Example.from_text("the cat saw the <b>", "le chat vit")


@pytest.fixture(scope="module")
def topics():
    return {name: topic for group in page.build_topics(EXAMPLE).values() for name, topic in group.items()}


def figure(topic, title: str):
    (actual,) = (each for each in topic.figures if each.title.startswith(title))
    return actual


@pytest.mark.long
def test_every_topic_has_all_its_parts(topics):
    assert set(topics) == set(page.TOPICS)
    for name, topic in topics.items():
        assert topic.formulas and topic.shapes and topic.functions and topic.figures and topic.mistakes, name
        for each in topic.formulas:
            ElementTree.fromstring(each)
        sizes: dict[str, set[int]] = {}
        for shape in topic.shapes:
            letters = shape.letters.split()
            assert len(letters) == len(shape.sizes), (name, shape)
            for letter, size in zip(letters, shape.sizes, strict=True):
                assert letter == "1" or letter.removesuffix("/2") in page.LETTERS, (name, shape)
                sizes.setdefault(letter, set()).add(size)
        assert all(len(actual) == 1 for actual in sizes.values()), (name, sizes)


def test_sources_are_those_of_the_functions(topics):
    shown = dict(topics["norms"].sources())
    assert shown["tformer_jax.nn.norms.layer_norm"] == inspect.getsource(layer_norm.__wrapped__).strip()
    for topic in topics.values():
        for _, source in topic.sources():
            assert isinstance(ast.parse(source).body[0], ast.FunctionDef | ast.ClassDef)


def test_the_named_tests_exist(topics):
    names = {mistake.test for topic in topics.values() for mistake in topic.mistakes}
    for name in names:
        path, test = name.split("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert test in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, name


def test_attention_equals_numpy(topics):
    x = np.float64(EXAMPLE.x[0])
    for title, scale in (("Weights of the sentence", CFG.dim**-0.5), ("The same without", 1.0)):
        weights = figure(topics["dot-product"], title).values
        np.testing.assert_allclose(weights, oracles.softmax(scale * x @ x.T), atol=1e-5)
    causal = topics["masks"].figures[0].values
    np.testing.assert_array_equal(~np.isnan(causal), np.tri(len(x), dtype=bool))
    alone = figure(topics["masks"], "A query without keys").values
    seen = np.tri(len(x), dtype=bool) & (np.arange(len(x)) > 0)
    scores = np.where(seen, np.exp(x @ x.T / np.sqrt(CFG.dim)), 0)
    np.testing.assert_allclose(alone, scores / np.maximum(scores.sum(1, keepdims=True), 1e-300), atol=1e-5)


def test_positions_equal_numpy(topics):
    T = len(EXAMPLE.source)
    encodings = figure(topics["sinusoids"], "Encoding").values
    np.testing.assert_allclose(encodings, [position_oracles.sinusoid(p, CFG.dim) for p in range(T)], atol=1e-6)
    shifted = figure(topics["sinusoids"], "PE(p + 3)").values
    np.testing.assert_allclose(shifted, [position_oracles.sinusoid(p + 3, CFG.dim) for p in range(T)], atol=1e-5)
    bias = position_oracles.alibi_bias(CFG.num_heads, T, T)
    weights = oracles.softmax(np.where(np.tri(T, dtype=bool), bias[0], -np.inf))
    actual = figure(topics["alibi"], "Weights of head 0").values
    np.testing.assert_allclose(np.nan_to_num(actual), weights, atol=1e-6)
    table = figure(topics["t5-buckets"], "Buckets of the sentence").values
    expected = [[position_oracles.relative_bucket(s - t, 16, 32, True) for s in range(T)] for t in range(T)]
    np.testing.assert_array_equal(table, expected)
    scores = figure(topics["rope"], "Scores of one word").values
    for offset in range(T):
        assert np.ptp(np.diagonal(scores, offset)) < 1e-5


def test_layers_equal_numpy(topics):
    (x, normal, rms) = (figure(topics["norms"], name).values for name in ("input", "LayerNorm", "RMSNorm"))
    ones = np.ones(CFG.dim)
    np.testing.assert_allclose(normal, oracles.layer_norm(np.float64(x), ones, 0 * ones, 1e-5), atol=1e-5)
    np.testing.assert_allclose(rms, oracles.rms_norm(np.float64(x), ones, 1e-5), atol=1e-5)
    weights = figure(topics["experts"], "Weights of the chosen").values
    np.testing.assert_allclose(np.nansum(weights, axis=1), 1, atol=1e-6)
    assert (~np.isnan(weights)).sum(axis=1).tolist() == [2] * len(EXAMPLE.source)
    logits = EXAMPLE.x[0] @ (vectors([f"expert {e}" for e in range(4)], CFG.dim).T / 4)
    p = oracles.softmax(np.float64(logits))
    p[p < np.sort(p, axis=1)[:, -2:-1]] = np.nan
    np.testing.assert_allclose(weights, p / np.nansum(p, axis=1, keepdims=True), atol=1e-6)


def test_the_loss_equals_its_formula(topics):
    right, _, mistaken = figure(topics["teacher-forcing"], "Loss by").curves
    V = 4 + len(set(EXAMPLE.target))
    np.testing.assert_allclose(right.y, np.log1p((V - 1) * np.exp(-np.float64(right.x))), atol=1e-5)
    assert mistaken.name == "probabilities, by mistake"
    assert min(mistaken.y) > np.log(1 + (V - 1) / np.e)
    read = figure(topics["teacher-forcing"], "What each position")
    assert read.rows == ["0 → le", "1 → chat", "2 → vit", "3 → </s>"]
    assert read.texts[3] == ["<s>", "le", "chat", "vit"]


def test_scores_of_beams_equal_the_counts_of_words(topics):
    words = ["<s>", *EXAMPLE.source, "</s>"]
    V = 3 + len(set(EXAMPLE.source))  # <unk> is excluded

    def log_p(word: str, following: str) -> float:
        pairs = list(itertools.pairwise(words))
        count = pairs.count((word, following))
        return np.log((count + SMOOTHING) / (sum(first == word for first, _ in pairs) + V * SMOOTHING))

    scores = figure(topics["beams"], "Scores")
    for row, (total, _, mean) in zip(scores.rows, scores.values, strict=True):
        output = row.split()
        expected = sum(log_p(*pair) for pair in zip(["<s>", *output], output, strict=False))
        np.testing.assert_allclose([total, mean], [expected, expected / len(output)], rtol=1e-5)
    assert scores.values[:, 2].tolist() == sorted(scores.values[:, 2], reverse=True)


def test_slots_hold_the_words(topics):
    dense, ring = topics["kv-cache"].figures[:2]
    assert dense.texts[-1] == list(EXAMPLE.source)
    assert ring.texts[-1] == ["<", "b", ">", "the"]
    pool = topics["paged-cache"].figures[0]
    assert pool.texts[0] == list(EXAMPLE.source[:4])


@pytest.mark.long
def test_the_page_is_complete_and_needs_no_network(topics):
    text = page.render_topics({"All": topics}, EXAMPLE, "python scripts/explain.py --text 'x'")
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    places = [int(number) for number in re.findall(r'data-figure="(\d+)"', text)]
    assert places == list(range(len(data["figures"])))
    assert data["figures"][0]["y"] == list(EXAMPLE.source)
    assert "<dd>the cat saw the &lt; b &gt;</dd>" in text


def test_tokens_of_a_text():
    assert Example.from_text("It's 3.5 km, 你好!").source == ("It", "'", "s", "3", ".", "5", "km", ",", "你", "好", "!")
    assert Example.from_text("a b c").target == ("c", "b", "a")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--text", "one"], "--text: write 2 to 32 tokens .*, not 1$"),
        (["--text", "a b", "--target", "x " * 33], "--target: write 2 to 32 tokens .*, not 33$"),
        (["ropes"], "unknown topic 'ropes': write one or more of dot-product, heads, "),
    ],
)
def test_mistakes_on_the_command_line(arguments, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        explain.main([*arguments, "--output", str(tmp_path / "page.html")])


def test_a_page_that_cannot_be_written_is_reported_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr(explain, "load_run", lambda *_: pytest.fail("the run was loaded"))
    with pytest.raises(UserError, match="--output .: cannot be written, because it is a folder; name a file"):
        explain.main(["--run", "runs/x", "--output", "."])


def test_the_command_writes_the_chosen_topics(tmp_path, capsys):
    path = tmp_path / "page.html"
    explain.main(["alibi", "--text", "two words", "--target", "zwei Wörter", "--output", str(path)])
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text(encoding="utf-8")
    assert re.findall(r'<article id="([^"]*)"', text) == ["alibi"]
    assert "python scripts/explain.py alibi --text &#39;two words&#39; --target &#39;zwei Wörter&#39;" in text


def test_a_formula_by_hand():
    assert formula("a_i", fraction("1", "x^2")) == (
        '<math display="block"><mrow><msub><mi>a</mi><mrow><mi>i</mi></mrow></msub><mfrac><mrow><mn>1</mn></mrow>'
        "<mrow><msup><mi>x</mi><mrow><mn>2</mn></mrow></msup></mrow></mfrac></mrow></math>"
    )


def test_numbers_that_are_hidden_are_left_out():
    heat = Heat("", np.array([[1.0, np.nan]]), ["r"], ["a", "b"])
    assert heat.data()["z"] == [[1.0, None]]
    assert heat.table() == (["", "a", "b"], [["r", "1", ""]])
