"""What the server's page says about a run, from run folders written by hand."""

import dataclasses
import json

import numpy as np
import pytest

import tformer_jax as tj
from tests.report.folders import SIGNATURES, write_run
from tformer_jax import config
from tformer_jax.cli.run_description import EXAMPLES, LONGEST, describe_run, examples
from tformer_jax.report.outputs import Outputs


def run(folder, labels=None, **data) -> tj.Run:
    """Returns a run without a model."""
    cfg = config.load(folder / "config.json")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **data))
    return tj.Run(folder, cfg, None, None, None, labels)


def test_a_finished_translator(tmp_path):
    folder = write_run(tmp_path / "run")
    actual = describe_run(run(folder))
    result = json.loads((folder / "result.json").read_text())
    titles = {"BLEU": "bleu", "chrF": "chrf", "Exact match": "exact_match"}
    assert [each["title"] for each in actual["metrics"]] == list(titles)
    for each in actual["metrics"]:
        name = titles[each["title"]]
        assert float(each["value"].removesuffix(" %")) == pytest.approx(result["test"][name], abs=0.005)
        assert each["signature"] == SIGNATURES.get(name, "")
    assert (actual["split"], actual["languages"], actual["labels"]) == ("test", ("en", "de"), None)
    assert actual["facts"][0] == "710 k parameters"  # 66,048 + 131,712 + 512,000
    assert actual["facts"][-1] == "trained for 40 steps on 36 k tokens"
    short = describe_run(run(write_run(tmp_path / "short", steps=1, evaluations=1)))
    assert short["facts"][-1] == "trained for 1 step on 900 tokens"


def test_examples_are_those_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = json.loads((folder / "outputs" / "test.json").read_text())["outputs"]
    pairs = {row["source"]: row["reference"] for row in rows}
    actual = describe_run(run(folder))["examples"]
    assert len({each["text"] for each in actual}) == len(actual) == EXAMPLES
    assert all(pairs[each["text"]] == each["reference"] and len(each["text"]) <= LONGEST for each in actual)
    assert actual == describe_run(run(folder))["examples"]


def test_examples_of_many_languages_name_theirs():
    """The same source with two targets is two examples."""
    rows = [("a", "b", "en-de"), ("a", "c", "en-pt_BR"), ("d", "e", "de-en")]
    records = [{"source": s, "reference": r, "output": "", "direction": name} for s, r, name in rows]
    actual = examples(Outputs.from_json({"outputs": records}))
    by_hand = [("en", "de"), ("en", "pt_BR"), ("de", "en")]
    assert sorted(actual, key=lambda pair: pair["reference"]) == [
        {"text": s, "reference": r, "source_language": source, "target_language": target}
        for (s, r, _), (source, target) in zip(rows, by_hand, strict=True)
    ]


def test_a_run_that_has_not_finished(tmp_path):
    folder = write_run(tmp_path / "run", tested=False)
    actual = describe_run(run(folder))
    assert actual["split"] == "validation"
    assert [each["value"] for each in actual["metrics"]] == ["30.00", "50.00", "10.00 %"]
    assert actual["examples"]


def test_a_folder_with_only_a_config(tmp_path):
    folder = write_run(tmp_path / "run", tested=False)
    for path in [*folder.glob("*.jsonl"), *folder.glob("outputs/*"), folder / "model.json"]:
        path.unlink()
    actual = describe_run(run(folder))
    assert (actual["metrics"], actual["examples"]) == ([], [])
    assert actual["facts"] == ["6 + 6 layers", "width 512", "8 heads"]


def test_scores_are_those_of_the_model_that_is_served(tmp_path):
    """Regression test: an ensemble, or a quantized run, had the scores and the size of the run alone."""
    alone = run(write_run(tmp_path / "run"))
    params = {"kernel": np.zeros((30, 100))}, {"kernel": np.zeros((20, 100))}
    actual = describe_run(dataclasses.replace(alone, ensemble=(tmp_path / "other",), params=params))
    assert (actual["metrics"], actual["facts"]) == ([], ["ensemble of 2 models", "5,000 parameters together"])
    quantized = dataclasses.replace(alone.config.model, quantization="int8")
    actual = describe_run(dataclasses.replace(alone, config=dataclasses.replace(alone.config, model=quantized)))
    assert (actual["metrics"], actual["facts"][-1]) == ([], "quantized: int8")


def test_other_families(tmp_path):
    actual = describe_run(run(write_run(tmp_path / "labels", family="classifier"), labels=("de", "en")))
    assert [each["title"] for each in actual["metrics"]] == ["Accuracy", "Loss"]
    assert (actual["languages"], actual["labels"]) == (None, ("de", "en"))
    actual = describe_run(run(write_run(tmp_path / "text", family="decoder_lm")))
    assert [each["title"] for each in actual["metrics"]] == ["Loss"]


def test_languages_that_nobody_set_are_not_told(tmp_path):
    folder = write_run(tmp_path / "run")
    assert describe_run(run(folder, source="tsv", train=("a.tsv",)))["languages"] is None
    assert describe_run(run(folder, source="tsv", train=("a.tsv",), target_language="zh"))["languages"] == ("en", "zh")
