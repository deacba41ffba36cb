"""Runs OpenAI's Python client and lm-evaluation-harness against servers of small runs.

python -m tests.programs.clients --record tests/programs/clients.json

Requires `pip install openai "lm-eval[api]>=0.4.10"`.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tformer_jax as tj
from tests import commands
from tests.cli.finished_runs import run_of_conversations

KEY = "secret"
CONVERSATIONS = "conversations"
QUESTIONS = [
    {"question": "import", "choices": ["os", "zzz", "the whole of it"], "answer": 0},
    {"question": "def f(self):\n    return", "choices": ["self", "qqqq"], "answer": 0},
    {"question": "for i in", "choices": ["§§", "range(10):", "x"], "answer": 1},
    {"question": "é漢", "choices": ["a", "é"], "answer": 1},
]
CHOICES = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {**CHOICES, "doc_to_text": "{{question}}", "metric_list": [{"metric": "acc"}]},
    "without_context": {**CHOICES, "doc_to_text": "", "metric_list": [{"metric": "acc"}]},
    "outputs": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 20, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "documents": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


@contextlib.contextmanager
def server(run: Path, cache: Path) -> Iterator[str]:
    """Serves a run, with an API key; yields the URL."""
    flags = ["--port", "0", "--api-key", KEY]
    with commands.start([sys.executable, "scripts/serve.py", "--run", str(run), *flags], cache) as process:
        try:
            first = next(line for line in process.stdout if line.startswith("Serving"))
            yield first.split(" at ")[1].split(";")[0]
        finally:
            process.terminate()


def models(client: Any, run: Path) -> None:
    """Models are listed and retrieved; another one is not found."""
    import openai

    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    try:
        client.models.retrieve("gpt-4")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("another model was found")


def completions(client: Any, run: Path) -> None:
    """A completion, a stream and prompts as token ids are those of scripts/generate.py."""
    (expected,) = output_of("generate", run, "import", "--max-new-tokens", "12", "--temperature", "0")
    model = client.models.list().data[0].id
    asked = {"model": model, "prompt": "import", "max_tokens": 12, "temperature": 0, "n": 1, "best_of": 1}
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "suffix": None, "user": "someone"}
    whole = client.completions.create(**asked, **neutral)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert (last.choices, last.usage) == ([], whole.usage)
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    assert [line(f"import{text}") for text in (whole.choices[0].text, streamed)] == [expected] * 2


def log_probabilities(client: Any, run: Path) -> None:
    """`echo` and `logprobs` without new tokens give what scripts/score.py gives."""
    model, text = client.models.list().data[0].id, "for i in range(10):"
    asked = {"model": model, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 5}
    (choice,) = client.completions.create(**asked).choices
    (expected,) = map(json.loads, output_of("score", run, "--per-token", text))
    assert choice.text == text == "".join(choice.logprobs.tokens)
    assert np.allclose(choice.logprobs.token_logprobs[1:], expected["log_probabilities"], atol=1e-6)


def errors(client: Any, run: Path) -> None:
    """Mistakes raise the exceptions of the client, with the server's sentence."""
    import openai

    model = client.models.list().data[0].id
    for settings, kind, sentence in (
        ({"suffix": "x"}, openai.BadRequestError, "suffix: is not supported by this server"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens: must be at least 0"),
        ({"extra_headers": {"Authorization": "Bearer x"}}, openai.AuthenticationError, "requires its API key"),
    ):
        try:
            client.completions.create(model=model, prompt="a", **settings)
        except kind as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(f"{settings} was accepted")


def harness(client: Any, run: Path) -> None:
    """Tasks of lm-evaluation-harness give the log-probabilities, the outputs and the accuracy of the Python API.

    Texts without a context follow the token that starts texts in both.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    loaded = tj.load(run)
    length = loaded.config.model.max_length
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder, "questions.jsonl")
        questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(questions)}},
            "test_split": "test",
        }
        for name, task in TASKS.items():  # JSON is YAML
            Path(folder, f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
        model = client.models.list().data[0].id
        arguments = {"base_url": f"{client.base_url}completions", "model": model, "auth_token": KEY}
        actual = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={**arguments, "max_length": length, "batch_size": 2},
            tasks=[*TASKS],
            task_manager=TaskManager(include_path=folder),
            bootstrap_iters=0,
        )
    samples = actual["samples"]
    right = 0
    for sample in (*samples["choices"], *samples["without_context"]):
        expected = [scored.total for scored in loaded.score(sample["arguments"])]
        values = [float(response[0]) for response in sample["filtered_resps"]]
        assert np.allclose(values, expected, rtol=1e-4), (values, expected)
        right += bool(sample["arguments"][0][0]) and int(np.argmax(expected)) == sample["doc"]["answer"]
    assert math.isclose(actual["results"]["choices"]["acc,none"], right / len(QUESTIONS))
    for sample in samples["outputs"]:
        (text,) = loaded.generate([sample["doc"]["question"]], temperature=0, max_new_tokens=20)
        assert sample["filtered_resps"] == [text.split("e")[0]], sample
    for sample in samples["documents"]:
        (scored,) = loaded.score([("", sample["doc"]["question"])])
        assert math.isclose(float(sample["filtered_resps"][0]), scored.total, rel_tol=1e-4), (sample, scored.total)


def conversations(client: Any, run: Path) -> None:
    """An answer and a stream are those of scripts/generate.py --chat; log-probabilities are those of its tokens."""
    model = client.models.list().data[0].id
    asked = {"model": model, "messages": [{"role": "user", "content": "How are you?"}], "temperature": 0}
    asked |= {"max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2, "store": False}
    expected = output_of("generate", run, "--chat", "How are you?", "--max-new-tokens", "8", "--temperature", "0")
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert choice.message.content == streamed == "\n".join(expected), (choice.message.content, streamed, expected)
    assert (choice.message.role, last.choices, last.usage) == ("assistant", [], whole.usage)
    assert len(choice.logprobs.content) == 8 and all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
    chosen = [each.logprob == each.top_logprobs[0].logprob for each in choice.logprobs.content]
    assert all(chosen), "greedy decoding takes the most probable token"


def embeddings(client: Any, run: Path) -> None:
    """Embeddings as base64, which the client asks for by itself, equal those as numbers."""
    asked = {"model": client.models.list().data[0].id, "input": ["a warm film", "dull"]}
    actual = [client.embeddings.create(**asked, **form).data for form in ({}, {"encoding_format": "float"})]
    first, second = (np.array([each.embedding for each in data], np.float32) for data in actual)
    assert first.shape == (2, commands.SMALL["model.dim"]) and np.array_equal(first, second)


CHECKS: dict[str, tuple[dict[str, Any], tuple[Callable[[Any, Path], None], ...]]] = {
    "packed language model": (
        {"data__batching": "windows"},  # which has a token that starts texts
        (models, completions, log_probabilities, errors, harness),
    ),
    "classification": ({}, (models, embeddings)),
    CONVERSATIONS: ({}, (models, conversations)),
}
"""Changed settings of a run of `commands.KINDS`, and its checks."""


def output_of(command: str, run: Path, *flags: str) -> list[str]:
    """Returns the lines that a command prints."""
    arguments = [sys.executable, f"scripts/{command}.py", "--run", str(run), *flags]
    return subprocess.run(arguments, cwd=commands.ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def line(text: str) -> str:
    """Returns the first line of a text."""
    return text.splitlines()[0]


def main() -> None:
    """Prints and records the checks; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS, help="kinds of runs (default: all)")
    options = parser.parse_args()
    import openai

    os.environ |= {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    actual: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (changes, checks) in CHECKS.items():
            if kind not in options.only:
                continue
            run = Path(folder, kind.replace(" ", "_"))
            if kind == CONVERSATIONS:
                run = run_of_conversations(Path(folder))
            else:
                train = commands.command(kind, run, train__steps=20, **changes)
                subprocess.run(train, cwd=commands.ROOT, check=True)
            with server(run, Path(folder, "cache")) as url:
                client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
                for check in checks:
                    actual[f"{kind}: {check.__name__}"] = outcome(check, client, run)
    if options.record:
        versions = {name: importlib.metadata.version(name) for name in ("openai", "lm_eval")}
        commands.write_record(options.record, "tests.programs.clients", clients=versions, checked=actual)
    raise SystemExit(any(result != "passed" for result in actual.values()))


def outcome(check: Callable[[Any, Path], None], client: Any, run: Path) -> str:
    """Runs a check, prints and returns its outcome."""
    try:
        check(client, run)
        result = "passed"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    print(f"{check.__name__}: {result}", flush=True)
    return result


if __name__ == "__main__":
    main()
