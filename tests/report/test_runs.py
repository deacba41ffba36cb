"""Reports of runs that finished, are going on, were killed, failed, or differ in their metrics."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.folders import cut, lock, write_run
from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.cli import compare, report
from tformer_jax.config import kinds
from tformer_jax.report import charts, sections
from tformer_jax.report import html as page
from tformer_jax.report.run import load_all

ROOT = Path(__file__).resolve().parents[2]
FAILED = (38, "failed", "5 steps in a row had a loss or gradient that is not finite")


class Elements(html.parser.HTMLParser):
    """Collects the text and the addresses of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.addresses, self._skipped = "", [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._skipped = tag in ("script", "style")
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "poster")]

    def handle_endtag(self, tag):
        self._skipped = False

    def handle_data(self, data):
        self.text += "" if self._skipped else data


def shown(*folders: Path) -> Elements:
    return Elements(page.render_report(load_all(folders)))


def drawn(*folders: Path) -> dict[str, dict]:
    """Returns the data of the charts by key."""
    text = page.render_report(load_all(folders))
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    return {chart["key"]: chart for chart in json.loads(data)["charts"]}


@pytest.mark.long
def test_a_finished_run(tmp_path):
    run = write_run(tmp_path / "run", examples=30, events=[(7, "spike", "loss 9 is far above")], label_smoothing=0.1)
    (single,) = load_all([run])
    assert single.status == "finished"
    actual = shown(run)
    for text in (
        "Finished",
        "40 of 40",
        "36 k",
        "Curves",
        "Evaluation",
        "BLEU",
        "tok:13a",
        "Worst",
        "Random",
        "Best",
        "time (UTC)",
        "loss 9 is far above",
        "train.label_smoothing",
        "AMD EPYC",
        "957a3daed28a",
        "encoder/layers_*/ffn",
        "131,712",
        "python scripts/train.py --config configs/run.py",
    ):
        assert text in actual.text, text
    result = single.result["test"]
    assert f"{result['bleu']:.2f}" in actual.text
    assert all(address.startswith(("#", "data:")) for address in actual.addresses)


def test_the_charts_hold_the_records(tmp_path):
    charts = drawn(write_run(tmp_path / "run"))
    training, validation = charts["loss"]["traces"]
    assert training["step"] == list(range(1, 41))
    assert training["tokens"] == [900 * step for step in range(1, 41)]
    assert training["seconds"] == [step / 4 for step in range(1, 41)]
    assert validation["step"] == [10, 20, 30, 40]
    assert validation["tokens"] == [9000, 18000, 27000, 36000]
    assert charts["utilization"]["traces"][0]["y"][0] == pytest.approx(40, rel=0.2)
    assert charts["memory"]["traces"][0]["y"][0] == pytest.approx(1.5e9 / 2**30, rel=1e-5)
    assert "skipped_steps" not in charts and "flops_per_second" not in charts


def test_nothing_of_a_run_becomes_markup(tmp_path):
    markup = "</script><img src=x onerror=alert(1)>"
    run = write_run(tmp_path / "run", events=[(3, "spike", markup)], extra={markup: 1.0, f"grad_norm/{markup}": 1.0})
    path = run / "outputs" / "test.json"
    actual = json.loads(path.read_text())
    actual["outputs"][0] |= {"source": "</script><script>alert(1)</script>", "output": "<img src=y>"}
    path.write_text(json.dumps(actual))
    text = page.render_report(load_all([run]))
    assert "<img" not in text
    assert "<script>alert(1)" not in text


def test_a_metric_of_unknown_direction_has_no_best_value(tmp_path, monkeypatch):
    """Of a function of `tj.train(metrics=)`, lower values may be better; regression test: the highest was the best."""
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = iter((4.0, 2.0, 7.0, 5.0))
    records = [record | ({"own": next(values)} if record.get("group") == "validation" else {}) for record in records]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def rows() -> dict[str, sections.MetricRow]:
        return {title: row for title, (row,) in sections.metric_rows(load_all([run])).items()}

    actual = rows()
    assert (actual["own"].validation, actual["own"].best, actual["own"].best_step) == (5.0, None, None)
    assert actual["BLEU"].best is not None and actual["Loss"].best is not None
    summaries = {chart.key: chart.summary for chart in charts.all_charts(load_all([run]))}
    assert summaries["validation_own"].endswith(", between 2 and 7.")
    assert ", highest " in summaries["validation_bleu"] and actual["Loss"].best == min(
        row["loss"] for row in records if row.get("group") == "validation"
    )
    monkeypatch.setitem(kinds.METRICS, "own", kinds.declares(lower_is_better=True)(lambda *_: []))
    assert (rows()["own"].best, rows()["own"].best_step) == (2.0, 20)


def test_a_run_killed_within_a_record(tmp_path):
    run = write_run(tmp_path / "run", tested=False)
    cut(run / "metrics.jsonl")
    cut(run / "events.jsonl", share=0)
    cut(run / "outputs" / "validation.json")
    (single,) = load_all([run])
    assert single.status == "ended early"
    assert 15 < single.step < 25
    actual = shown(run)
    assert f"it neither finished nor reported an error after step {single.step}" in actual.text
    assert "Worst" not in actual.text


def test_a_damaged_file_is_named(tmp_path, caplog):
    """Regression test: runs with damaged outputs of the test split were compared on the validation split."""
    run = write_run(tmp_path / "run")
    cut(run / "outputs" / "test.json")
    (single,) = load_all([run])
    assert "test.json is damaged" in caplog.text and "it is left out" in caplog.text
    assert single.split == "validation"
    with pytest.raises(UserError, match=r"test.json is damaged \(.*\): restore it from a copy, or remove it"):
        load_all([run], strict=True)
    with pytest.raises(UserError, match="test.json is damaged"):
        compare.main([str(write_run(tmp_path / "other")), str(run)])


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "events.jsonl", "outputs/test.json", "model.json", "provenance.json"]
)
def test_a_missing_file_leaves_its_part_out(tmp_path, missing):
    run = write_run(tmp_path / "run")
    (run / missing).unlink()
    assert "Finished" in shown(run).text


def test_a_run_with_nans(tmp_path):
    run = write_run(tmp_path / "run", tested=False, lost=range(30, 41), events=[(30, "skipped", "not finite"), FAILED])
    assert load_all([run])[0].status == "failed"
    loss = drawn(run)["loss"]
    assert loss["traces"][0]["y"][29:] == [None] * 11
    assert [mark["kind"] for mark in loss["marks"]] == ["skipped", "failed"]
    assert drawn(run)["skipped_steps"]["traces"][0]["y"][28:30] == [0, 1]
    assert FAILED[2] in shown(run).text


def test_a_run_that_goes_on(tmp_path):
    run = write_run(tmp_path / "run", tested=False, steps=20)
    with lock(run):
        (single,) = load_all([run])
        assert single.status == "running"
        assert "Running" in shown(run).text
    assert load_all([run])[0].status == "ended early"


def test_a_run_that_has_only_begun(tmp_path):
    run = write_run(tmp_path / "run", tested=False, examples=0)
    for name in ("metrics.jsonl", "events.jsonl"):
        (run / name).write_text("")
    assert "Nothing is recorded." in shown(run).text


def test_a_resumed_run_repeats_no_spike(tmp_path):
    events = [(7, "spike", "first"), (8, "stopped", "by a signal"), (5, "resume", ""), (7, "spike", "second")]
    (single,) = load_all([write_run(tmp_path / "run", events=events)])
    kinds = [(event["kind"], event["message"]) for event in single.events]
    assert kinds[1:] == [("stopped", "by a signal"), ("resume", ""), ("spike", "second"), ("finished", "")]


def test_runs_with_different_metrics(tmp_path):
    folders = [
        write_run(tmp_path / "translation"),
        write_run(tmp_path / "labels", family="classifier", extra={"noise_scale": 5.0, "my_own": 1.0}),
        write_run(tmp_path / "text", family="decoder_lm", extra={"grad_norm/decoder/layers_0": 2.0}),
    ]
    charts = drawn(*folders)
    assert [trace["run"] for trace in charts["loss"]["traces"]] == [0, 1, 2, 0, 1, 2]
    assert [trace["run"] for trace in charts["validation_accuracy"]["traces"]] == [1]
    assert charts["grad_norm_2"]["traces"][0]["name"] == "decoder/layers_0"
    assert {"noise_scale", "my_own", "validation_bleu", "sentence_chrf"} <= charts.keys()
    actual = shown(*folders).text
    for text in ("Accuracy", "BLEU", "right", "wrong", "Samples", "model.family", "different tasks"):
        assert text in actual, text


def test_intervals_stand_beside_the_results_that_they_belong_to(tmp_path):
    run = write_run(tmp_path / "run")
    path = run / "outputs" / "validation.json"
    actual = json.loads(path.read_text())
    path.write_text(json.dumps({**actual, "step": 30}))
    row = sections.metric_rows(load_all([run]))["BLEU"][0]
    assert row.intervals.keys() == {"test"}
    assert row.intervals["test"].low < row.test < row.intervals["test"].high
    assert (row.best, row.best_step, row.validation) == (30.0, 40, 30.0)


def test_a_last_evaluation_that_is_not_finite_shows_no_earlier_value(tmp_path):
    """Regression test: the last finite value stood under "validation, last" and "test"."""
    run = write_run(tmp_path / "run")
    path = run / "metrics.jsonl"
    actual = [json.loads(line) for line in path.read_text().splitlines()]
    last = max(place for place, record in enumerate(actual) if record["group"] == "validation")
    actual[last]["loss"] = None
    actual.append({**actual[-1], "loss": None})
    path.write_text("".join(json.dumps(record) + "\n" for record in actual))
    row = sections.metric_rows(load_all([run]))["Loss"][0]
    assert (row.validation, row.test, row.best_step) == (None, None, 30)


def test_weights_of_other_steps_have_a_validation_column_of_their_own(tmp_path):
    """Regression test: the test scores of averaged weights stood beside the validation scores of the last ones."""
    run = write_run(tmp_path / "run")
    assert "validation, final weights" not in shown(run).text
    path = run / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "validation": {"loss": 1.2345, "bleu": 33.25}}))
    rows = sections.metric_rows(load_all([run]))
    assert {title: row.saved for title, (row, *_) in rows.items()} == {
        "Loss": 1.2345,
        "BLEU": 33.25,
        "chrF": None,
        "Exact match": None,
    }
    actual = shown(run).text
    assert "validation, final weights" in actual
    assert actual.index("1.2345") < actual.index("33.25")


@pytest.mark.parametrize(("signature", "shown"), [("raw", None), ("lowercase", ["lowercase"])])
def test_signatures_name_the_normalization_of_references(tmp_path, signature, shown):
    run = write_run(tmp_path / "run", examples=2)
    result = json.loads((run / "result.json").read_text())
    result["signatures"]["references"] = signature
    (run / "result.json").write_text(json.dumps(result))
    actual = sections.signatures(load_all([run]))
    assert list(actual)[:2] == ["BLEU", "chrF"]
    assert actual.get("references normalized by") == shown
    assert len(actual) == (2 if shown is None else 3)


def test_runs_are_named_by_what_differs(tmp_path):
    folders = [write_run(tmp_path / name / "run", examples=0) for name in "ab"]
    assert [run.name for run in load_all(folders)] == ["a/run", "b/run"]
    with pytest.raises(UserError, match="is not a run folder"):
        load_all([tmp_path])
    with pytest.raises(UserError, match="given twice"):
        load_all([folders[0], folders[0]])


def test_long_texts_are_cut_and_large_files_too(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", examples=4, tested=False)
    path = run / "outputs" / "validation.json"
    actual = json.loads(path.read_text())
    actual["outputs"][0] |= {"source": "s" * 5000, "reference": "r" * 5000, "output": "o" * 1500}
    path.write_text(json.dumps(actual))
    (single,) = load_all([run])
    outputs = [shown for group in sections.shown_outputs(single).values() for shown in group]
    first = next(shown for shown in outputs if shown.number == 1)
    assert (len(first.source), sum(len(text) for _, text in first.reference)) == (2001, 2001)
    assert "s" * 2001 not in shown(run).text
    monkeypatch.setattr(sections, "MAX_CHARACTERS", 11_499)
    assert not [label for _, label, _, _ in sections.downloads([single]) if "outputs" in label]
    monkeypatch.setattr(sections, "MAX_CHARACTERS", 11_500)
    (label,) = (label for _, label, _, _ in sections.downloads([single]) if "outputs" in label)
    assert label == "Validation outputs (the first 1 of 4)"


def test_numbers_are_readable():
    counts = {950: "950", 12_345: "12.3 k", 999_600: "1 M", 4_353_393: "4.35 M", 1.2e9: "1.2 G"}
    assert {number: sections.format_count(number) for number in counts} == counts
    assert [sections.format_duration(number) for number in (1.24, 9.94, 9.96, 65, 3725, 90_061)] == [
        *("1.2 s", "9.9 s", "0:10", "1:05", "1:02:05", "1 d 1:01:01")
    ]
    assert sections.format_difference(-0.25, "bleu") == "−0.25"
    assert sections.format_difference(0.25, "loss") == "+0.2500"
    assert [sections.format_p_value(p) for p in (1.0, 0.0123, 0.001, 0.00099)] == ["1.000", "0.012", "0.001", "< 0.001"]
    assert (sections.format_metric(None, "loss"), sections.format_metric(1.5, "bleu")) == ("–", "1.50")


@pytest.mark.long
def test_the_command_needs_no_jax(tmp_path):
    run = write_run(tmp_path / "run")
    command = "import sys; from tformer_jax.cli.report import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command, run], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(run / "report.html"), "False"]
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", tested=False, steps=20)
    held, path = lock(run), tmp_path / "watched.html"
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        assert "Running" in path.read_text()
        assert '<meta http-equiv="refresh" content="7">' in path.read_text()
        if len(waits) == 2:
            held.close()

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(run), "--watch", "7", "--output", str(path)])
    assert waits == [7, 7]
    assert "Ended early" in path.read_text()
    assert 'http-equiv="refresh"' not in path.read_text()


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path):
    run = write_run(tmp_path / "run", examples=0)
    for output, problem in ((tmp_path, "it is a folder; name a file"), (run / "config.json" / "a.html", "File exists")):
        with pytest.raises(UserError, match=f"--output .*: cannot be written.*{problem}"):
            report.main([str(run), "--output", str(output)])


@pytest.mark.parametrize("absent", [["jinja2"], ["plotly"], ["jinja2", "plotly"]])
def test_without_its_packages_the_extra_is_named(absent, monkeypatch):
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf'this command needs {" and ".join(absent)}: pip install -e "\.\[report\]"'):
        checks.require_pages("this command")
