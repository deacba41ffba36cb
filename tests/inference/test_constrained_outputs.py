"""Constraints of requests: texts beside others in one engine, commands, and the run's glossary."""

import dataclasses

import pytest

from tests.helpers import build, tiny
from tests.inference.engines import LETTERS, finish, models
from tests.inference.test_text import setup
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.phrases import are_met, read_constraints
from tformer_jax.inference.requests import Request as TextRequest
from tformer_jax.inference.text import TextGenerator, Translator

SPACED = CharacterTokenizer("abcde .")  # as many tokens as LETTERS
TOKENIZERS = Tokenizers(SPACED, SPACED)
BEAM = DecodeConfig(max_new_tokens=12, strategy="beam", beams=3)
TEXTS = ["abc", "edcba ab.", "a", "abc abc", "bb", "cab"]
GIVEN = [(), ["ab", "cd"], (), [["ee.", "b"]], ["a b"], ()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm"])
def test_other_requests_are_not_changed(family):
    """Of the same engine: tokens and scores are equal, bit for bit; phrases are in the outputs with constraints."""
    assert SPACED.vocab_size == LETTERS.vocab_size
    trained = models(family)
    special = SPACED.special
    wrap = special.wrap_side if family == "seq2seq" else special.wrap_text
    actual = []
    for constrained in (True, False):
        served = Engine(*trained, TOKENIZERS, max_rows=3)
        numbers = {}
        for number, (text, given) in enumerate(zip(TEXTS, GIVEN, strict=True)):
            if constrained or not given:
                ids, options = tuple(wrap(SPACED.encode(text))), {"constraints": read_constraints(given)}
                numbers[served.submit(Request(ids, BEAM, num_outputs=2, **options))] = number
        outputs = finish(served)
        actual.append({(numbers[key[0]], key[1]): (text, event[3:]) for key, (text, event) in outputs.items()})
    both, others = actual
    assert {key: both[key] for key in others} == others
    assert all(are_met(read_constraints(GIVEN[number]), text, BEAM) for (number, sample), (text, _) in both.items())
    assert any(not are_met([("ab",), ("cd",)], text, BEAM) for text, _ in others.values())


@pytest.mark.slow
def test_texts_have_constraints_and_a_glossary(tmp_path, caplog):
    """In each batch size; what has no room is counted."""
    path = tmp_path / "terms.tsv"
    path.write_text("abc\te d\tdd\n")
    model, params = build(tiny("seq2seq"), seed=1)
    decode = dataclasses.replace(BEAM, glossary=str(path))
    texts = [TextRequest(text, constraints=given) for text, given in zip(TEXTS, GIVEN, strict=True)]
    outputs = []
    for batch_size in (2, 8):
        translate = Translator(dataclasses.replace(setup("seq2seq", batch_size), decode=decode), model, TOKENIZERS)
        outputs.append(translate.outputs(params, texts))
    assert [output.text for output in outputs[0]] == [output.text for output in outputs[1]]
    for output, text, given in zip(outputs[0], TEXTS, GIVEN, strict=True):
        terms = [("e d", "dd")] if "abc" in text else []
        expected = True if given or terms else None
        assert output.constraints_met is expected
        assert are_met([*read_constraints(given), *terms], output.text, decode)
    short = dataclasses.replace(decode, max_new_tokens=4)
    translate = Translator(dataclasses.replace(setup("seq2seq"), decode=short), model, TOKENIZERS)
    translate(params, [TextRequest("abc", constraints=["a.b"]), "a"])
    said = "1 of 2 outputs have not all phrases of their constraints, for lack of room or of a token,"
    assert f"{said} or because of other settings" in caplog.text


def test_the_output_of_a_blank_text_lacks_its_phrases():
    model, params = build(tiny("seq2seq"), seed=1)
    translate = Translator(dataclasses.replace(setup("seq2seq"), decode=BEAM), model, TOKENIZERS)
    outputs = translate.outputs(params, [TextRequest(" ", constraints=["a"]), " "])
    assert [(output.text, output.constraints_met) for output in outputs] == [("", False), ("", None)]


def test_a_text_that_is_left_out_has_no_phrases():
    model, params = build(tiny("seq2seq"), seed=1)
    translate = Translator(dataclasses.replace(setup("seq2seq"), decode=BEAM), model, TOKENIZERS)
    (output,) = translate.outputs(params, [TextRequest("a" * 99, constraints=["a"])], long_texts=LongTexts("skip"))
    assert (output.text, output.constraints_met) == ("", None)


def test_terms_of_the_part_of_a_text_that_is_not_read_have_no_effect(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("abc\te\ned\tdd\n")
    cfg, model = setup("seq2seq"), build(tiny("seq2seq"), seed=1)[0]
    translate = Translator(
        dataclasses.replace(cfg, decode=dataclasses.replace(BEAM, glossary=str(path))), model, TOKENIZERS
    )
    room = cfg.model.max_length - SPACED.special.added_to_side
    for start, terms in (("", (("e",),)), ("ed ", (("e",), ("dd",)))):
        text = f"abc {start}".ljust(room - 1, "b") + " ed"
        (row,) = translate._encode_parts(LongTexts("truncate"), 0, TextRequest(text)).rows
        assert sorted(row.constraints) == sorted(terms)
        assert row.text == text


@pytest.mark.parametrize(
    ("decode", "given", "problem"),
    [
        (DecodeConfig(), ["a"], "constraints need decode.strategy='beam', not 'greedy': choose a number of beams"),
        (BEAM, ["x"], "constraint 'x' cannot be encoded with this vocabulary; leave it out"),
        (BEAM, [""], "constraints must be a text, or a list of texts"),
        (BEAM, ["a" * 13], "has 13 tokens, but an output has at most 12"),
    ],
)
@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm"])
def test_the_text_of_a_wrong_constraint_is_named(family, decode, given, problem):
    kind = Translator if family == "seq2seq" else TextGenerator
    generate = kind(dataclasses.replace(setup(family), decode=decode), build(tiny(family))[0], TOKENIZERS)
    with pytest.raises(UserError, match=problem) as raised:
        generate.outputs(None, ["a", TextRequest("b", constraints=given)])
    assert raised.value.index == 1


def test_a_glossary_selects_beam_search():
    assert DecodeConfig().changed({"glossary": "terms.tsv"}).strategy == "beam"
    with pytest.raises(UserError, match="--glossary needs --strategy beam, but it is sample"):
        DecodeConfig().changed({"glossary": "terms.tsv", "strategy": "sample"}, lambda name: f"--{name}")
