"""The tables of the data of a run."""

import dataclasses
import json

from tests.data.test_directions import PAIRS, experiment
from tests.report.folders import write_run
from tformer_jax.data.summary import summarize
from tformer_jax.report.corpus import corpus_tables
from tformer_jax.report.html import render_report
from tformer_jax.report.run import load_all


def test_a_report_shows_splits_directions_and_languages(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path)
    summaries = summarize(cfg, corpus, tokenizers)
    splits = {name: dataclasses.asdict(summary) for name, summary in summaries.items()}
    folder = write_run(tmp_path / "run")
    (folder / "data.json").write_text(json.dumps({"splits": splits, "warnings": ["dev is small"]}))
    (run,) = load_all([folder])
    tables = {table.title: table for table in corpus_tables(run)}
    assert [row[:2] for row in tables["Splits"].rows] == [("train", "90"), ("validation", "2")]
    assert [row[:2] for row in tables["Entries"].rows] == [(name, str(size)) for name, size in PAIRS.items()]
    assert [row[2] for row in tables["Entries"].rows] == ["67", "28", "5.6"]
    texts = dict(row[:2] for row in tables["Languages"].rows)
    assert texts == {"de": "60", "en": "90", "fr": "25", "pt_BR": "5"}
    page = render_report([run])
    assert all(text in page for text in ("dev is small", "<summary>Languages", '<td class="n">5.6</td>'))


def test_a_run_without_statistics_has_no_tables(tmp_path):
    (run,) = load_all([write_run(tmp_path / "run")])
    assert corpus_tables(run) == []
    assert 'id="corpus"' not in render_report([run])
