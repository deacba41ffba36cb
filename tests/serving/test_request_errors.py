"""Invalid requests get a status and one sentence, and the server keeps running."""

import dataclasses
import json

import pytest

from tests.serving.fake_engine import FakeEngine, served
from tests.serving.live import around, live, until
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.serving import json_body
from tformer_jax.serving.errors import RequestError

COMPLETE, TRANSLATE = "/v1/completions", "/translate"


def refused(response, status: int, sentence: str, param: str | None = None) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert sentence in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        *(
            ({} if wrong is None else {"prompt": wrong}, "prompt: must be a text, token ids, or a list of", "prompt")
            for wrong in (None, [], [1, "a"], [1.5], [True], [[]], [[5, "a"]], [["a"]], [[[5]]], [None])
        ),
        ({"prompt": 5}, "prompt: must be a text or a list, not an integer", "prompt"),
        ({"prompt": {"a": 1}}, "not an object", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": ["a", ""]}, "text 2: the prompt is empty", "prompt"),
        ({"prompt": "a" * 2001}, "takes at most 2000", "prompt"),
        ({"prompt": ["a", [5] * 2001]}, "text 2: the prompt has 2001 tokens", "prompt"),
        ({"prompt": "a" * 2003, "max_tokens": 0}, "takes at most 2002", "prompt"),
        ({"prompt": [5, -1]}, "prompt: token id -1 is not in 0, ..., 259", "prompt"),
        ({"prompt": [[5], [260]]}, "prompt: token id 260 is not in", "prompt"),
        ({"prompt": ["a"] * 9}, "prompt: at most 8 texts at once", "prompt"),
        ({"prompt": "a", "max_token": 5}, "unknown field; did you mean 'max_tokens'?", "max_token"),
        ({"prompt": "a", "logprobs": 6}, "logprobs: must be at most 5", "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs: must be an integer or null, not true or false", "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of: must equal n=1", "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix: is not supported by this server; leave it out", "suffix"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias: is not supported by this server", "logit_bias"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty: is not supported by", "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": False}, "frequency_penalty: is not supported", "frequency_penalty"),
        ({"prompt": "a", "user": 5}, "user: must be a text or null, not an integer", "user"),
        ({"prompt": "a", "stream_options": True}, "must be an object, not true or false", "stream_options"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "must be true or false", "include_usage"),
        (
            {"prompt": "a", "stream_options": {"include_usage": []}},
            "must be true or false, not a list",
            "include_usage",
        ),
        (
            {"prompt": "a", "stream_options": {"usage": True}},
            "'usage': unknown field",
            "usage",
        ),
        ({"prompt": "a", "stream": False, "stream_options": {"include_usage": True}}, "needs stream", "stream_options"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens: must be at least 0", "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens: must be at most", "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "must be an integer or null, not a number", "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "not true or false", "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature: must be at least 0", "temperature"),
        ({"prompt": "a", "temperature": 1e300}, "temperature: must be at most 100", "temperature"),
        ({"prompt": "a", "temperature": 1e-9}, "temperature: must be 0 (greedy) or at least", "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "must be a number or null, not a text", "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p: must be at most 1", "top_p"),
        ({"prompt": "a", "top_k": 0}, "top_k: must be at least 1", "top_k"),
        ({"prompt": "a", "min_p": -0.1}, "min_p: must be at least 0", "min_p"),
        ({"prompt": "a", "n": 65}, "n: must be at most 64", "n"),
        ({"prompt": "a", "n": 5}, "5 outputs need more than 4 rows", None),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n: must be 1 for temperature 0", "n"),
        ({"prompt": "a", "stop": [""]}, "stop: must be a text, or a list of at most 16", "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop: must be a text, or a list of at most 16", "stop"),
        ({"prompt": "a", "stop": "x" * 201}, "texts of 1 to 200 characters", "stop"),
        ({"prompt": "a", "stop": [["x"]]}, "stop: must be a text, or a list of at most 16", "stop"),
        ({"prompt": "a", "seed": -1}, "seed: must be at least 0", "seed"),
        ({"prompt": "a", "stream": "yes"}, "stream: must be true or false, not a text", "stream"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields(lm, body, sentence, param, stream):
    refused(lm.post(COMPLETE, **({"stream": True} if stream else {}) | body), 400, sentence, param)


@pytest.mark.parametrize("body", [{}, {"tokens": {"a": 1}}, {"tokens": "a"}, {"tokens": [1.5]}])
def test_tokens_that_are_no_list_of_ids(lm, body):
    refused(lm.post("/detokenize", **body), 400, "tokens: must be a list of token ids", "tokens")


def test_a_text_to_tokenize_is_needed(lm):
    refused(lm.post("/tokenize"), 400, "prompt: must be a text", "prompt")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"max_tokens": 1}, "max_tokens: must be at least 2, the tokens of 'ab', with which every output starts"),
        ({"stop": ["x", "b"]}, "stop: 'b' occurs in 'ab', with which every output starts"),
    ],
)
def test_outputs_that_end_within_the_prefix_of_the_run(lm, body, sentence):
    decode = dataclasses.replace(lm.model.decode, prefix="ab")
    with around(lm.engine, dataclasses.replace(lm.model, decode=decode)) as server:
        refused(server.post(COMPLETE, prompt="a", **body), 400, sentence, next(iter(body)))


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ({}, "text: must be a text, token ids, or a list of texts", "text"),
        ({"text": "a", "n_best": 17}, "n_best: must be at most 16", "n_best"),
        ({"text": "a", "beams": 0}, "beams: must be at least 1", "beams"),
        ({"text": "a", "beams": 2, "n_best": 3}, "n_best: needs at least as many beams: write 3 for beams", "n_best"),
        ({"text": "a", "temperature": 1}, "'temperature': unknown field", "temperature"),
    ],
)
def test_wrong_fields_of_translate(translator, body, sentence, param):
    refused(translator.post(TRANSLATE, **body), 400, sentence, param)


def test_log_probabilities_that_do_not_exist(translator):
    sentence = "logprobs: is not supported for the tokens of a source; leave out echo"
    refused(translator.post(COMPLETE, prompt="a", echo=True, logprobs=1), 400, sentence, "logprobs")
    engine = FakeEngine()
    with around(engine, dataclasses.replace(served(engine, "decoder_lm"), prefix_lm=True)) as server:
        sentence = "logprobs: is not supported for a model with prefix_lm=True; leave it out"
        refused(server.post(COMPLETE, prompt="a", logprobs=1), 400, sentence, "logprobs")


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'{"prompt": "a"} x', "the body is not JSON"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "a lone surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "has the number NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "has the number -Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "has the number 1e999"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "which is out of range"),
        (b'{"prompt": "a", "prompt": "b"}', "has a duplicate field"),
    ],
)
def test_bodies_that_are_not_strict_json(lm, raw, sentence):
    response = lm.client.post(COMPLETE, content=raw, headers={"Content-Type": "application/json"})
    refused(response, 400, sentence)


def test_a_body_may_not_be_nested_deeper_than_python_reads(lm):
    with pytest.raises(RequestError, match="nested too deeply"):
        json_body.parse(b"[" * 200_000)
    body = b'{"prompt": ' + b"[" * 4900 + b"]" * 4900 + b"}"
    response = lm.client.post(COMPLETE, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and lm.post(COMPLETE, prompt="ab").status_code == 200


def test_the_wrong_content_type_route_method_family_or_model(lm, translator):
    refused(lm.client.post(COMPLETE, content=b'{"prompt": "a"}'), 415, "must be application/json")
    refused(lm.client.get("/nowhere"), 404, "/nowhere is not a route")
    response = lm.client.get(COMPLETE)
    refused(response, 405, "does not accept GET")
    assert response.headers["allow"] == "POST"
    refused(lm.client.post("/health"), 405, "does not accept POST")
    refused(lm.post(TRANSLATE, text="a"), 404, "serves a decoder_lm model, which does not translate")
    refused(lm.post(COMPLETE, prompt="a", model="gpt-4"), 404, "this server serves only 'fake'", "model")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(lm, chunked):
    body = json.dumps({"prompt": "a" * 10_000}).encode()
    content = iter([body[:5000], body[5000:]]) if chunked else body
    response = lm.client.post(COMPLETE, content=content, headers={"Content-Type": "application/json"})
    refused(response, 413, "more than 10000 bytes")
    assert lm.post(COMPLETE, prompt="ab").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1", "", "::", "a b"]
)
def test_host_names_of_other_machines(lm, host):
    refused(lm.client.get("/health", headers={"Host": host}), 403, "answers only to localhost")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000", "[::1]"])
def test_host_names_of_this_machine(lm, host):
    assert lm.client.get("/health", headers={"Host": host}).status_code == 200


def test_any_host_name_if_the_server_is_public():
    with live(loopback=False) as server:
        assert server.client.get("/health", headers={"Host": "model.example"}).status_code == 200


HEAD = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def answer_to(server, request: str) -> str:
    """Returns the response to bytes after which the client sends nothing; the server closes the connection or waits."""
    with server.raw() as connection:
        connection.sendall(f"{HEAD}{request}".encode())
        return connection.recv(9999).decode()


def test_a_declared_size_above_the_limit_is_refused_before_reading(lm):
    assert answer_to(lm, f"Content-Length: {10**15}\r\n\r\n").startswith("HTTP/1.1 413 ")


def test_an_endless_body_is_refused_at_the_limit(lm):
    chunk = f"2ee0\r\n{'x' * 12_000}\r\n"
    assert answer_to(lm, f"Transfer-Encoding: chunked\r\n\r\n{chunk}").startswith("HTTP/1.1 413 ")


def test_a_body_that_arrives_too_slowly():
    with live(body_timeout=0.2) as server:
        answer = answer_to(server, "Content-Length: 99\r\n\r\n{")
        assert answer.startswith("HTTP/1.1 408 ")
        assert "did not arrive within 0.2 seconds" in answer
        assert "connection: close" in answer.lower()


def test_requests_that_are_not_http(lm):
    with lm.raw() as connection:
        connection.sendall(b"\x00\xff\r\n\r\n")
        assert connection.recv(99).startswith(b"HTTP/1.1 400 ")
    assert lm.post(COMPLETE, prompt="ab").status_code == 200


def test_an_internal_error():
    with live() as server:
        server.worker.load = None
        refused(server.client.get("/metrics"), 500, "internal server error")
        assert server.client.get("/health").status_code == 200


def test_a_request_that_the_engine_fails_to_accept(lm):
    refused(lm.post(COMPLETE, prompt="odd"), 500, "could not accept this request")
    assert lm.post(COMPLETE, prompt="ab").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_canceled(stream):
    with live(timeout=0.3) as server:
        server.engine.gate.clear()
        refused(server.post(COMPLETE, prompt="abc", stream=stream), 504, "took longer than 0.3 seconds")
        server.engine.gate.set()
        until(lambda: server.engine.canceled == [1])
        until(lambda: server.metric("tformer_pages_used") == 0)
        assert server.post(COMPLETE, prompt="ab").status_code == 200


def test_a_stream_that_takes_too_long_ends_with_an_error():
    with live(timeout=0.3, delay=0.02) as server:
        *_, last = server.stream(COMPLETE, prompt="a" * 2000, max_tokens=2000)
        assert last["error"]["code"] == "timeout"
        until(lambda: server.engine.canceled == [1])
        until(lambda: server.metric(f'tformer_requests_total{{route="{COMPLETE}",status="504"}}') == 1)


@pytest.mark.parametrize(
    ("family", "route", "field"), [("decoder_lm", COMPLETE, "prompt"), ("seq2seq", TRANSLATE, "text")]
)
def test_too_many_texts_are_refused_before_they_are_tokenized(family, route, field, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with live(family) as server:
        refused(server.post(route, **{field: ["a"] * 9}), 400, f"{field}: at most 8 texts at once", field)
