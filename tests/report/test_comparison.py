"""The comparison of two runs against hand arithmetic, and as text."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.report.folders import write_run
from tformer_jax.cli import compare as command
from tformer_jax.report import html, matrices
from tformer_jax.report.bootstrap import Estimate
from tformer_jax.report.charts import all_charts
from tformer_jax.report.comparison import Change, Comparison, compare_runs
from tformer_jax.report.run import load_all
from tformer_jax.report.sections import ABSENT
from tformer_jax.runs.progress import ProgressView
from tformer_jax.tasks.translation import TRANSLATION

LOSSES = "loss, interpolated between records"


def pair(tmp_path: Path, **other):
    return load_all([write_run(tmp_path / "a"), write_run(tmp_path / "b", **{"level": 0.15, **other})])


def as_html(actual: Comparison) -> str:
    """Returns the comparison as the report shows it."""
    macros = html._environment().get_template("macros.html.jinja").make_module()
    return macros.comparison(actual, matrices.of_comparison(actual))


def with_metrics(run: Path, records: list[dict]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def records(losses: dict[int, float | None], tokens: int, seconds: float) -> list[dict]:
    return [
        {"step": step, "group": "train", "loss": loss, "tokens": tokens * step, "seconds": seconds * step}
        for step, loss in losses.items()
    ]


def test_losses_at_equal_cost_by_hand(tmp_path):
    """`b` takes twice the tokens and four times the time for a step."""
    folders = [write_run(tmp_path / name, examples=0, tested=False, evaluations=0) for name in "ab"]
    with_metrics(folders[0], records({2: 4.0, 4: 2.0, 8: 0.0}, tokens=100, seconds=1.0))
    validation = {"step": 4, "group": "validation", "loss": 1.5}
    with_metrics(folders[1], [*records({2: 3.0, 4: None, 6: 1.0}, tokens=200, seconds=4.0), validation])
    actual = {(row.axis, row.at): row for row in compare_runs(*load_all(folders)).losses}
    assert actual["step", 6.0].train == (1.0, 1.0)
    assert actual["step", 3.0].train == (3.0, 2.5)
    assert actual["step", 2.0].train == (4.0, 3.0)  # 1.5, rounded
    assert actual["tokens", 800.0].train == (0.0, 2.0)
    assert actual["tokens", 400.0].train == (2.0, 3.0)
    assert actual["seconds", 8.0].train == (0.0, 3.0)
    assert all(row.validation[0] is None for row in actual.values())
    assert [row.axis for row in actual.values()] == ["step"] * 4 + ["tokens"] * 4 + ["seconds"] * 4


def test_losses_are_compared_at_the_steps_that_are_shown(tmp_path):
    """Regression test: the losses at steps 1.25 and 2.5 were shown as those at steps 1 and 2."""
    folders = [write_run(tmp_path / name, examples=0, tested=False, evaluations=0) for name in "ab"]
    for folder in folders:
        with_metrics(folder, records({1: 4.0, 2: 2.0, 5: 1.0}, tokens=1, seconds=1.0))
    steps = [row.at for row in compare_runs(*load_all(folders)).losses if row.axis == "step"]
    assert steps == [1, 2, 4, 5]
    with_metrics(folders[0], records({1: 4.0}, tokens=1, seconds=1.0))
    steps = [row.at for row in compare_runs(*load_all(folders)).losses if row.axis == "step"]
    assert steps == [1]


def test_a_report_names_runs_that_are_not_evaluated(tmp_path):
    a, b = load_all([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
    (a.folder / "outputs" / "test.json").unlink()
    (a.folder / "outputs" / "validation.json").unlink()
    assert "Not evaluated yet: a." in as_html(compare_runs(*load_all([a.folder, b.folder])))


def test_the_loss_of_smoothed_labels_is_not_compared(tmp_path):
    """Regression test: the plain loss of one run was compared with the smoothed one of the other."""
    folders = [write_run(tmp_path / name, examples=0, tested=False, evaluations=0) for name in "ab"]
    plain = records({2: 4.0, 8: 1.0}, tokens=100, seconds=1.0)
    smoothed = [record | {"nll": record["loss"], "loss": record["loss"] + 1} for record in plain]
    with_metrics(folders[0], smoothed)
    with_metrics(folders[1], plain)
    runs = load_all(folders)
    assert all(row.train[0] == row.train[1] for row in compare_runs(*runs).losses)
    drawn = {chart.key: [trace["run"] for trace in chart.traces] for chart in all_charts(runs)}
    assert drawn["nll"] == [0, 1] and drawn["loss"] == [0]


def test_runs_of_equal_outputs_do_not_differ(tmp_path):
    a, b = pair(tmp_path, level=0.0)
    actual = compare_runs(a, b, resamples=100)
    assert (actual.split, actual.equal, actual.examples) == ("test", 40, 40)
    assert (actual.gained, actual.lost) == ([], [])
    assert all(first.score == second.score for first, second in actual.metrics.values())
    assert actual.settings == {"name": ("a", "b")}


def test_outputs_of_an_earlier_step_are_not_compared(tmp_path):
    """A resumed run drops the record of the test split; its outputs there remain until it ends again."""
    folders = [write_run(tmp_path / name, evaluations=2) for name in "ab"]
    path = folders[1] / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"group": "test"' not in line))
    a, b = load_all(folders)
    assert a.is_current("test") and not b.is_current("test") and "test" in b.outputs
    assert compare_runs(a, b, resamples=100).split != "test"


def test_losses_of_other_tokens_have_no_difference(tmp_path):
    a, b = pair(tmp_path, level=0.0)
    other = dataclasses.replace(b, config=b.config | {"data.vocab_size": 9})
    for run, same in ((b, True), (other, False)):
        actual = compare_runs(a, run, resamples=100)
        assert actual.same_tokens == same
        (table,) = [part for part in command.comparison_parts(actual, 0) if LOSSES in str(getattr(part, "title", None))]
        differences = {cell for column in table.columns if column.header == "B - A" for cell in column.cells}
        assert bool(differences - {ABSENT}) == same
        assert table.title == LOSSES + ("" if same else "; no differences, because the runs predict other tokens")
        losses = as_html(actual).partition("<caption>Loss at equal steps")[2].partition("</table>")[0]
        assert bool(re.search(r">[+−]\d+\.\d{4}</td>", losses)) == same
        assert ("because the runs predict other tokens" in losses) != same


@pytest.mark.parametrize("same", [True, False])
def test_saved_tokenizers_say_more_about_tokens_than_settings(tmp_path, same):
    """Those of prepared data are not what the settings say, and equal settings may train other tokenizers."""
    a, b = pair(tmp_path, level=0.0)
    for run, size in ((a, 9), (b, 9 if same else 8)):
        (run.folder / "tokenizers").mkdir()
        (run.folder / "tokenizers" / "target.json").write_text(
            json.dumps({"kind": "characters", "pieces": [*"a" * size]})
        )
    b = dataclasses.replace(b, config=b.config | {"data.vocab_size": 9 if same else b.config["data.vocab_size"]})
    assert compare_runs(a, b, resamples=100).same_tokens == same


def test_what_changed_most_comes_first(tmp_path):
    a, b = pair(tmp_path, label_smoothing=0.1)
    actual = compare_runs(a, b, resamples=100)
    assert actual.settings == {"name": ("a", "b"), "train.label_smoothing": (0.0, 0.1)}
    before, after = a.outputs["test"], b.outputs["test"]
    gains = {source: new - old for source, old, new in zip(before.sources, before.chrf, after.chrf, strict=True)}
    assert [change.gain for change in actual.lost] == pytest.approx(sorted(gains.values())[: len(actual.lost)])
    assert all(change.gain == pytest.approx(gains[change.source]) for change in [*actual.gained, *actual.lost])
    assert {change.texts for change in actual.lost} <= set(zip(before.texts, after.texts, strict=True))
    for run in (a, b):
        for name in ("sources", "references", "texts", "chrf"):
            values = getattr(run.outputs["test"], name)
            object.__setattr__(run.outputs["test"], name, [*values, *values])
    again = compare_runs(a, b, resamples=100)
    assert (again.gained, again.lost) == (actual.gained, actual.lost)


def test_other_examples_are_not_paired(tmp_path):
    a, b = pair(tmp_path, examples=39)
    actual = compare_runs(a, b)
    assert (actual.split, actual.metrics, actual.gained) == (None, {}, [])


@pytest.mark.parametrize(
    ("changes", "corpus", "split"),
    [
        ({}, 1, "test"),
        ({}, 2, "validation"),
        ({"data.batching": "packed"}, 1, None),
        ({"model.family": "masked_lm", "data.objective": "masked_tokens", "data.noise.density": 0.3}, 1, None),
    ],
)
def test_language_models_with_other_labels_or_texts_are_not_paired(tmp_path, changes, corpus, split):
    """Regression test: equal numbers of labels in each part, without samples, passed for the same ones."""
    a, b = load_all([write_run(tmp_path / name, family="decoder_lm") for name in "ab"])
    a, b = (
        dataclasses.replace(run, corpus={"the checksum of the test examples": checksum}, config=run.config | settings)
        for run, checksum, settings in ((a, 1, {}), (b, corpus, changes))
    )
    actual = compare_runs(a, b, resamples=100)
    assert actual.split == split
    assert actual.same_tokens == (not changes)


def test_validation_where_one_run_was_not_tested(tmp_path):
    a, b = pair(tmp_path, tested=False)
    assert compare_runs(a, b, resamples=100).split == "validation"


@pytest.mark.parametrize("first", ["en-de", "en-ja"])
def test_a_direction_may_lack_a_metric_that_others_have(first):
    """As BLEU where the tokenizer of a language is not installed."""
    scores = [Estimate(40.0, 40.0, 1.0), Estimate(41.0, 41.0, 1.0, 0.5)]
    actual = {"en-de": {"chrf": scores, "bleu": scores}, "en-ja": {"chrf": scores}}
    actual = {first: actual.pop(first)} | actual
    table = command._direction_table(SimpleNamespace(by_direction=actual))
    cells = {direction: row for direction, *row in zip(*(column.cells for column in table.columns), strict=True)}
    scored = ["40.00", "41.00", "+1.00", "0.500"]
    assert cells == {"en-de": scored * 2, "en-ja": scored + [ABSENT] * 4}


def test_labels_that_changed(tmp_path):
    folders = [write_run(tmp_path / name, family="classifier", level=level) for name, level in (("a", 0), ("b", 0.2))]
    actual = compare_runs(*load_all(folders), resamples=100)
    assert list(actual.metrics) == ["accuracy"]
    a, b = (run.outputs["test"] for run in (actual.a, actual.b))
    worse = {source for source, old, new in zip(a.sources, a.hits, b.hits, strict=True) if old and not new}
    assert {change.source for change in actual.lost} <= worse


def test_a_label_that_stays_wrong_is_called_wrong_in_both_outputs(tmp_path):
    folders = [write_run(tmp_path / name, family="classifier", level=0.0) for name in "ab"]
    answers = {"a": ("en", 0.9), "b": ("fr", 0.6)}
    for folder in folders:
        path = folder / "outputs" / "test.json"
        actual = json.loads(path.read_text())
        actual["outputs"][0] |= dict(zip(("output", "score"), answers[folder.name], strict=True))
        path.write_text(json.dumps(actual))
    actual = compare_runs(*load_all(folders), resamples=100)
    text = "\n".join(part for part in command.comparison_parts(actual, 1) if isinstance(part, str))
    assert "gained most: wrong with probability 0.9 to wrong with probability 0.6" in text
    assert "wrong → wrong" in as_html(actual) and "wrong → right" not in as_html(actual)


def test_a_setting_that_an_older_run_lacks_has_its_default(tmp_path):
    a, b = pair(tmp_path)
    config = json.loads((a.folder / "config.json").read_text())
    assert config["train"].pop("lora_kernels") == ["*"]
    (a.folder / "config.json").write_text(json.dumps(config))
    assert list(compare_runs(*load_all([a.folder, b.folder]), resamples=100).settings) == ["name"]


def test_text_is_whole_and_says_what_its_numbers_are(tmp_path, capsys):
    name = "a_run_whose_name_is_far_longer_than_the_column_of_a_table_with_eighty_characters_is_wide"
    folders = [
        write_run(tmp_path / name, family="classifier"),
        write_run(tmp_path / "b", family="classifier", level=0.2),
    ]
    command.main([*map(str, folders), "--resamples", "100"])
    text = capsys.readouterr().out
    assert f"'{name}'" in text
    assert re.search(r"lost most: correct with probability 0\.\d+ to wrong with probability 0\.\d+\n", text)
    command.main([str(folders[0]), str(write_run(tmp_path / "other", family="classifier", examples=39))])
    assert "were not evaluated on the same examples" in capsys.readouterr().out
    shutil.rmtree(folders[1] / "outputs")
    command.main([*map(str, folders)])
    assert "Not evaluated yet: B." in capsys.readouterr().out


def test_texts_are_shown_unchanged(capsys):
    """Regression test: rich replaced `:100:` by an emoji and doubled a backslash."""
    text = "the ratio 1:100:3 and [b]:x:[/b] \\"
    print(command._describe_change("lost most", Change(text, "", ("", ""), (0.0, 0.0)), TRANSLATION))
    view = ProgressView(steps=1, console=Console(highlight=False, width=200))
    view.say(text)
    assert capsys.readouterr().out.count(text) == 2


@pytest.mark.long
def test_as_text(tmp_path, capsys):
    folders = [str(run.folder) for run in pair(tmp_path, label_smoothing=0.1)]
    path = tmp_path / "both.html"
    command.main([*folders, "--resamples", "100", "--sentences", "1", "--report", str(path)])
    lines = capsys.readouterr().out.splitlines()
    (bleu,) = (line.split() for line in lines if line.startswith("BLEU"))
    a, b = (json.loads(Path(folder, "result.json").read_text())["test"]["bleu"] for folder in folders)
    assert (bleu[1], bleu[5]) == (f"{a:.2f}", f"{b:.2f}")
    assert bleu[-2] == f"{b - a:+.2f}".replace("-", "−")
    for text in ("40 examples", "exact match", "train.label_smoothing  0.0", "lost most: ", "validation A"):
        assert any(text.lower() in line.lower() for line in lines), text
    assert sum(line.startswith("lost most") for line in lines) == 1
    assert "Comparison" in path.read_text()


def test_language_models_are_paired_whatever_the_length_of_their_prompts(tmp_path):
    a, b, other = (write_run(tmp_path / name, family="decoder_lm", examples=3) for name in ("a", "b", "other"))

    def change(folder: Path, split: Callable[[str], tuple[str, str]]) -> None:
        path = folder / "outputs" / "test.json"
        actual = json.loads(path.read_text())
        for row in actual["outputs"]:
            row["source"], row["reference"] = split(row["source"] + row["reference"])
        path.write_text(json.dumps(actual))

    change(b, lambda text: (text[:2], text[2:20]))
    change(other, lambda text: (f"Another {text[:2]}", text[2:]))
    assert compare_runs(*load_all([a, b]), resamples=100).split == "test"
    (other / "outputs" / "validation.json").unlink()
    assert compare_runs(*load_all([a, other]), resamples=100).split is None


def test_language_models_are_paired_by_the_parts_of_a_text(tmp_path, capsys):
    folders = [write_run(tmp_path / name, family="decoder_lm", level=level) for name, level in (("a", 0), ("b", 0.15))]
    path = tmp_path / "both.html"
    command.main([*map(str, folders), "--report", str(path)])
    text = capsys.readouterr().out
    assert "test: 60 parts of the split; 95 % intervals" in text
    (cells,) = (re.findall(r"[+-]?\d+\.\d+", line) for line in text.splitlines() if line.startswith("Loss"))
    a, low, high, b, _, _, gap, p = map(float, cells)
    losses = [json.loads((folder / "outputs" / "test.json").read_text())["losses"] for folder in folders]
    assert [a, b] == pytest.approx([sum(each["nll"]) / sum(each["labels"]) for each in losses], abs=1e-4)
    assert low < a < high
    assert gap == pytest.approx(b - a, abs=2e-4)
    assert p < 0.02, "the parts vary alike, so that a small difference is certain"
    assert "Test: 60 parts of the split" in path.read_text()
    assert f"{low:.4f} to {high:.4f}" in path.read_text()


def test_a_small_p_value_is_never_shown_as_0(tmp_path):
    """Regression test: with more than 1,999 resamples, the smallest p-values were shown as 0.000."""
    scores = [Estimate(40.0, 40.0, 1.0), Estimate(41.0, 41.0, 1.0, 1 / 2001)]
    actual = dataclasses.replace(compare_runs(*pair(tmp_path), 100), metrics={"chrf": scores, "chrf:en-de": scores})
    for table in (command._metric_table(actual), command._direction_table(actual)):
        assert list(table.columns[-1].cells) == ["< 0.001"]
    (matrix,) = matrices.of_comparison(actual)
    assert matrix.rows["en"][0].hint == "en-de: 40.00 and 41.00, p < 0.001"
    assert "&lt; 0.001</td>" in as_html(actual) and "0.000" not in as_html(actual)
