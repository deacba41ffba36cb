"""Texts that are translated by sentence, and phrases that outputs must contain, in requests of a server."""

import pytest

TEXT = "Abc def. Gh ij!\n\n  Kl mn."
TRANSLATED = ".fed cbA !ji hG\n\n  .nm lK"


def test_sentences_are_joined_by_their_own_spaces(translator):
    body = {"text": [TEXT, "x y", " "], "split_sentences": True, "n_best": 2, "prefix": ["k", None, None]}
    actual = translator.post("/translate", **body).json()["translations"]
    assert [[each["text"] for each in row] for row in actual] == [
        [TRANSLATED, "1.fed cbA 1!ji hG\n\n  1.nm lK"],
        ["y x", "1y x"],
        ["", ""],
    ]
    assert [each["score"] for each in actual[0]] == [0.0, -0.75]
    streamed = translator.stream("/translate", **body)
    assert {(piece["index"], piece["rank"]): piece["text"] for piece in streamed} == {
        (index, rank): each["text"] for index, row in enumerate(actual) for rank, each in enumerate(row)
    }
    whole = translator.post("/translate", text=TEXT).json()
    assert whole["translations"][0][0]["text"] == TEXT[::-1]


@pytest.mark.parametrize("field", [{"logprobs": 1}, {"logprobs": 0}, {"constraints": ["a"], "beams": 2}])
def test_fields_of_a_whole_text_are_refused_for_sentences(translator, field):
    answer = translator.post("/translate", text=TEXT, split_sentences=True, **field)
    assert answer.status_code == 400
    problem = "is not supported for a text of several sentences: leave out split_sentences"
    assert answer.json()["error"]["message"] == f"{next(iter(field))}: {problem}"
    assert translator.post("/translate", text="ab", split_sentences=True, **field).status_code == 200


def test_sentences_are_counted_as_sentences(translator):
    answer = translator.post("/translate", text=" ".join(["Ab."] * 9), split_sentences=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "text: at most 8 sentences at once"


def test_replies_say_whether_constraints_are_met(translator):
    for constraints, met in ((["cba"], True), ("cba", True), ([["x", "cba"]], True), (["cb"], False)):
        body = {"text": ["abc", "abc"], "beams": 2, "constraints": constraints}
        actual = translator.post("/translate", **body).json()["translations"]
        assert [row[0]["constraints_met"] for row in actual] == [met, met]
    assert "constraints_met" in translator.stream("/translate", **body)[-1]
    assert "constraints_met" in translator.stream("/translate", **body, logprobs=0)[-1]
    answer = translator.post("/translate", text="abc", constraints=["a"])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("constraints: needs beam search")
    answer = translator.post("/translate", text="a", constraints=[[]])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("constraints must be a text, or a list of texts")
