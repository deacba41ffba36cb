"""Minimum Bayes risk decoding by the server: of all candidates, those with the least risk are returned."""

import dataclasses
import itertools

import pytest

from tests.serving.fake_engine import expected
from tests.serving.live import live
from tformer_jax.config import DecodeConfig, kinds
from tformer_jax.inference.risk import Utility

BEAM = DecodeConfig("beam", beams=12, candidates=12, max_new_tokens=1)  # of 0 to 11, the first digit 1 is frequent
SAMPLE = DecodeConfig("sample", candidates=3)


def ranked(request):
    texts = [expected(request, sample)[0] for sample in range(request.num_outputs)]
    return [texts[place] for place in Utility().rank("", texts)]


def test_translations_have_the_least_risk():
    with live("seq2seq", decode=BEAM, max_rows=12) as server:
        actual = server.post("/translate", text=["abc", "hello", " "]).json()["translations"]
        assert [len(row) for row in actual] == [1, 1, 1]
        wanted = [ranked(request) for request in server.engine.seen]
        assert [row[0]["text"] for row in actual] == ["1", "1", ""]
        pieces = server.stream("/translate", text=["abc", "hello"])
        assert [piece["text"] for piece in pieces] == [row[0] for row in wanted]
        assert [piece["finish_reason"] for piece in pieces] == ["length", "length"]
        actual = server.post("/translate", text="abc", n_best=2, candidates=12, logprobs=0).json()["translations"][0]
        assert [each["text"] for each in actual] == wanted[0][:2]
        assert ["".join(each["logprobs"]["tokens"]) for each in actual] == wanted[0][:2]


def test_a_request_that_selects_a_strategy_asks_for_candidates_itself():
    with live("decoder_lm", decode=SAMPLE) as server:
        server.post("/v1/completions", prompt="abc", temperature=0)
        server.post("/v1/completions", prompt="abc", temperature=0.5, n=2)
        server.post("/v1/completions", prompt="abc", temperature=0.5, n=2, candidates=4)
        server.post("/v1/completions", prompt="abc", max_tokens=5)
        assert [request.decode.candidates for request in server.engine.seen] == [1, 1, 4, 3]
        assert [request.num_outputs for request in server.engine.seen] == [1, 2, 4, 3]
        answer = server.post("/v1/completions", prompt="abc", temperature=0, candidates=4)
        assert answer.status_code == 400
        sentence = "candidates: compares outputs of sampling or beam search: give a temperature"
        assert answer.json()["error"]["message"] == sentence


def test_the_metric_of_the_run_ranks_outputs(monkeypatch):
    seen = []

    def last_letter(sources, outputs, references):
        seen.extend(zip(sources, outputs, references, strict=True))
        return [ord(text[-1:] or " ") for text in outputs]

    monkeypatch.setitem(kinds.METRICS, "last_letter", last_letter)
    with live("decoder_lm", decode=dataclasses.replace(SAMPLE, utility="last_letter")) as server:
        actual = server.post("/v1/completions", prompt="abc", n=3, temperature=0.5, candidates=3).json()["choices"]
        texts = [choice["text"] for choice in actual]
        request = server.engine.seen[0]
        candidates = [expected(request, sample)[0] for sample in range(3)]
        assert texts == sorted(candidates, key=lambda text: -ord(text[-1:] or " "))
        different = dict.fromkeys(candidates)
        assert seen == [("abc", text, (other,)) for text in different for other in different]
        assert server.post("/v1/completions", prompt="abc", temperature=0).status_code == 200
        assert server.engine.seen[-1].decode.utility == "chrf"


def test_samples_of_several_prompts_differ_and_a_stream_has_the_complete_outputs():
    asked = {"prompt": ["hello", "ab"], "n": 2, "seed": 5, "candidates": 4}
    with live("decoder_lm") as server:
        whole = server.post("/v1/completions", **asked).json()["choices"]
        assert [request.index for request in server.engine.seen] == [0, 4]
        wanted = itertools.chain(*(ranked(request)[:2] for request in server.engine.seen))
        assert [choice["text"] for choice in whole] == list(wanted)
        chunks = server.stream("/v1/completions", **asked)
        assert [choice for chunk in chunks for choice in chunk["choices"]] == whole


@pytest.mark.parametrize("body", [{"beams": 2}, {}])
def test_candidates_are_at_most_the_beams(body):
    with live("seq2seq") as server:
        assert server.post("/translate", text="a", candidates=3, **body).status_code == 400
