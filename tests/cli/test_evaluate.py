"""`evaluate.py`: the metrics of training again, those of other settings, and changed data."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import sacrebleu

import tformer_jax as tj
from tests.cli.finished_runs import finish
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, translate
from tformer_jax.config import Config, DataConfig, EvalConfig


@pytest.mark.long
@pytest.mark.parametrize("family", ["seq2seq", "classifier", "decoder_lm"])
def test_evaluation_repeats_the_result_of_training(family, runs, tmp_path):
    run, record = runs[family], tmp_path / "record.json"
    evaluate.main(["--run", str(run), "--data", str(run.parent), "--record", str(record)])
    actual, expected = (json.loads(path.read_text()) for path in (record, run / "result.json"))
    assert actual["metrics"] == expected["test"]
    assert actual["weights"] == expected["weights"]


@pytest.mark.long
def test_evaluation_on_data_that_changed_since_the_training(runs, tmp_path):
    pairs = (runs["seq2seq"].parent / "pairs.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "pairs.tsv").write_text("".join([*pairs[:-1], "new\tNEW\n"]))
    with pytest.raises(UserError, match="seq2seq changed .the checksum of the .* examples is .* and was"):
        evaluate.main(["--run", str(runs["seq2seq"]), "--data", str(tmp_path)])


@pytest.mark.slow
def test_evaluation_with_other_settings_of_generation(runs, tmp_path, capsys):
    run, record = runs["seq2seq"], tmp_path / "record.json"
    flags = ["--beams", "2", "--max-new-tokens", "4"]
    evaluate.main(
        ["--run", str(run), "--data", str(run.parent), "--split", "validation", *flags, "--record", str(record)]
    )
    actual = json.loads(record.read_text())
    last = (run.parent / "pairs.tsv").read_text().splitlines()[-actual["examples"] :]
    sources, references = zip(*(line.split("\t") for line in last), strict=True)
    translations = tj.load(run).translate(sources, beams=2, max_new_tokens=4)
    assert actual["metrics"]["chrf"] == sacrebleu.corpus_chrf(translations, [references]).score
    with pytest.raises(UserError, match="--beams changes no metric of a run with model.family='classifier'"):
        evaluate.main(["--run", str(runs["classifier"]), "--data", str(run.parent), "--beams", "3"])


def test_metrics_are_added_to_those_of_the_run():
    """Regression test: they replaced them, so that a run with the metric `command` had a command without its metric."""
    saved = EvalConfig(metrics=("command", "ter"), command="python score.py")
    options = evaluate.parser().parse_args(["--run", "x", "--metrics", "chrf++", "ter"])
    changed = evaluate.change_metrics(Config(eval=saved), options).eval
    assert changed == dataclasses.replace(saved, metrics=("command", "ter", "chrf++"))


@pytest.mark.long
def test_evaluation_of_a_step_says_which(runs, tmp_path, capsys):
    run, record = runs["classifier"], tmp_path / "record.json"
    flags = ["--run", str(run), "--data", str(run.parent), "--record", str(record)]
    evaluate.main([*flags, "--step", "0"])
    actual, final = (json.loads(path.read_text()) for path in (record, run / "result.json"))
    assert actual["weights"] == {"kind": "checkpoint", "steps": [0]}
    assert actual["metrics"] == final["test"]
    assert "experiment, checkpoint weights of step 0, test: 1 example" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="has no checkpoint of step 5, but of step 0$"):
        evaluate.main([*flags, "--step", "5"])


@pytest.mark.long
def test_evaluation_of_a_test_set(runs, tmp_path, capsys):
    run = runs["seq2seq"]
    sources, references = ["abc", "cab", "bb"], [["cba", "bca", "bb"], ["abc", "acb", "b b"]]
    rows = zip(sources, *references, ["x", "x", "y"], strict=True)
    lines = [dict(zip(("source", "a", "b", "document"), row, strict=True)) for row in rows]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--run", str(run), "--source", str(tmp_path / "test.jsonl"), "--document-field", "document"]
    flags += ["--reference-field", "a", "b", "--metrics", "ter", "--max-new-tokens", "5"]
    evaluate.main([*flags, "--record", str(tmp_path / "r.json"), "--output", str(tmp_path / "o.jsonl")])
    actual = json.loads((tmp_path / "r.json").read_text())
    translations = tj.load(run).translate(sources, max_new_tokens=5)
    assert actual["metrics"]["chrf"] == sacrebleu.corpus_chrf(translations, references).score
    assert actual["metrics"]["ter"] == sacrebleu.corpus_ter(translations, references).score
    assert actual["signatures"]["bleu"].startswith("nrefs:2|")
    checksum = hashlib.sha256((tmp_path / "test.jsonl").read_bytes()).hexdigest()
    assert (actual["test_set"], actual["examples"]) == ({str(tmp_path / "test.jsonl"): checksum}, 3)
    assert "test.jsonl: 3 examples" in " ".join(capsys.readouterr().out.split())
    outputs = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    scored = tj.load(run).outputs(sources, 1, max_new_tokens=5)
    for number, (output, (expected,)) in enumerate(zip(outputs, scored, strict=True)):
        each = [texts[number] for texts in references]
        assert [output["reference"], *output["more_references"]] == each
        assert (output["output"], output["document"]) == (expected.text, "xxy"[number])
        assert output["score"] == pytest.approx(expected.score)
        assert output["chrf"] == sacrebleu.sentence_chrf(expected.text, each).score
        assert output["bleu"] == sacrebleu.sentence_bleu(expected.text, each).score


def test_models_and_files_that_do_not_fit(runs, tmp_path):
    run = runs["seq2seq"]
    (tmp_path / "s").write_text("a\n")
    flags = ["--source", str(tmp_path / "s"), "--reference", str(tmp_path / "s")]
    with pytest.raises(UserError, match="translate: .* holds a decoder_lm model; use generate"):
        evaluate.main(["--run", str(runs["decoder_lm"]), *flags])
    with pytest.raises(UserError, match=r"eval.metrics=\('ter',\): must be \(\) for model.family='classifier'"):
        evaluate.main(["--run", str(runs["classifier"]), "--metrics", "ter"])
    with pytest.raises(UserError, match="--direction and --language-fields name directions, but .* has one: omit them"):
        evaluate.main(["--run", str(run), *flags, "--direction", "en-de"])
    with pytest.raises(UserError, match="--split test and --source name different examples: leave one of them out"):
        evaluate.main(["--run", str(run), *flags, "--split", "test"])
    same, other = str(tmp_path / "s.jsonl"), str(tmp_path / "o.jsonl")
    for given, problem in (
        (["--source", same, "--output", same], "is both --source and --output: choose another --output"),
        (["--source", same, "--record", same], "is both --source and --record: choose another --record"),
        ([*flags, "--record", flags[1]], "is both --reference and --record"),
        (["--source", same, "--output", other, "--record", other], "is both --output and --record: choose another"),
    ):
        with pytest.raises(UserError, match=problem):
            evaluate.main(["--run", str(run), *given])
    with pytest.raises(UserError, match=r"--output .*o.txt: must be named .jsonl"):
        evaluate.main(["--run", str(run), *flags, "--output", "o.txt"])


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A run with the directions en-de, de-en and en-fr, and de-fr only in the held-out examples."""
    folder = tmp_path_factory.mktemp("many")
    rows = [(*pair, word, word[::-1]) for pair in (("en", "de"), ("de", "en"), ("en", "fr")) for word in ("abc", "cab")]
    (folder / "train.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    (folder / "valid.tsv").write_text("".join("\t".join(row) + "\n" for row in [*rows[::2], ("de", "fr", "ba", "ab")]))
    files = {"source": "tsv", "train": ("train.tsv",), "validation": ("valid.tsv",), "zero_shot": ("de-fr",)}
    fields = {"language_fields": ("1", "2"), "fields": ("3", "4"), "tokenizer": "characters"}
    run = finish("seq2seq", folder, DataConfig(**files, **fields, bucket_lengths=(8,), batch_multiple=1))
    parts = [{"name": "en-de"}, {"name": "de-en"}, {"name": "en-fr"}]
    (run / "data.json").write_text(json.dumps({"splits": {"train": {"parts": parts}}}))  # as training writes
    return run


@pytest.mark.long
def test_directions_of_a_split_and_of_a_test_set(many, tmp_path, capsys):
    flags = ["--run", str(many), "--record", str(tmp_path / "r.json"), "--output", str(tmp_path / "o.jsonl")]
    evaluate.main([*flags, "--data", str(many.parent), "--split", "validation"])
    actual = json.loads((tmp_path / "r.json").read_text())["metrics"]
    assert actual == json.loads((many / "result.json").read_text())["test"]
    outputs = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    scores = {
        each["direction"]: sacrebleu.corpus_chrf([each["output"]], [[each["reference"]]]).score for each in outputs
    }
    assert [*scores] == ["en-de", "de-en", "en-fr", "de-fr"]
    assert {name: actual[f"chrf:{name}"] for name in scores} == scores
    assert actual["chrf"] == pytest.approx(sum(scores.values()) / 4)
    assert actual["chrf:from-en"] == pytest.approx((scores["en-de"] + scores["en-fr"]) / 2)
    assert actual["chrf:zero-shot"] == scores["de-fr"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("│ en-", "│ de-", "│ to-en", "│ from-en", "│ zero-shot")) for line in lines) == 7
    names = {"en": "eng", "de": "German", "fr": "fra"}
    rows = [("sl", "tl", "source", "target")]
    for each in outputs:
        languages = [names[code] for code in each["direction"].split("-")]
        rows.append((*languages, each["source"], each["reference"]))
    (tmp_path / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    evaluate.main([*flags, "--source", str(tmp_path / "test.tsv"), "--language-fields", "sl", "tl"])
    again = json.loads((tmp_path / "r.json").read_text())["metrics"]
    assert again == {name: value for name, value in actual.items() if name in again}
    assert {"chrf:to-en", "bleu:zero-shot", "exact_match:de-fr"} <= again.keys()
    with pytest.raises(UserError, match="has many languages: name the test set's languages by --direction or"):
        evaluate.main([*flags, "--source", str(tmp_path / "test.tsv")])
    with pytest.raises(UserError, match="the model has no language 'es'; .*it has de, en, fr"):
        evaluate.main([*flags, "--source", str(tmp_path / "test.tsv"), "--direction", "en-es"])


@pytest.mark.slow
def test_evaluation_on_a_mesh(runs, tmp_path):
    run, record = runs["decoder_lm"], tmp_path / "record.json"
    flags = ["--run", str(run), "--data", str(run.parent), "--record", str(record)]
    evaluate.main([*flags, "--mesh", "data=2,tensor=2"])
    actual, final = (json.loads(path.read_text()) for path in (record, run / "result.json"))
    assert actual["metrics"] == pytest.approx(final["test"], rel=1e-5)


@pytest.mark.slow
def test_int8_kernels_change_the_loss_a_little_and_are_recorded(runs, tmp_path):
    run, record, output = runs["seq2seq"], tmp_path / "record.json", tmp_path / "output.txt"
    flags = ["--run", str(run), "--quantize", "int8"]
    evaluate.main([*flags, "--data", str(run.parent), "--record", str(record)])
    actual, exact = (json.loads(path.read_text()) for path in (record, run / "result.json"))
    assert actual["quantization"] == "int8"
    assert 0 < abs(actual["metrics"]["loss"] - exact["test"]["loss"]) < 0.1
    translate.main([*flags, "abc", "gh", "--output", str(output)])
    assert output.read_text().split("\n")[:2] == tj.load(run, quantization="int8").translate(["abc", "gh"])
    assert json.loads((tmp_path / "output.txt.provenance.json").read_text())["command"]["quantize"] == "int8"


@pytest.mark.long
def test_a_test_set_of_labels(runs, tmp_path):
    """Texts and labels of the test split in files, by line and as records, have its metrics; others are refused."""
    run = runs["classifier"]
    rows = [line.split("\t") for line in (run.parent / "labels.tsv").read_text().splitlines()[9:]]  # held out
    (tmp_path / "texts").write_text("".join(f"{text}\n" for _, text in rows))
    (tmp_path / "labels").write_text("".join(f"{label}\n" for label, _ in rows))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps({'t': text, 'l': label})}\n" for label, text in rows))
    lines = ["--source", str(tmp_path / "texts"), "--reference", str(tmp_path / "labels")]
    records = ["--source", str(tmp_path / "rows.jsonl"), "--source-field", "t", "--reference-field", "l"]
    expected = json.loads((run / "result.json").read_text())["test"]
    for flags in (lines, records):
        evaluate.main(["--run", str(run), *flags, "--record", str(tmp_path / "record.json")])
        assert json.loads((tmp_path / "record.json").read_text())["metrics"] == pytest.approx(expected, rel=1e-6)
    blank = ["--source", str(tmp_path / "blank"), "--reference", str(tmp_path / "x")]
    (tmp_path / "blank").write_text("a\n\n")
    (tmp_path / "x").write_text("x\nx\n")
    with pytest.raises(UserError, match="the test set has a blank text with the label 'x': remove both lines"):
        evaluate.main(["--run", str(run), *blank])
    (tmp_path / "labels").write_text("other\n" * len(rows))
    with pytest.raises(UserError, match="the test set has the label 'other', but .* has the labels "):
        evaluate.main(["--run", str(run), *lines])
    with pytest.raises(UserError, match="a classifier compares each text with one label: leave out directions"):
        evaluate.main(["--run", str(run), *records[:-2], "--reference-field", "l", "l"])
