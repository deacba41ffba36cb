"""The responses of every route, complete and streamed."""

import dataclasses
import math
import time

import pytest

from tests.serving.fake_engine import BYTES, FakeEngine, expected, served
from tests.serving.live import around, live
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.engine import Request
from tformer_jax.serving.translation import Translation


def test_translate_one_text_and_several(translator):
    assert translator.post("/translate", text="abc").json() == {
        "translations": [[{"text": "cba", "score": 0.0, "finish_reason": "stop"}]]
    }
    actual = translator.post("/translate", text=["abc", "xy"], n_best=2).json()["translations"]
    assert [[each["text"] for each in row] for row in actual] == [["cba", "1cba"], ["yx", "1yx"]]
    assert [each["score"] for each in actual[0]] == [0.0, -0.25]


def test_a_blank_text_has_a_blank_translation(translator):
    actual = translator.post("/translate", text=["abc", " ", "\u200b\u2028"], n_best=2).json()["translations"]
    assert [[each["text"] for each in row] for row in actual] == [["cba", "1cba"], ["", ""], ["", ""]]
    pieces = translator.stream("/translate", text=["", "ab"])
    assert "".join(piece["text"] for piece in pieces) == "ba"


@pytest.mark.parametrize("score", [math.nan, -math.inf, None])
def test_a_score_that_is_not_finite(score):
    with live("seq2seq") as server:
        server.engine.score = score
        assert server.post("/translate", text="a").json()["translations"][0][0]["score"] is None
        assert server.stream("/translate", text="a")[-1]["score"] is None


def test_null_selects_the_default(lm):
    body = {"prompt": "abc", "n": None, "stop": None, "stream": None, "max_tokens": None, "temperature": 0}
    assert lm.post("/v1/completions", **body).json()["choices"][0]["text"] == "cba"


def test_translate_streams_pieces(translator):
    actual = translator.stream("/translate", text=["abc", "xy"], n_best=2)
    assert len(actual) > 4
    whole: dict = {}
    for piece in actual:
        whole[piece["index"], piece["rank"]] = whole.get((piece["index"], piece["rank"]), "") + piece["text"]
    assert whole == {(0, 0): "cba", (0, 1): "1cba", (1, 0): "yx", (1, 1): "1yx"}
    ends = {(piece["index"], piece["rank"]): piece["score"] for piece in actual if piece["finish_reason"] == "stop"}
    assert ends == {(0, 0): 0.0, (0, 1): -0.25, (1, 0): 0.0, (1, 1): -0.25}


def test_translations_with_log_probabilities(translator):
    body = {"text": ["ab", " "], "n_best": 2, "logprobs": 2}
    whole = translator.post("/translate", **body).json()["translations"]
    assert [each["text"] for row in whole for each in row] == ["ba", "1ba", "", ""]
    assert whole[0][1]["logprobs"] == {
        "tokens": ["1", "b", "a"],
        "token_logprobs": [-1, -1, -1],
        "top_logprobs": [{"1": -1, "2": -2}, {"b": -1, "c": -2}, {"a": -1, "b": -2}],
        "text_offset": [0, 1, 2],
    }
    pieces = translator.stream("/translate", **body)
    ends = [piece for piece in pieces if "logprobs" in piece]
    assert all(piece["finish_reason"] is None for piece in pieces if piece not in ends)
    assert [{name: each[name] for name in ("score", "logprobs")} for each in ends] == [
        {name: each[name] for name in ("score", "logprobs")} for row in whole for each in row
    ]
    assert [(each["index"], each["rank"], each["finish_reason"]) for each in ends[:2]] == [
        (0, 0, "stop"),
        (0, 1, "stop"),
    ]
    assert pieces[-4:] == ends


def test_a_completion_has_openai_s_shape(lm):
    actual = lm.post("/v1/completions", model="fake", prompt="hello", temperature=0).json()
    assert actual.pop("id").startswith("cmpl-")
    assert isinstance(actual.pop("created"), int)
    choice = {"text": "olleh", "index": 0, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert actual == {"object": "text_completion", "model": "fake", "choices": [choice], "usage": usage}


def test_several_prompts_and_outputs_are_numbered_prompt_first(lm):
    actual = lm.post("/v1/completions", prompt=["abc", "xy"], n=2, seed=3, echo=True).json()
    assert [each["index"] for each in actual["choices"]] == [0, 1, 2, 3]
    assert [each["text"] for each in actual["choices"]] == ["abc3cba", "abc31cba", "xy5yx", "xy51yx"]
    assert actual["usage"]["prompt_tokens"] == 5
    assert actual["usage"]["completion_tokens"] == 4 + 5 + 3 + 4


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_equals_the_complete_output(lm, echo):
    asked = {"prompt": ["hello", "ab"], "n": 2, "seed": 5, "echo": echo, "max_tokens": 4}
    whole = lm.post("/v1/completions", **asked).json()["choices"]
    chunks = lm.stream("/v1/completions", **asked)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert len(mine) > 2
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_a_translator_completes_too(translator):
    actual = translator.post("/v1/completions", prompt="abc").json()
    assert actual["choices"][0]["text"] == "cba"


SAVED = DecodeConfig(top_k=7, max_new_tokens=50)


@pytest.mark.parametrize(
    ("family", "route", "body", "decode"),
    [
        ("decoder_lm", "/v1/completions", {}, SAVED),
        ("decoder_lm", "/v1/completions", {"temperature": 0}, DecodeConfig(top_k=7, max_new_tokens=50)),
        (
            "decoder_lm",
            "/v1/completions",
            {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "max_tokens": 9, "stop": "!"},
            DecodeConfig("sample", temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, max_new_tokens=9, stop=("!",)),
        ),
        ("decoder_lm", "/v1/completions", {"n": 2}, DecodeConfig("sample", top_k=7, max_new_tokens=50)),
        ("seq2seq", "/translate", {}, SAVED),
        ("seq2seq", "/translate", {"beams": 3}, DecodeConfig("beam", beams=3, top_k=7, max_new_tokens=50)),
        ("seq2seq", "/translate", {"n_best": 2}, DecodeConfig("beam", beams=2, top_k=7, max_new_tokens=50)),
        ("seq2seq", "/translate", {"max_new_tokens": 2}, DecodeConfig(top_k=7, max_new_tokens=2)),
    ],
)
def test_settings_of_a_request_override_those_of_the_run(family, route, body, decode):
    with live(family, decode=SAVED) as server:
        answer = server.post(route, **{"text" if family == "seq2seq" else "prompt": "a!b"}, **body)
        assert answer.status_code == 200
        assert server.engine.seen[0].decode == decode
        assert server.engine.seen[0].num_outputs == body.get("n", body.get("n_best", 1))


@pytest.mark.parametrize(("family", "body"), [("decoder_lm", {"max_tokens": 2}), ("seq2seq", {"max_new_tokens": 2})])
def test_a_shorter_output_than_the_minimum_of_the_run(family, body):
    route, field = ("/translate", "text") if family == "seq2seq" else ("/v1/completions", "prompt")
    with live(family, decode=DecodeConfig(min_new_tokens=5, max_new_tokens=50)) as server:
        assert server.post(route, **{field: "abc"}, **body).status_code == 200
        assert server.engine.seen[0].decode == DecodeConfig(min_new_tokens=2, max_new_tokens=2)


def test_stop_texts_and_lengths_end_an_output(lm):
    actual = lm.post("/v1/completions", prompt="abcdef", temperature=0, stop=["c", "d"]).json()["choices"][0]
    assert (actual["text"], actual["finish_reason"]) == ("fe", "stop")
    actual = lm.post("/v1/completions", prompt="abcdef", temperature=0, max_tokens=2).json()["choices"][0]
    assert (actual["text"], actual["finish_reason"]) == ("fe", "length")


def test_a_seed_repeats_and_no_seed_does_not(lm):
    def outputs(**body) -> set[str]:
        answers = [lm.post("/v1/completions", prompt="abc", temperature=1, **body) for _ in range(12)]
        return {answer.json()["choices"][0]["text"] for answer in answers}

    assert len(outputs(seed=4)) == 1
    assert len(outputs()) > 1


def test_translations_of_a_run_that_samples_differ():
    def requests() -> list[Request]:
        return Translation(text=("x", "x")).requests([(5,)] * 2, [((), ())] * 2, DecodeConfig(strategy="sample"))

    first, second = requests()
    assert (first.seed, first.index, second.index) == (second.seed, 0, 1)
    assert len({request.seed for _ in range(9) for request in requests()}) > 1


def test_every_text_arrives_unchanged(lm):
    for text in ("ä 漢字 🙂", "\n\n", "data: [DONE]\n\n", "\u2028\u0000\x7f", "a" * 2000, '"\\'):
        request = Request(tuple(BYTES.encode(text)), DecodeConfig(max_new_tokens=2000))
        asked = {"prompt": text, "max_tokens": 2000}
        assert lm.post("/v1/completions", **asked).json()["choices"][0]["text"] == expected(request)[0]
        chunks = lm.stream("/v1/completions", **asked)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected(request)[0]


def test_models_and_health(lm):
    (model,) = lm.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("fake", "model")
    health = lm.client.get("/health")
    assert (health.status_code, health.json()) == (
        200,
        {"status": "ok", "model": "fake", "family": "decoder_lm"},
    )


def test_info_is_what_the_page_shows(lm, translator):
    actual = translator.client.get("/info").json()
    assert (actual["model"], actual["family"], actual["languages"]) == ("fake", "seq2seq", ["en", "zh_Hant"])
    assert actual["metrics"] == [{"title": "BLEU", "value": "31.42", "signature": "nrefs:1"}]
    assert (actual["attention"], actual["no_attention"], actual["logprobs"]) == (True, None, True)
    with around(FakeEngine(), dataclasses.replace(lm.model, prefix_lm=True)) as server:
        assert server.client.get("/info").json()["logprobs"] is False


def test_metrics_count_requests():
    with live(max_rows=3) as server:
        for _ in range(3):
            server.post("/v1/completions", prompt="abcd", temperature=0)
        server.stream("/v1/completions", prompt="ab")
        server.client.get("/nowhere")
        counted = 'tformer_requests_total{route="/v1/completions",status="200"} 4.0'
        ends = time.monotonic() + 10  # a stream is counted after its client has seen the end
        while counted not in (text := server.client.get("/metrics").text):
            assert time.monotonic() < ends, text
        assert 'tformer_requests_total{route="other",status="404"} 1.0' in text
        assert server.metric("tformer_tokens_generated_total") == 3 * 4 + 2
        assert (server.metric("tformer_pages_used"), server.metric("tformer_pages")) == (0, 3)
        for name in ("tformer_first_token_seconds", "tformer_request_seconds"):
            assert server.metric(f"{name}_count") == 4
            assert f'{name}_bucket{{le="+Inf"}} 4.0' in text
            buckets = [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}_bucket")]
            assert buckets == sorted(buckets)
        kinds = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        names = {line.split("{")[0].split()[0] for line in text.splitlines() if not line.startswith("#")}
        assert all(any(name.startswith(kind) for kind in kinds) for name in names)


@pytest.mark.parametrize(
    ("route", "name"), [("/v1/embeddings", "embed"), ("/classify", "classify"), ("/attention", "attention")]
)
def test_the_time_of_a_request_includes_its_computation(route, name):
    engine = FakeEngine()
    model = served(engine, "classifier")
    actual = getattr(model, name)

    def slow(*arguments):
        time.sleep(0.1)
        return actual(*arguments)

    with around(engine, dataclasses.replace(model, **{name: slow})) as server:
        assert server.post(route, **{"text" if name == "attention" else "input": "a"}).status_code == 200
        assert server.metric("tformer_request_seconds_count") == 1
        assert server.metric("tformer_request_seconds_sum") >= 0.1


def test_the_page_loads_nothing_from_other_hosts(lm):
    page = lm.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text


def test_a_page_of_attention(translator):
    actual = translator.post("/attention", text="abc", output="cba")
    assert (actual.status_code, "<p>abc to cba</p>" in actual.text) == (200, True)
    assert actual.headers["content-type"].startswith("text/html")
    assert actual.headers["content-security-policy"] == "sandbox allow-scripts"
    refused = translator.post("/attention", text="", output="cba")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "the text is empty: write at least one character",
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"target_language": "de"}, "the model has no languages: leave target_language and source_language out"),
        ({"output": "b"}, "output: a classifier model makes none of a text: leave it out"),
    ],
)
def test_attention_of_a_classifier_has_neither_languages_nor_an_output(body, problem):
    engine = FakeEngine()
    with around(engine, served(engine, "classifier")) as server:
        refused = server.post("/attention", text="a", **body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, problem)


def test_a_model_without_attention_weights(translator):
    with around(FakeEngine(), dataclasses.replace(translator.model, attention="it has a state")) as server:
        refused = server.post("/attention", text="a", output="b")
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "attention is not available: it has a state"
        actual = server.client.get("/info").json()
        assert (actual["attention"], actual["no_attention"]) == (False, "it has a state")


def test_words_are_aligned_at_the_end_of_each_translation(translator):
    body = {"text": ["ab c", "d"], "n_best": 2, "beams": 2, "alignments": True}
    (first, _), (second, _) = translator.post("/translate", **body).json()["translations"]
    assert (first["alignment"], second["alignment"]) == ("0-1 1-0", "0-0")
    for scores in ({}, {"logprobs": 1}):
        pieces = translator.stream("/translate", **body, **scores)
        ends = [piece for piece in pieces if piece["finish_reason"]]
        actual = sorted((each["index"], each["alignment"]) for each in ends if each["rank"] == 0)
        assert actual == [(0, "0-1 1-0"), (1, "0-0")]
        assert not any("alignment" in piece for piece in pieces if piece not in ends)
    assert "alignment" not in translator.post("/translate", text="ab c").json()["translations"][0][0]


def test_unknown_tokens_and_detokenization_are_settings_of_a_request(translator):
    translator.post("/translate", text=["abc", [97, 98]], unknown="copy", detokenize=True)
    first, second = translator.engine.seen[-2:]
    assert (first.decode.unknown, first.decode.detokenize, first.text) == ("copy", True, "abc")
    assert second.text == ""
    translator.post("/translate", text="abc")
    assert translator.engine.seen[-1].decode == translator.model.decode
    refused = translator.post("/translate", text="a", unknown="drop")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "unknown")
    translator.post("/v1/completions", prompt="abc")
    assert translator.engine.seen[-1].text == "abc"
