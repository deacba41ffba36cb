"""ServedModel texts carry the special tokens of their tokenizer, and token ids are read as they are."""

import dataclasses

import pytest

from tests.serving.fake_engine import FakeEngine, served
from tests.serving.live import around
from tformer_jax.config import DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.inference.detokenization import output_decoder
from tformer_jax.inference.scores import Scored
from tformer_jax.serving.bodies import Completion
from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.logprobs import logprobs
from tformer_jax.serving.model import ServedModel
from tformer_jax.serving.replies import AccumulatedOutput, TokenScores
from tformer_jax.serving.translation import Translation
from tformer_jax.serving.worker import Empty
from tformer_jax.special_tokens import EOS, IGNORED, SpecialTokens

NAMES = {1: "[CLS]", 3: "[END]"}


class Framed(ByteTokenizer):
    """Texts stand between [CLS] and [END]; there is no padding."""

    special = SpecialTokens(tuple(NAMES.items()), eos=(3,), pad=None, before=(1,), after=(3,))


def framed(family: str):
    return dataclasses.replace(served(FakeEngine(), family), tokenizers=Tokenizers(Framed(), Framed()))


@pytest.mark.parametrize("family", ["decoder_lm", "classifier", "seq2seq"])
def test_texts_are_framed_and_token_ids_are_not(family):
    model = framed(family)
    (text,) = Framed().encode("a")
    ends = (3,) if family == "seq2seq" else ()
    assert model.encode("field", ["a", (text,), (1, text, 3)], 3) == [(1, text, 3), (text, *ends), (1, text, 3)]
    with pytest.raises(RequestError, match="has 4 tokens, but the model takes at most 3"):
        model.encode("field", ["ab"], 3)
    if family == "seq2seq":
        assert model.encode("field", [" "], 3) == [()]
    else:
        with pytest.raises(RequestError, match="is empty"):
            model.encode("field", [""], 3)


def test_the_tokenizer_that_clients_read():
    engine = FakeEngine()
    with around(engine, framed("decoder_lm")) as server:
        info = {"bos_token": "[CLS]", "eos_token": "[END]", "pad_token": None}
        assert server.client.get("/tokenizer_info").json() == info
        (text,) = Framed().encode("a")
        assert server.post("/tokenize", prompt="a").json()["tokens"] == [1, text, 3]
        assert server.post("/tokenize", prompt="a", add_special_tokens=False).json()["tokens"] == [text]
        assert server.post("/tokenize", prompt="[END]", add_special_tokens=False).json()["tokens"] == [3]
        actual = server.post("/v1/completions", prompt="a", max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
        assert (actual["text"], actual["logprobs"]["tokens"]) == ("a", ["[CLS]", "a", "[END]"])
        assert actual["logprobs"]["text_offset"] == [0, 0, 1]
        assert actual["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


def test_the_tokens_of_an_output_continue_the_prompt():
    words = WordTokenizer(["one", "two", "three"])
    ids = words.encode("one two three")
    parts = [(words, ids[:1]), (output_decoder(words, continues=True), ids[1:])]
    assert logprobs(parts, Scored(ids[1:], [-1.0, -1.0]))["tokens"] == ["one", " two", " three"]


def test_offsets_are_places_in_an_echoed_text_that_the_tokenizer_changes():
    """Regression test: the text was that of the request, with two spaces."""
    words = WordTokenizer(["one", "two"])
    model = dataclasses.replace(served(FakeEngine(), "decoder_lm"), tokenizers=Tokenizers(words, words))
    with around(FakeEngine(), model) as server:
        actual = server.post("/v1/completions", prompt="one  two", max_tokens=0, echo=True, logprobs=0).json()[
            "choices"
        ][0]
    places = actual["logprobs"]["text_offset"]
    assert [actual["text"][place:] for place in places] == ["one two", " two"]


def test_offsets_are_places_in_an_echoed_text_with_unknown_tokens():
    words = WordTokenizer(["one", "two"])
    model = dataclasses.replace(served(FakeEngine(), "decoder_lm"), tokenizers=Tokenizers(words, words))
    with around(FakeEngine(), model) as server:
        prompt = "one ten two"
        actual = server.post("/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    assert actual["text"] == "one <unk> two"
    places = actual["logprobs"]["text_offset"]
    assert [actual["text"][place:] for place in places] == ["one <unk> two", " <unk> two", " two"]


def test_a_client_may_replace_or_remove_the_stop_texts_of_the_run():
    saved = DecodeConfig(stop=("x",))
    for stop, expected in ((None, ("x",)), ((), ()), (("y",), ("y",))):
        (request,) = Completion(prompt=("a",), stop=stop).requests([(5,)], [((), ())], saved)
        assert request.decode.stop == expected


def test_markup_alone_is_returned_by_both_routes():
    saved = DecodeConfig(markup="align")
    for body in (Completion(prompt=("<b></b>", "{0} ")), Translation(text=("<b></b>", "{0} "))):
        outputs = body.requests([(), ()], [((), ())] * 2, saved)
        assert outputs == [Empty(1, "stop", "<b></b>"), Empty(1, "stop", "{0}")]


def test_a_blank_text_has_the_fields_of_others():
    """It has no links, and does not meet its constraints."""
    engine = FakeEngine()
    with around(engine, served(engine, "seq2seq")) as server:
        body = {"text": ["", "ab"], "beams": 2, "alignments": True, "constraints": ["b"]}
        (blank,), (other,) = server.post("/translate", **body).json()["translations"]
    assert (blank["text"], blank["alignment"], blank["constraints_met"]) == ("", "", False)
    assert blank.keys() <= other.keys() | {"alignment"}


def test_a_glossary_needs_beams(tmp_path):
    saved = DecodeConfig(strategy="beam", beams=2, glossary=str(tmp_path / "terms.tsv"))
    (tmp_path / "terms.tsv").write_text("a\tb\n")
    (request,) = Completion(prompt=("a",)).requests([(5,)], [((), ())], saved)
    assert request.constraints == (("b",),)
    for field, value in [("temperature", 0), ("temperature", 1.0), ("top_p", 0.5), ("top_p", 1.0), ("n", 2)]:
        with pytest.raises(RequestError, match=f"{field}: the glossary of this model needs beam search: leave it out"):
            Completion(prompt=("x",), **{field: value}).requests([(5,)], [((), ())], saved)


def test_logprobs_show_unknown_tokens_as_the_request_says():
    words = WordTokenizer(["one", "two"])
    parts = "x", "seq2seq", DecodeConfig(), Tokenizers(words, words), 16, False

    def score(rows, top):
        return [Scored([label for label in row.labels if label != IGNORED], [-1.0] * len(row.labels)) for row in rows]

    model = ServedModel(*parts, score=score, embed=list, classify=list)
    ids = words.encode("one ten two")
    for unknown, offsets in (("omit", [0, 3, 3, 7]), ("show", [0, 3, 9, 13]), (None, [0, 3, 9, 13])):
        scores = TokenScores(model, [(5, EOS)], 0, [((), ())], unknown)
        ((actual,),) = scores.work([[AccumulatedOutput(ids=[*ids, EOS])]])()
        assert actual["text_offset"] == offsets


def test_tags_that_stand_last_are_read_and_scored_as_in_training():
    """As mBART (2020) has them: `X </s> [source]`, and the decoder starts with the first tag of the target."""
    letters = CharacterTokenizer("abc").extended(["<2de>", "<2en>"])
    letters.special = dataclasses.replace(letters.special, tags_last=True)
    tags, abc, rows = languages_of(letters), letters.encode("abc"), []

    def score(given, top):
        rows.extend(given)
        labels = [[label for label in row.labels if label != IGNORED] for row in given]
        return [Scored(row, [-1.0] * len(row)) for row in labels]

    parts = "x", "seq2seq", DecodeConfig(), Tokenizers(letters, letters), 16, False
    model = ServedModel(*parts, score=score, embed=list, classify=list)
    source = (*abc, EOS, tags["en"])
    assert model.encode("field", ["abc"], 9, [(tags["en"],)]) == [source]
    given = [source, (*abc, tags["en"]), (*abc, EOS), tuple(abc)]
    assert model.encode("field", given, 9) == [source, source, (*abc, EOS), (*abc, EOS)]
    for of_target in (("de",), ("en", "de")):
        start, *rest = (tags[name] for name in of_target)
        output = AccumulatedOutput(ids=[*rest, *abc, EOS])
        scores = TokenScores(model, [source], 0, [((tags["en"],), (start, *rest))])
        ((actual,),) = scores.work([[output]])()
        inputs = {"source": [*source], "target_in": [start, *rest, *abc]}
        assert rows.pop() == (inputs, [*[IGNORED] * len(rest), *abc, EOS])
        assert actual["tokens"] == ["a", "b", "c", "</s>"]
