"""The server around the real engine: responses equal the output of the commands."""

import concurrent.futures
import dataclasses

import pytest

from tests.helpers import build, tiny
from tests.serving.live import around, until
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.text import TextGenerator, Translator
from tformer_jax.serving.app import Served

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc", "g", "fedcba", "aa", "abcdefgabc", "ba"]


def parts(family: str):
    data = {"seq2seq": DataConfig(bucket_lengths=(8, 16))}.get(
        family, DataConfig(source="stdlib_text", batching="windows", window=8)
    )
    cfg = Config(model=tiny(family), data=data, decode=DecodeConfig(max_new_tokens=6))
    model, params = build(cfg.model, seed=3)
    engine = Engine(cfg, model, params, TOKENIZERS, slots=3)
    return cfg, model, params, around(engine, Served("tiny", family, cfg.decode, len))


@pytest.fixture(scope="module")
def lm():
    *rest, server = parts("decoder_lm")
    with server as one:
        yield *rest, one


@pytest.fixture(scope="module")
def translator():
    *rest, server = parts("seq2seq")
    with server as one:
        yield *rest, one


def sampled(lm, texts, *, seed: int = 0, outputs: int = 1, **settings) -> list[str]:
    cfg, model, params, _ = lm
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, **settings))
    found = TextGenerator(cfg, model, TOKENIZERS).stream(params, texts, seed=seed, outputs=outputs)
    return [output.text for row in found for output in row]


def test_completions_of_many_clients(lm):
    server = lm[-1]
    expected = sampled(lm, TEXTS)
    assert len(set(expected)) > 2
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda text: server.post("/v1/completions", prompt=text).json(), TEXTS * 2))
    assert [one["choices"][0]["text"] for one in found] == expected * 2
    lengths = [one["usage"]["completion_tokens"] for one in found]
    ends = [one["choices"][0]["finish_reason"] for one in found]
    assert all(end == ("length" if length == 6 else "stop") for length, end in zip(lengths, ends, strict=True))


def test_samples_are_those_of_the_command_with_the_same_seed(lm):
    server = lm[-1]
    settings = {"temperature": 2.0, "top_k": 5, "min_p": 0.01}
    expected = sampled(lm, TEXTS, seed=4, outputs=2, strategy="sample", **settings)
    assert len(set(expected)) > 6
    asked = {"prompt": TEXTS, "seed": 4, "n": 2, **settings}
    found = server.post("/v1/completions", **asked).json()["choices"]
    assert [choice["text"] for choice in found] == expected
    parts = [choice for chunk in server.stream("/v1/completions", **asked) for choice in chunk["choices"]]
    whole = ["".join(part["text"] for part in parts if part["index"] == place) for place in range(len(expected))]
    assert whole == expected


def test_translations_and_their_scores(translator):
    cfg, model, params, server = translator
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, strategy="beam", beams=3))
    expected = list(Translator(cfg, model, TOKENIZERS).stream(params, TEXTS, outputs=2))
    found = server.post("/translate", text=TEXTS, beams=3, n_best=2).json()["translations"]
    assert [[one["text"] for one in row] for row in found] == [[one.text for one in row] for row in expected]
    scores = [one.score for row in expected for one in row]
    assert [one["score"] for row in found for one in row] == pytest.approx(scores, abs=1e-5)


def test_requests_that_the_engine_refuses(lm, translator):
    for server, route, body, sentence in (
        (lm[-1], "/v1/completions", {"prompt": ""}, "the prompt is empty"),
        (lm[-1], "/v1/completions", {"prompt": "a" * 99}, "the prompt has 99 tokens"),
        (lm[-1], "/v1/completions", {"prompt": "a", "n": 4}, "4 outputs are more than the engine's 3 rows"),
    ):
        answer = server.post(route, **body)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]


def test_numbers_at_their_limits(lm):
    extremes = {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 1, "max_tokens": 2**31 - 1}
    for name, value in extremes.items():
        for seed in (0, 2**31 - 1):
            answer = lm[-1].post("/v1/completions", **{"prompt": "ab", "seed": seed, name: value})
            assert answer.status_code == 200, answer.text
    assert lm[-1].post("/v1/completions", prompt="ab", temperature=1e-4).status_code == 200


def test_all_pages_are_freed(lm, translator):
    for server in (lm[-1], translator[-1]):
        until(lambda server=server: server.metric("tformer_pages_used") == 0)
        assert server.metric("tformer_pages") > 0


def test_caches_of_the_engine_are_bounded():
    cfg, model, params, _ = parts("decoder_lm")
    engine = Engine(cfg, model, params, TOKENIZERS, slots=1)
    for number in range(300):
        engine.check(Request("ab", dataclasses.replace(cfg.decode, strategy="sample", temperature=1 + number / 100)))
    assert len(engine._kinds) <= 256
