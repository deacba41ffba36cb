"""A run within lm-evaluation-harness, compared with what the harness reads from the server."""

import json
import math

import numpy as np
import pytest

import tformer_jax as tj
from tests.serving.test_engine import LETTERS, TOKENIZERS, as_lm_eval_reads, parts
from tformer_jax.base.errors import UserError

pytestmark = pytest.mark.slow
QUESTIONS = [
    {"question": "abc", "choices": ["g", "fe", "aaaa"], "answer": 0},
    {"question": "g", "choices": ["bb", "c"], "answer": 1},
]
CHOICES = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
TASKS = {
    "choices": {**CHOICES, "doc_to_text": "{{question}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}]},
    "outputs": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 5, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "documents": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    harness = pytest.importorskip("tformer_jax.lab.harness", exc_type=ImportError)
    cfg, model, params, server = parts("decoder_lm")
    with server as started:
        yield (
            harness.HarnessModel(tj.Run(tmp_path_factory.mktemp("run"), cfg, model, params, TOKENIZERS, None)),
            started,
        )


def test_continuations_are_scored_as_by_the_server(lm):
    model, server = lm
    pairs = [(context, rest) for context in ("fedcba", "g") for rest in [*"abcdefg", "gfg"]]
    ids = [LETTERS.encode("".join(pair)) for pair in pairs]
    body = {"prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    choices = server.post("/v1/completions", **body).json()["choices"]
    actual = model._loglikelihood_tokens([(None, *map(LETTERS.encode, pair)) for pair in pairs])
    for (context, _), choice, (total, greedy) in zip(pairs, choices, actual, strict=True):
        expected = as_lm_eval_reads(choice, len(context))
        assert total == pytest.approx(expected[0], abs=1.5e-6)
        assert greedy == expected[1]
    assert {greedy for _, greedy in actual} == {True, False}


def test_tasks_of_the_harness(lm, tmp_path):
    """Its own evaluation of three tasks gives what the Python API computes."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    model, _ = lm
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}, "test_split": "test"}
    for name, task in TASKS.items():  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    actual = lm_eval.simple_evaluate(model=model, tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0)
    right = 0
    for sample in actual["samples"]["choices"]:
        expected = [scored.total for scored in model._run.score(sample["arguments"])]
        assert [float(response[0]) for response in sample["filtered_resps"]] == pytest.approx(expected, abs=1.5e-6)
        right += int(np.argmax(expected)) == sample["doc"]["answer"]
    assert math.isclose(actual["results"]["choices"]["acc,none"], right / len(QUESTIONS))
    for sample in actual["samples"]["outputs"]:
        (text,) = model._run.generate([sample["doc"]["question"]], temperature=0, max_new_tokens=5)
        assert sample["filtered_resps"] == [text.split("e")[0]]
    for sample in actual["samples"]["documents"]:
        (scored,) = model._run.score([("", sample["doc"]["question"])])
        assert float(sample["filtered_resps"][0]) == pytest.approx(scored.total, abs=1.5e-6)


def test_texts_longer_than_the_model_reads(lm, caplog):
    """Each token of a document is predicted once; a context loses its beginning, and a continuation nothing."""
    model, _ = lm
    length = model.max_length
    long = LETTERS.encode("abcdefg" * length)
    ((total, _),) = model._loglikelihood_tokens([(None, long, long[:2])])
    ((expected, _),) = model._loglikelihood_tokens([(None, long[-(length - 1) :], long[:2])])
    assert total == expected
    assert "1 contexts are too long for the model" in caplog.text
    with pytest.raises(UserError, match=f"a continuation has {length + 1} tokens, but model.max_length is {length}"):
        model._loglikelihood_tokens([(None, long, long[: length + 1])])
    with pytest.raises(UserError, match="max_gen_toks=999 leaves no room for a context in model.max_length"):
        model._fit_contexts(["a"], 999)
    assert model._fit_contexts(["abcdefg" * length], length - 3) == ["efg"]
