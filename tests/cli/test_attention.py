"""The command that shows what a model attends to: its page, its arrays, and mistakes in its flags."""

import base64
import gzip
import json
import re
import sys
import types
from html import unescape

import numpy as np
import pytest

import tformer_jax as tj
from tests.helpers import tiny
from tests.test_api import DATA, run_of
from tformer_jax.base.errors import UserError
from tformer_jax.cli import attention, attention_page, serve
from tformer_jax.config import Config
from tformer_jax.models import registry
from tformer_jax.report import attention as page_of_attention
from tformer_jax.report.attention import MEAN, ROLLOUT, visible


@pytest.fixture
def run(monkeypatch):
    """A translator with random parameters, which the command loads."""
    result = run_of(Config(model=tiny("seq2seq"), data=DATA["seq2seq"]))
    monkeypatch.setattr("tformer_jax.load", lambda path, **options: result)
    return result


def part(page: str, name: str) -> str:
    return re.search(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', page, re.DOTALL)[1]


def unpacked(page: str, name: str) -> bytes:
    return gzip.decompress(base64.b64decode(part(page, name)))


def test_the_page_has_the_weights_the_masks_and_the_predictions(run, tmp_path, capsys):
    path = tmp_path / "page.html"
    attention.main(["--run", "runs/x", "abc\tb<", "--head", "2", "--output", str(path)])
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text(encoding="utf-8")
    (actual,) = run.watch([("abc", "b<")])
    single = {single["name"]: single for single in json.loads(part(page, "data"))["attentions"]}["decoder"]
    assert single["queries"] == single["keys"] == ["<s>", "b", "<unk>"]
    assert single["heads"] == ["0", "1", "2", "3", MEAN, ROLLOUT]
    stored = np.frombuffer(unpacked(page, "weights-decoder"), "<u2").reshape(1, 6, 3, 3) / 65535
    np.testing.assert_allclose(stored[0, :4], actual.weights["decoder"][0], atol=1e-5)
    np.testing.assert_allclose(stored[0, 4], actual.weights["decoder"][0].mean(0), atol=1e-5)
    bits = np.unpackbits(np.frombuffer(unpacked(page, "mask-decoder"), np.uint8))
    assert bits[:9].reshape(3, 3).tolist() == np.tril(np.ones((3, 3), int)).tolist()
    assert '<option value="2" selected>2</option>' in page
    assert "<dd>b&lt;</dd>" in page
    texts = [run.tokenizers.target.decode([i]) if i > 3 else None for i in actual.predictions[-1, :, 0]]
    cells = re.findall(r'<td style="[^"]*" title="[^"]*"><code>(.*?)</code>', page, re.DOTALL)
    cells = cells[len(actual.predictions) - 1 :: len(actual.predictions)]
    assert [text for text in texts if text] == [
        unescape(cell) for cell, text in zip(cells, texts, strict=False) if text
    ]


def test_a_long_text_has_only_means_of_heads_or_is_refused(run, tmp_path, monkeypatch):
    """The maps of "abc" and "b<" have 4 x 4, 3 x 3 and 3 x 4 weights; a layer has 4 heads, their mean, a rollout."""
    path, arguments = tmp_path / "page.html", ["--run", "runs/x", "abc\tb<", "--output", str(tmp_path / "page.html")]
    monkeypatch.setattr(page_of_attention, "MAX_WEIGHTS", 37 * 6)
    attention.main(arguments)
    assert "All heads by layer" in path.read_text(encoding="utf-8")
    monkeypatch.setattr(page_of_attention, "MAX_WEIGHTS", 37 * 6 - 1)
    attention.main(arguments)
    page = path.read_text(encoding="utf-8")
    actual = {each["name"]: each["heads"] for each in json.loads(part(page, "data"))["attentions"]}
    assert actual == {"encoder": [MEAN, ROLLOUT], "decoder": [MEAN, ROLLOUT], "cross": [MEAN]}
    assert "only the means of the heads are shown" in page
    (watched,) = run.watch([("abc", "b<")])
    stored = np.frombuffer(unpacked(page, "weights-decoder"), "<u2").reshape(2, 3, 3) / 65535
    np.testing.assert_allclose(stored[0], watched.weights["decoder"][0].mean(0), atol=1e-5)
    with pytest.raises(UserError, match="--head 2: the page of 4 tokens has only means of heads"):
        attention.main([*arguments, "--head", "2"])
    monkeypatch.setattr(page_of_attention, "MAX_WEIGHTS", 37 * 2 - 1)
    monkeypatch.setattr(tj.Run, "watch", lambda *_: pytest.fail("the weights are computed before they are counted"))
    with pytest.raises(UserError, match="the text has 4 tokens, too many for a page: shorten it, or write arrays"):
        attention.main(arguments)


@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm"])
def test_the_server_renders_a_text_with_its_output(family, monkeypatch):
    run = run_of(Config(model=tiny(family), data=DATA[family]))
    monkeypatch.setattr(attention_page, "render_example", lambda example, computed: (example, computed))
    assert serve.attention_renderer(run)("abc", "cba") == (run, ("abc", "cba"))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert serve.attention_renderer(run) == 'the page of attention needs jinja2: pip install -e ".[report]"'


@pytest.mark.parametrize("settings", [{"attention": "gated_delta"}, {"layer_pattern": ("gated_delta", "full")}])
def test_the_server_says_that_a_recurrent_layer_has_no_attention_weights(settings):
    cfg = Config(model=tiny("decoder_lm", decoder_layers=2, position="none", **settings), data=DATA["decoder_lm"])
    actual = serve.attention_renderer(types.SimpleNamespace(config=cfg, model=registry.build(cfg.model)))
    assert actual == "layers with attention 'gated_delta' have no attention weights, but a recurrent state"


def test_a_translation_that_cannot_be_read_is_named(run, monkeypatch):
    """Incomplete characters of an output take more tokens when they are read again."""
    monkeypatch.setattr(type(run), "translate", lambda self, texts: ["\ufffd" * 500 for _ in texts])
    with pytest.raises(
        UserError, match="the translation '\ufffd{40}' cannot be read as a target .*: write a target of"
    ):
        attention_page.complete_examples(run, ["ab"])
    assert attention_page.complete_examples(run, ["ab\tc"]) == [("ab", "c")]


def test_a_text_of_a_prefix_lm_is_a_prompt():
    prefix_lm = types.SimpleNamespace(config=Config(model=tiny("decoder_lm", prefix_lm=True), data=DATA["decoder_lm"]))
    assert attention_page.complete_examples(prefix_lm, ["ab", "a\tbc"]) == [("ab", ""), ("a", "bc")]
    with pytest.raises(UserError, match="text 2 has 3 columns: write at most two, with a tab between them"):
        attention_page.complete_examples(prefix_lm, ["ab", "a\tb\tc"])


def test_arrays_of_a_file_equal_those_of_the_api(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tj.Run, "translate", lambda _, sources: [source[::-1] for source in sources])
    (tmp_path / "in.txt").write_text("abc\tcb\nab\n")
    path = tmp_path / "out.npz"
    attention.main(["--run", "runs/x", "--batch", str(tmp_path / "in.txt"), "--npz", str(path)])
    arrays = np.load(path)
    examples = [("abc", "cb"), ("ab", "ba")]
    for number, actual in enumerate(run.watch(examples)):
        for kind in ("encoder", "decoder", "cross"):
            np.testing.assert_array_equal(arrays[f"{number}/weights/{kind}"], actual.weights[kind])
            np.testing.assert_array_equal(arrays[f"{number}/masks/{kind}"], actual.masks[kind])
        np.testing.assert_array_equal(arrays[f"{number}/predictions"], actual.predictions)
    assert arrays["0/texts/source"].tolist() == ["a", "b", "c", "</s>"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_head_that_aligns_best_is_recorded(run, tmp_path, monkeypatch, capsys):
    object.__setattr__(run, "path", tmp_path)
    pairs, links = tmp_path / "pairs.tsv", tmp_path / "links"
    pairs.write_text("ab c\tc b\na b\tb\n")
    links.write_text("0-1 1-0\n1-0\n")
    attention.main(["--run", "runs/x", "--batch", str(pairs), "--links", str(links)])
    *heads, path = capsys.readouterr().out.splitlines()
    assert len(heads) == 10
    assert re.fullmatch(
        r"alignment error rate 0\.\d{3}: layer 0, (head \d|mean of the heads), read where it (reads|predicts) a token",
        heads[0],
    )
    recorded = json.loads((tmp_path / "alignment.json").read_text())
    assert path == str(tmp_path / "alignment.json")
    assert {"layer", "head", "query", "error_rate", "pairs", "links"} == {*recorded}
    assert f"{recorded['error_rate']:.3f}" in heads[0]
    links.write_text("0-1 1-0\n9-9\n")
    with pytest.raises(UserError, match="links, line 2: link 9-9: .* and its target have . and . words"):
        attention.main(["--run", "runs/x", "--batch", str(pairs), "--links", str(links)])
    links.write_text("0-1\n")
    with pytest.raises(UserError, match="links has 1 line for 2 pairs: write one for each"):
        attention.main(["--run", "runs/x", "--batch", str(pairs), "--links", str(links)])
    pairs.write_text("ab c\n")
    with pytest.raises(UserError, match="--links needs a translation model, and source<tab>target in each line"):
        attention.main(["--run", "runs/x", "--batch", str(pairs), "--links", str(links)])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "write one text, or name a file of texts with --batch"),
        (["a", "--batch", "in.txt", "--npz", "x"], "write one text, or name a file"),
        (["--batch", "in.txt"], "--batch needs --npz FILE"),
        (["--batch", "in.txt", "--npz", "x", "--layer", "0"], "--layer is for the page of one text"),
        (["a\tb", "--links", "x"], "--links needs --batch FILE with source<tab>target in each line"),
        (["a\tb", "--layer", "1"], "--layer 1: the model has layers 0 to 0"),
        (["a\tb", "--head", "4"], "--head 4: the model has heads 0 to 3"),
        (["a\tb", "--output", "."], "--output .: cannot be written, because it is a folder; name a file"),
        (["a\tb", "--output", "x", "--npz", "./x"], "--npz x: is the page's file; name another file for the arrays"),
        (["\tb"], "the text is empty: write at least one character"),
        (["a" * 17], "text 1 has 17 tokens|the source has 17 tokens"),
    ],
)
def test_mistakes(run, arguments, problem):
    with pytest.raises(UserError, match=problem):
        attention.main(["--run", "runs/x", *arguments])


@pytest.mark.parametrize("flag", ["--output", "--npz"])
def test_a_path_that_cannot_be_written_is_reported_before_the_run_is_loaded(flag, monkeypatch):
    monkeypatch.setattr(attention_page, "load_run", lambda *_: pytest.fail("the run was loaded"))
    with pytest.raises(UserError, match=f"{flag} .: cannot be written, because it is a folder; name a file"):
        attention.main(["--run", "runs/x", "a", flag, "."])


def test_every_token_is_visible():
    assert [visible(text) for text in (" a", "\n", "")] == ["▁a", "⏎", "∅"]


def test_the_arrays_do_not_replace_the_texts(tmp_path):
    texts = tmp_path / "in.txt"
    texts.write_text("abc\tb\n")
    with pytest.raises(UserError, match="in.txt is both --batch and --npz: name another file for the arrays"):
        attention.main(["--run", "runs/x", "--batch", str(texts), "--npz", str(texts)])
    assert texts.read_text() == "abc\tb\n"
