"""The tables of the data of a run."""

import dataclasses
import json

from tests.data.test_directions import PAIRS, experiment
from tests.data.test_stages import staged_data
from tests.report.folders import write_run
from tformer_jax.data.summary import summarize
from tformer_jax.report.charts import all_charts
from tformer_jax.report.corpus import corpus_tables
from tformer_jax.report.html import render_report
from tformer_jax.report.run import load_all


def test_a_report_shows_splits_directions_and_languages(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path)
    summaries = summarize(cfg, corpus, tokenizers)
    splits = {name: dataclasses.asdict(summary) for name, summary in summaries.items()}
    folder = write_run(tmp_path / "run")
    splits["train"]["transforms"] = [("typos", 0.25)]
    splits["train"]["sides"]["source"]["tokens"] = 1234 * splits["train"]["read"]
    (folder / "data.json").write_text(json.dumps({"splits": splits, "warnings": ["dev is small"]}))
    (run,) = load_all([folder])
    tables = {table.title: table for table in corpus_tables(run)}
    assert [row[:2] for row in tables["Splits"].rows] == [("train", "90"), ("validation", "2")]
    assert tables["Splits"].rows[0][2].startswith("1,234.0 / ")
    assert [row[:2] for row in tables["Entries"].rows] == [(name, str(size)) for name, size in PAIRS.items()]
    assert [row[2] for row in tables["Entries"].rows] == ["67", "28", "5.6"]
    assert tables["Transforms"].rows == [("typos", "25")]
    texts = dict(row[:2] for row in tables["Languages"].rows)
    assert texts == {"de": "60", "en": "90", "fr": "25", "pt_BR": "5"}
    page = render_report([run])
    assert all(text in page for text in ("dev is small", "<summary>Languages", '<td class="n">5.6</td>'))


def test_a_report_shows_stages_and_where_they_began(tmp_path):
    cfg, corpus, tokenizers = staged_data(
        "windows", ("long 3, short until step 9", "linearly to short until step 50", "short")
    )
    held_out = corpus.train.parts[1][:3]
    corpus = dataclasses.replace(corpus, validation=held_out, test=held_out)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=40))
    splits = {"train": dataclasses.asdict(summarize(cfg, corpus, tokenizers)["train"])}
    events = [(9, "stage", "stage 2 of 3: linearly to short until step 50")] * 2  # a resumed run repeats it
    folder = write_run(tmp_path / "run", events=events)
    (folder / "data.json").write_text(json.dumps({"splits": splits, "warnings": []}))
    (run,) = load_all([folder])
    (rows,) = [table.rows for table in corpus_tables(run) if table.title == "Stages"]
    assert [row[1:] for row in rows] == [
        ("steps 1 to 9", "0", "long 75 %, short 25 %"),
        ("steps 10 to 40", "9", "long 75 % to 0 %, short 25 % to 100 %"),
        ("not reached", "", "short 100 %"),
    ]
    marks = {chart.key: [(mark["step"], mark["label"]) for mark in chart.marks] for chart in all_charts([run])}
    assert marks["loss"] == marks["validation_bleu"] == [(9, "stage 2")]


def test_a_run_without_statistics_has_no_tables(tmp_path):
    (run,) = load_all([write_run(tmp_path / "run")])
    assert corpus_tables(run) == []
    assert 'id="corpus"' not in render_report([run])
