"""The requests of OpenAI's Python client and of lm-evaluation-harness, literally, and what these clients read."""

import base64
import dataclasses
import struct
import threading

import httpx
import numpy as np
import pytest

from tests.serving.fake_engine import BYTES, FakeEngine, served
from tests.serving.live import around, live, until
from tformer_jax.special_tokens import EOS

COMPLETE, EMBED, CLASSIFY = "/v1/completions", "/v1/embeddings", "/classify"
EVERY_ARGUMENT = {
    "model": "fake",
    "prompt": "abc",
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": None,
    "max_tokens": 16,
    "n": 1,
    "presence_penalty": 0,
    "seed": 7,
    "stop": None,
    "stream": False,
    "stream_options": None,
    "suffix": None,
    "temperature": 0,
    "top_p": 1,
    "user": "someone",
}
"""A call of `client.completions.create` with a value that changes nothing for each argument."""


@pytest.fixture(scope="module")
def encoder():
    with live("classifier") as server:
        yield server


def text_of(server, **body):
    (choice,) = server.post(COMPLETE, **body).json()["choices"]
    return choice["text"]


def test_models_are_listed_and_retrieved(lm):
    (model,) = lm.client.get("/v1/models").json()["data"]
    assert lm.client.get("/v1/models/fake").json() == model
    assert set(model) == {"id", "object", "created", "owned_by"}
    missing = lm.client.get("/v1/models/organisation/gpt-4")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    counted = 'tformer_requests_total{route="/v1/models/{name:path}",status="404"}'
    until(lambda: lm.metric(counted) == 1)


def test_neutral_values_of_all_arguments(lm):
    assert text_of(lm, **EVERY_ARGUMENT) == "cba"
    assert lm.post(COMPLETE, **EVERY_ARGUMENT | {"temperature": 1, "n": 2, "best_of": 2}).status_code == 200
    assert text_of(lm, **EVERY_ARGUMENT | {"suffix": "", "stop": [], "stream_options": {}}) == "cba"


def test_prompts_as_token_ids(lm, translator):
    ids = BYTES.encode("abc")
    assert text_of(lm, prompt=ids, temperature=0) == "cba"
    actual = lm.post(COMPLETE, prompt=[ids, "é", BYTES.encode("é")], temperature=0, echo=True).json()
    assert [choice["text"] for choice in actual["choices"]] == ["abccba", "éé", "éé"]
    assert actual["usage"]["prompt_tokens"] == 3 + 2 + 2
    for prompt in (ids, [*ids, EOS], "abc"):
        assert text_of(translator, prompt=prompt) == "cba"
        assert translator.engine.seen[-1].ids == (*ids, EOS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_nothing_is_generated(lm, stream, echo):
    before, body = len(lm.engine.seen), {"prompt": ["abc", "d"], "max_tokens": 0, "echo": echo}
    parts = lm.stream(COMPLETE, **body) if stream else [lm.post(COMPLETE, **body).json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert [choice["text"] for choice in choices] == (["abc", "d"] if echo else ["", ""])
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert stream or parts[0]["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    assert len(lm.engine.seen) == before


def test_log_probabilities(lm):
    def answer(**body):
        (choice,) = lm.post(COMPLETE, prompt="ab", temperature=0, **body).json()["choices"]
        return choice["text"], choice["logprobs"]

    expected = {"tokens": ["b", "a"], "token_logprobs": [-1, -1], "text_offset": [0, 1]}
    assert answer(logprobs=0) == ("ba", {**expected, "top_logprobs": [{"b": -1}, {"a": -1}]})
    assert answer(logprobs=2) == ("ba", {**expected, "top_logprobs": [{"b": -1, "c": -2}, {"a": -1, "b": -2}]})
    expected = {"tokens": ["a", "b", "b"], "token_logprobs": [None, -1, -1], "text_offset": [0, 1, 2]}
    top = {"top_logprobs": [None, {"b": -1}, {"b": -1}]}
    assert answer(logprobs=1, echo=True, max_tokens=1) == ("abb", {**expected, **top})
    assert answer(logprobs=1, echo=True, max_tokens=0) == (
        "ab",
        {name: row[:2] for name, row in {**expected, **top}.items()},
    )
    assert answer(logprobs=1, max_tokens=0)[1] == {name: [] for name in {**expected, **top}}


def test_a_stream_ends_with_the_log_probabilities_of_each_choice(lm):
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 1, "logprobs": 1, "echo": True}
    whole = lm.post(COMPLETE, **body).json()
    *chunks, last = lm.stream(COMPLETE, **body, stream_options={"include_usage": True})
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert parts[-4:] == [{**choice, "text": ""} for choice in whole["choices"]]
    assert {(part["logprobs"], part["finish_reason"]) for part in parts[:-4]} == {(None, None)}
    texts = ["".join(part["text"] for part in parts if part["index"] == index) for index in range(4)]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_a_stream_ends_with_its_usage_if_the_client_asks_for_it(lm):
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 1}
    *chunks, last = lm.stream(COMPLETE, **body, stream_options={"include_usage": True})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]) == ([], lm.post(COMPLETE, **body).json()["usage"])
    neutral = {"include_usage": False, "include_obfuscation": False}
    assert not any("usage" in chunk for chunk in lm.stream(COMPLETE, **body, stream_options=neutral))


def test_log_probabilities_of_a_translation(translator):
    (choice,) = translator.post(COMPLETE, prompt="ab", logprobs=0).json()["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ba", ["b", "a"])
    (blank,) = translator.post(COMPLETE, prompt=" ", logprobs=0).json()["choices"]
    assert (blank["text"], blank["logprobs"]["tokens"]) == ("", [])


def test_embeddings_as_numbers_and_as_base64(encoder):
    body = {"input": ["abc", BYTES.encode("é")], "model": "fake", "user": "someone", "dimensions": None}
    actual = encoder.post(EMBED, **body, encoding_format="float").json()
    assert [each["embedding"] for each in actual["data"]] == [[3, 0.5], [2, 0.5]]
    assert [(each["object"], each["index"]) for each in actual["data"]] == [("embedding", 0), ("embedding", 1)]
    assert (actual["object"], actual["model"]) == ("list", "fake")
    assert actual["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    actual = encoder.post(EMBED, **body, encoding_format="base64").json()
    assert [struct.unpack("<2f", base64.b64decode(each["embedding"])) for each in actual["data"]] == [
        (3, 0.5),
        (2, 0.5),
    ]
    assert encoder.client.get("/health").json()["family"] == "classifier"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input": ""}, "the text is empty"),
        ({"input": ["a", "b" * 2002]}, "text 2: the text has 2002 tokens, but the model takes at most 2001"),
        ({"input": ["a"] * 2049}, "input: at most 2048 texts at once"),
        ({"input": "a", "dimensions": 2}, "dimensions: is not supported by this server"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: is not a known value"),
        ({"input": 5}, "input: must be a text or a list"),
    ],
)
def test_embeddings_that_are_refused(encoder, body, sentence):
    answer = encoder.client.post(EMBED, json=body)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_routes_of_other_families(encoder, lm):
    for server, path in ((encoder, COMPLETE), (encoder, "/translate"), (lm, EMBED), (lm, CLASSIFY)):
        answer = server.post(path, prompt="a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "wrong_family")
    with around(None, served(FakeEngine(), "masked_lm")) as service:
        assert "which does not have a page: use /v1/embeddings" in service.client.get("/").json()["error"]["message"]
    untrained = dataclasses.replace(encoder.model, labels=())
    with around(None, untrained) as service:
        assert "is not trained: use /v1/embeddings" in service.post(CLASSIFY, input="a").json()["error"]["message"]


def test_probabilities_of_labels(encoder):
    actual = encoder.post(CLASSIFY, input=["abc", BYTES.encode("a")], model="fake").json()
    assert [(each["index"], each["label"], each["num_classes"]) for each in actual["data"]] == [
        (0, "long", 3),
        (1, "short", 3),
    ]
    np.testing.assert_allclose([each["probs"] for each in actual["data"]], [[0.2, 0.6, 0.2], [1 / 3] * 3], rtol=1e-6)
    assert (actual["object"], actual["usage"]) == ("list", {"prompt_tokens": 4, "total_tokens": 4})
    assert encoder.client.get("/").headers["content-type"].startswith("text/html")


def test_a_function_of_the_model_that_fails(encoder, monkeypatch):
    def fails(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setitem(encoder.model.__dict__, "embed", fails)
        answer = encoder.post(EMBED, input="a")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert encoder.post(EMBED, input="a").status_code == 200


def test_functions_that_wait_are_limited_and_dropped_with_their_clients(monkeypatch):
    gate, calls = threading.Event(), []

    def slow(rows):
        calls.append(rows)
        gate.wait(10)
        return [row for row in rows if False]

    with live("classifier", queue=2) as server:
        monkeypatch.setitem(server.model.__dict__, "embed", slow)
        thread, actual = server.background(EMBED, input="a")
        until(lambda: calls)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + EMBED, json={"input": "b"}, timeout=0.2)
        until(lambda: len(server.worker.jobs) == 1)
        second, _ = server.background(EMBED, input="c")
        until(lambda: len(server.worker.jobs) == 2)
        answer = server.post(EMBED, input="d")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        gate.set()
        thread.join()
        second.join()
        assert actual[0].status_code == 200
        assert len(calls) == 2


def test_an_api_key():
    with live(key="secret") as server:
        for header in (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer sécret".encode("latin-1")},
        ):
            answer = server.client.post(COMPLETE, json={"prompt": "a"}, headers=header)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert not server.engine.seen
        for path in ("/metrics", "/v1/models", "/nowhere"):
            assert server.client.get(path).status_code == 401
        assert (server.client.get("/health").status_code, server.client.get("/").status_code) == (200, 200)
        for scheme in ("Bearer", "bearer"):
            answer = server.client.post(COMPLETE, json={"prompt": "a"}, headers={"Authorization": f"{scheme} secret"})
            assert answer.status_code == 200


def test_the_tokenizer_that_lm_evaluation_harness_uses(lm):
    info = lm.client.get("/tokenizer_info").json()
    assert info == {"bos_token": None, "eos_token": "</s>", "pad_token": "<pad>"}
    asked = {"prompt": "é a", "add_special_tokens": False}
    assert lm.post("/tokenize", **asked).json() == {"tokens": BYTES.encode("é a"), "count": 4, "max_model_len": 2001}
    assert lm.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"] == [EOS]
    assert lm.post("/detokenize", tokens=BYTES.encode("é a")).json() == {"prompt": "é a"}
    assert lm.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    documents = [*BYTES.encode("a"), EOS, *BYTES.encode("é")]
    assert lm.post("/detokenize", tokens=documents).json() == {"prompt": "a</s>é"}
    echoed = lm.post("/v1/completions", prompt=documents, echo=True, max_tokens=0).json()["choices"][0]
    assert echoed["text"] == "aé"
    for tokens in ([-1], [260], ["a"], "a"):
        assert lm.post("/detokenize", tokens=tokens).status_code == 400
