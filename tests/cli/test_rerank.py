"""What rerank.py chooses, against sacreBLEU's scores of one pair at a time, and against score.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

import tformer_jax as tj
from tests.cli.finished_runs import finish
from tformer_jax.base.errors import UserError
from tformer_jax.cli import rerank
from tformer_jax.config import DataConfig

TEXTS = ["eins", "zwei", "drei"]
REFERENCES = ["the cat sat on the mat", "a dog ran home", "we eat"]
FIRST = [
    ["the cat sat", "the cat sat on a mat", "the cat sat"],
    ["dog", "a dog ran", "dog ran home"],
    ["we", "eat", ""],
]
SECOND = [["a cat sat", "the cat sat", "cats"], ["a dog home", "dog", "dogs ran"], ["we eat", "we eat it", "we"]]


def write(path: Path, outputs, **columns) -> str:
    rows = [
        dict(zip(("text", "outputs", *columns), row, strict=True))
        for row in zip(TEXTS, outputs, *columns.values(), strict=True)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def nbest(tmp_path) -> list[str]:
    scores = [[-1.0, -2.0, -3.0]] * 3
    others = [[1.0, 5.0, 1.0], [2.0, 3.0, 9.0], [0.0, 1.0, -1.0]]
    return [
        write(tmp_path / "a.jsonl", FIRST, scores=scores, other=others),
        write(tmp_path / "b.jsonl", SECOND, scores=[[-4.0, -5.0, -0.5]] * 3, other=others),
    ]


def best_by(similarity, rows):
    return [max(row, key=lambda text: np.mean([similarity(text, other) for other in row])) for row in rows]


@pytest.mark.parametrize(
    ("metric", "similarity"),
    [
        ("chrf", lambda text, other: sacrebleu.CHRF().sentence_score(text, [other]).score),
        ("ter", lambda text, other: -sacrebleu.TER().sentence_score(text, [other]).score),
    ],
)
def test_the_outputs_of_several_lists_have_the_least_expected_risk(nbest, capsys, metric, similarity):
    rerank.main([*nbest, "--metric", metric])
    pooled = [first + second for first, second in zip(FIRST, SECOND, strict=True)]
    assert capsys.readouterr().out.splitlines() == best_by(similarity, pooled)
    rerank.main([nbest[1], "--metric", metric])
    assert capsys.readouterr().out.splitlines() == best_by(similarity, SECOND)


def test_tuned_weights_are_stored_and_applied(nbest, tmp_path, capsys):
    weights, references, output = (tmp_path / name for name in ("weights.json", "references.txt", "best.jsonl"))
    references.write_text("".join(f"{text}\n" for text in REFERENCES))
    features = ["--feature", "scores", "--feature", "length", "--feature", "other", "--feature", "risk"]
    rerank.main([*nbest, *features, "--metric", "bleu", "--tune", str(weights), "--references", str(references)])
    saved, told = json.loads(weights.read_text()), capsys.readouterr()
    assert not told.out
    assert list(saved["weights"]) == ["scores", "length", "other", "risk"]
    assert f"bleu {saved['scores']['tuned']:.2f}  tuned\n" in told.err
    assert "BLEU splits words as in English" in told.err
    rerank.main([*nbest, "--weights", str(weights), "--output", str(output)])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    chosen = [record["output"] for record in records]
    actual = {"tuned": sacrebleu.BLEU().corpus_score(chosen, [REFERENCES]).score}
    for name in ("scores", "length", "other", "risk"):
        rerank.main([*nbest, "--feature", name])
        alone = capsys.readouterr().out.splitlines()
        actual[name] = sacrebleu.BLEU().corpus_score(alone, [REFERENCES]).score
        assert actual[name] <= actual["tuned"]
    assert saved["scores"] | {"risk": 0} == pytest.approx(actual | {"risk": 0})  # here chosen by chrF, there by BLEU
    assert records[0]["features"]["length"] == len(chosen[0])
    assert records[1]["text"] == "zwei"
    rerank.main([*nbest, "--weights", str(weights), "--metric", "bleu", "--language", "en"])
    told = capsys.readouterr()
    assert told.out.splitlines() == chosen and not told.err
    for flags, tuned in ((["--metric", "ter"], "bleu"), (["--language", "de"], "en")):
        with pytest.raises(UserError, match=f"{flags[0]} {flags[1]}: the weights of .* were tuned with {tuned}: leave"):
            rerank.main([*nbest, "--weights", str(weights), *flags])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--feature", "scores", "--feature", "length"], "several features need weights: tune them by --tune FILE"),
        (["--feature", "lm"], "--feature lm: must be forward=RUN, reverse=RUN, lm=RUN, length, risk, or the name"),
        (["--feature", "absent"], "--feature absent: no output has this field; correct the name, or leave it out"),
        (["--tune", "w.json"], "--tune FILE and --references FILE belong together"),
        (["--feature", "risk", "--weights", "w.json"], "--weights names the features, too: leave out --feature"),
    ],
)
def test_mistakes_are_told(nbest, flags, problem):
    with pytest.raises(UserError, match=problem):
        rerank.main([nbest[0], *flags])


@pytest.mark.parametrize("content", [{}, {"weights": {}}, {"weights": {"length": "a"}}, {"weights": {"length": True}}])
def test_weights_are_numbers_by_feature(nbest, tmp_path, content):
    weights = tmp_path / "weights.json"
    weights.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"weights.json has no numbers by feature in 'weights': make it by --tune"):
        rerank.main([*nbest, "--weights", str(weights)])


def test_a_misspelled_field_of_single_outputs_is_named(tmp_path):
    """Regression test: it was 0 for each text with one distinct output."""
    own = write(tmp_path / "own.jsonl", [["a"], ["b"], ["c"]], good=[[1.0], [2.0], [3.0]])
    with pytest.raises(UserError, match="--feature god: no output has this field"):
        rerank.main([own, "--feature", "god"])


def test_truth_values_are_no_numbers(tmp_path):
    own = write(tmp_path / "own.jsonl", FIRST, ok=[[True] * len(texts) for texts in FIRST])
    with pytest.raises(UserError, match=r"own.jsonl, line 1: has no number for each output in the field 'ok'"):
        rerank.main([own, "--feature", "ok"])


def test_files_that_are_read_are_not_overwritten(nbest, tmp_path):
    """Regression test: they were, without a word."""
    references = tmp_path / "references.txt"
    references.write_text("\n".join(REFERENCES))
    tuning = ["--feature", "scores", "--tune", str(references), "--references", str(references)]
    for flags, flag in ((["--output", nbest[0]], "--output"), (tuning, "--tune")):
        with pytest.raises(UserError, match=f"{flag} .* is read, too: name another file"):
            rerank.main([*nbest, *flags])
    assert references.read_text() == "\n".join(REFERENCES)


def test_fields_of_results_are_reserved(nbest, tmp_path):
    """Regression test: they were replaced, without a word."""
    own = write(tmp_path / "own.jsonl", FIRST, features=["mine"] * 3)
    with pytest.raises(UserError, match=r"own\.jsonl, line 1: .*'features'"):
        rerank.main([own, "--feature", "length", "--output", str(tmp_path / "best.jsonl")])
    rerank.main([nbest[0], own, "--feature", "length", "--output", str(tmp_path / "best.jsonl")])
    assert (tmp_path / "best.jsonl").read_text().count('"features"') == 3


def test_the_list_without_a_number_is_named(nbest, tmp_path):
    """Regression test: another list was."""
    damaged = write(tmp_path / "damaged.jsonl", FIRST, scores=[[-1.0, -2.0, -3.0]] * 2 + [[-1.5, None, -3.0]])
    with pytest.raises(UserError, match=r"damaged\.jsonl, line 3: has no number for each output in the field 'scores'"):
        rerank.main([damaged, nbest[1], "--feature", "scores"])


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("nosuch", "--metric nosuch is not known: name the module that registers it by --import"),
        ("command", "--metric command needs a program: write --metric-command COMMAND"),
        ("spbleu", "--metric spbleu needs the file of its model, which this command does not take"),
    ],
)
def test_metrics_that_lack_something(nbest, metric, problem):
    with pytest.raises(UserError, match=problem):
        rerank.main([*nbest, "--metric", metric])


def test_lists_of_other_texts_are_refused(nbest, tmp_path):
    (tmp_path / "short.jsonl").write_text(Path(nbest[0]).read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"short.jsonl has 1 text and .*a.jsonl 3: give lists of the same texts"):
        rerank.main([nbest[0], str(tmp_path / "short.jsonl")])
    (tmp_path / "plain.jsonl").write_text('{"text": "eins"}\n')
    with pytest.raises(UserError, match=r"plain.jsonl, line 1: has no list of texts in the field 'outputs'"):
        rerank.main([str(tmp_path / "plain.jsonl")])
    with pytest.raises(UserError, match=r"references.txt has 1 line for 3 texts"):
        (tmp_path / "references.txt").write_text("a\n")
        rerank.main([nbest[0], "--tune", str(tmp_path / "w.json"), "--references", str(tmp_path / "references.txt")])


def test_languages_of_texts(tmp_path):
    """A reverse run reads them the other way round; an empty field counts as missing."""
    records = [{"text": "a", "outputs": ["x"], "to": "de"}, {"text": "b", "outputs": ["y"], "to": ""}]
    (tmp_path / "n.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--to-field", "to", "--to", "fr", "--from", "en"]
    first, second = rerank.read_pools(rerank.parser().parse_args([str(tmp_path / "n.jsonl"), *flags]))
    assert (first.request, second.request) == (tj.Request("a", "de", "en"), tj.Request("b", "fr", "en"))
    assert rerank.RUNS["forward"](first.request, "x") == (tj.Request("a", "de", "en"), "x")
    assert rerank.RUNS["reverse"](first.request, "x") == (tj.Request("x", "en", "de"), "a")


def test_an_only_output_needs_no_number(tmp_path, capsys):
    records = [
        {"text": " ", "outputs": ["", ""], "scores": [None, None]},
        {"text": "a", "outputs": ["x", "y"], "scores": [1, 2]},
    ]
    (tmp_path / "n.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rerank.main([str(tmp_path / "n.jsonl"), "--feature", "scores"])
    assert capsys.readouterr().out == "\ny\n"


@pytest.mark.slow
def test_runs_score_outputs_given_texts_and_texts_given_outputs(tmp_path):
    pairs = [("one", "a b"), ("two", "b"), ("three", "c a")]
    (tmp_path / "pairs.tsv").write_text("".join(f"{a} {b}\t{b} {a}\n" for a, b in pairs))
    sizes = {"bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
    data = DataConfig(source="tsv", train="pairs.tsv", tokenizer="words", shared_vocab=False, **sizes)
    folder = finish("seq2seq", tmp_path, data)
    path = write(tmp_path / "n.jsonl", [["a b", "b a", "a b"], ["b"], ["c", "a c"]])
    pools = rerank.read_pools(rerank.parser().parse_args([path]))
    actual = rerank.compute_features(pools, [f"forward={folder}", f"reverse={folder}"], rerank.Metric("chrf"))
    run = tj.load(folder)
    for text, rows, outputs in zip(TEXTS, actual, [["a b", "b a"], ["b"], ["c", "a c"]], strict=True):
        forward = [each.total for each in run.score([(text, output) for output in outputs])]
        reverse = [each.total for each in run.score([(output, text) for output in outputs])]
        np.testing.assert_allclose(rows, np.transpose([forward, reverse]), rtol=1e-5)
    with pytest.raises(UserError, match="is a translator: name a language model, or write forward="):
        rerank.compute_features(pools, [f"lm={folder}"], rerank.Metric("chrf"))


def test_the_order_of_lists_does_not_matter(tmp_path, capsys):
    """Regression test: an output of several lists had the number of the first one."""
    rows = ([-2.0, -1.0], ["Ein Hund.", "Eine Katze."]), ([-0.5, -1.5], ["Ein Hund.", "Ein Tier."])
    paths = []
    for number, (scores, texts) in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"text": "x", "outputs": texts, "scores": scores}) + "\n")
        paths.append(str(path))
    for order in (paths, paths[::-1]):
        rerank.main([*order, "--feature", "scores"])
        assert capsys.readouterr().out == "Eine Katze.\n"  # -1, against a mean of -1.25


def test_a_text_that_translate_skipped_has_a_blank_output(nbest, tmp_path, capsys):
    skipped = {"outputs": None, "scores": None, "too_long": "skip"}
    for path in map(Path, nbest):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[1] |= skipped
        rows[2] |= skipped if path.name == "a.jsonl" else {}
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rerank.main([*nbest, "--feature", "scores"])
    assert capsys.readouterr().out.splitlines() == ["cats", "", "we"]
    (tmp_path / "references.txt").write_text("the cat sat\na dog\nwe eat\n")
    tuning = ["--tune", str(tmp_path / "w.json"), "--references", str(tmp_path / "references.txt")]
    rerank.main([*nbest, "--feature", "risk", "--feature", "scores", *tuning])


@pytest.mark.slow
def test_a_language_model_scores_the_first_token_if_it_can_start_a_text(tmp_path, capsys):
    """Regression test: an output of one token had the log-probability 0, and was the best."""
    (tmp_path / "train.txt").write_text("a b\nb c\n" * 4)
    data = {"source": "lines", "train": "train.txt", "tokenizer": "words"}
    folder = finish("decoder_lm", tmp_path, DataConfig(**data, batching="windows", window=8, batch_size=2))
    path = write(tmp_path / "n.jsonl", [["a", "a b c"], ["c b", "b"], ["c", "c a"]])
    rerank.main([path, "--feature", f"lm={folder}", "--output", str(tmp_path / "best.jsonl")])
    scores = [each.total for each in tj.load(folder).score([("", "a"), ("", "b"), ("", "c")])]
    records = map(json.loads, (tmp_path / "best.jsonl").read_text().splitlines())
    assert [record["features"][f"lm={folder}"] for record in records] == pytest.approx(scores)
    with pytest.raises(UserError, match="is no translator: name the run of a translator"):
        rerank.main([path, "--feature", f"forward={folder}"])
