"""POST /v1/chat/completions with a fake engine, which writes the prompt backwards."""

import dataclasses
import json
import re

import pytest

from tests.serving.fake_engine import BYTES, FakeEngine, served
from tests.serving.live import around
from tformer_jax.data.chat.template import PLAIN
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.chats import with_chat
from tformer_jax.serving.chat import chat_logprobs

ROUTE = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a</s>"}, {"role": "assistant", "content": "b"}]
PROMPT = "User:\na</s>\nAssistant:\nb\nAssistant:\n"
"""The text of MESSAGES before an answer; the end of the first one is a token."""


@pytest.fixture(scope="module")
def lm():
    tokenizer = with_chat(BYTES, PLAIN)
    engine = FakeEngine()
    model = dataclasses.replace(served(engine, "decoder_lm"), tokenizers=Tokenizers(tokenizer, tokenizer))
    with around(engine, model) as server:
        yield server


def test_an_answer(lm):
    reply = lm.post(ROUTE, messages=MESSAGES, temperature=0, user="someone", model="fake", tool_choice="none").json()
    (request,) = lm.engine.seen[-1:]
    end = BYTES.special.eos[0]
    text = PROMPT.removesuffix("\nAssistant:\n")
    assert request.ids == (*BYTES.encode(text), end, *BYTES.encode("\nAssistant:\n"))  # only the template's is a token
    (choice,) = reply.pop("choices")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": text[::-1], "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    tokens = {"prompt_tokens": len(request.ids), "completion_tokens": len(text)}
    assert reply["usage"] == tokens | {"total_tokens": sum(tokens.values())}
    assert (reply["object"], reply["model"], reply["id"][:9]) == ("chat.completion", "fake", "chatcmpl-")


def test_a_stream(lm):
    body = {"messages": [{"role": "user", "content": "ab"}], "max_completion_tokens": 3, "n": 2}
    *chunks, last = lm.stream(ROUTE, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]["completion_tokens"], chunks[0]["usage"]) == ([], 6, None)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for number in range(2):
        pieces = [each for chunk in chunks for each in chunk["choices"] if each["index"] == number]
        assert [piece["delta"].get("role") for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
        assert len("".join(piece["delta"].get("content", "") for piece in pieces)) == 3
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]


def test_log_probabilities(lm):
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "temperature": 0, "logprobs": True}
    (choice,) = lm.post(ROUTE, **body, top_logprobs=2).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("\n", -1.0, [10])
    assert [(each["token"], each["logprob"]) for each in first["top_logprobs"]] == [("\n", -1.0), ("\x0b", -2.0)]
    (choice,) = lm.post(ROUTE, **body).json()["choices"]
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[], []]
    *_, last = lm.stream(ROUTE, **body)
    (end,) = last["choices"]
    assert (end["logprobs"]["content"][0]["token"], end["finish_reason"]) == ("\n", "length")


def test_bytes_of_parts_of_characters_are_unknown():
    best = [{"\ufffd": -1.5}, {"token_id:7": -2}]
    scores = {"tokens": ["", "ß"], "token_logprobs": [-1.0, -0.5], "top_logprobs": best}
    first, second = chat_logprobs(scores, 1)["content"]
    assert (first["bytes"], second["bytes"]) == ([], [0xC3, 0x9F]), "together, the bytes of the text"
    assert [entry["top_logprobs"][0]["bytes"] for entry in (first, second)] == [None, None]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "messages: must be a list of messages, such as"),
        ({"messages": "a"}, "^messages: must be a list, not a text$"),
        ({"messages": MESSAGES, "tools": "a"}, "^tools: must be a list, not a text$"),
        ({"messages": [5]}, "^messages: message 1 must be an object with role and content$"),
        ({"messages": [{"role": "me", "content": "a"}]}, "messages: message 1 has the role 'me': write one of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of the type 'image_url': only"),
        (
            {"messages": MESSAGES, "tools": [{"type": "function"}]},
            "refuses the conversation: it has no place for tools",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs: needs logprobs=true"),
        (
            {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 2},
            "max_completion_tokens: is max_tokens by",
        ),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format: is not supported"),
        (
            {"messages": [{"role": "user", "content": "a" * 3000}]},
            "the conversation has 30.. tokens, but the",
        ),
        ({"messages": MESSAGES, "prompt": "a"}, "'prompt': unknown field"),
        ({"messages": MESSAGES, "tools": json.loads("[" * 500 + "]" * 500)}, "a tool is nested more than 100 levels"),
    ],
)
def test_mistakes(body, problem, lm):
    reply = lm.post(ROUTE, **body)
    assert reply.status_code == 400
    assert re.search(problem, reply.json()["error"]["message"])


def test_a_model_without_a_template():
    engine = FakeEngine()
    with around(engine, served(engine, "decoder_lm")) as server:
        reply = server.post(ROUTE, messages=MESSAGES)
        assert reply.status_code == 404 and "has no chat template" in reply.json()["error"]["message"]
        assert server.client.get("/info").json()["chat"] is False
