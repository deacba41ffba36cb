"""Words of outputs get the case of the words of their source: links by hand, and weights of a tiny model."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from tests.helpers import tiny
from tests.inference.test_final_texts import DECODINGS, config, model, outputs
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.data.markup import take_out, unit_spans
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import WordTokenizer
from tformer_jax.inference.casing import copy_casing
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.final_texts import Finished, Finisher, Unfinished, is_withheld
from tformer_jax.inference.text import Translator
from tformer_jax.inference.watch import watch
from tformer_jax.special_tokens import BOS, EOS, UNK

__all__ = ["model"]

STRAIGHT = tuple((n, n) for n in range(9))


@pytest.mark.parametrize(
    ("source", "output", "links", "capitals", "titles"),
    [
        ("a RED car", "une voiture rouge", ((0, 0), (1, 2), (2, 1)), "une voiture ROUGE", None),
        ("the Old car", "le vieux char", STRAIGHT, "le vieux char", "le Vieux char"),
        ("The old car", "le vieux char", STRAIGHT, "le vieux char", "Le vieux char"),  # the first word of both
        ("NASA came", "die agentur kam", ((0, 0), (0, 1), (1, 2)), "DIE AGENTUR kam", None),
        ("NEW car", "neuwagen", ((0, 0), (1, 0)), "neuwagen", "Neuwagen"),  # not all that it is aligned with
        ("a NEW Car", "ein neuwagen", ((0, 0), (1, 1), (2, 1)), "ein neuwagen", "ein Neuwagen"),
        ("a STREET", "eine straße", STRAIGHT, "eine STRAßE", None),  # SS would be other letters
        ("I go. He", "ich gehe. er", STRAIGHT, "ich gehe. er", "Ich gehe. er"),
        ("the FAST car", "das Auto ist", ((0, 0), (2, 1)), "das Auto ist", None),
        ("a BIG 猫", "猫 ein 大", ((1, 0), (0, 1), (1, 2)), "猫 ein 大", None),  # letters without case
        ("大 猫", "the cat", STRAIGHT, "the cat", None),
        ("see {NAME} or %S <B>X</B>", "u {name} v %s w", tuple(itertools.product(range(1, 13), range(9))), "", None),
        ("an ALL {x}", "ein ganz {x}", tuple(itertools.product([1], range(6))), "EIN GANZ {x}", None),
        ("go to HTTP", "siehe http://a.b/c", tuple(itertools.product([2], range(9))), "SIEHE http://a.b/c", None),
        ("<b>The cat</b>", "<b>die katze</b>", (), "<b>die katze</b>", "<b>Die katze</b>"),
        ("a BIG! dog", "ein großer hund", ((0, 0), (1, 1), (2, 1), (3, 2)), "ein GROßER hund", None),
        ("my Phone", "mein iPhone", STRAIGHT, "mein iPhone", None),
        ("", "x", (), "x", None),
        ("X", "", (), "", None),
    ],
)
def test_case_follows_links(source, output, links, capitals, titles):
    links = tuple((a, b) for a, b in links if a < len(unit_spans(source)))
    text, count = copy_casing(source, output, links, titles=False)
    assert text == (capitals or output)
    assert count == sum(a != b for a, b in zip(text.split(), output.split(), strict=True))
    assert copy_casing(source, output, links, titles=True)[0] == (titles or capitals or output)


def test_i_keeps_its_dot_where_the_language_has_two():
    assert copy_casing("BIG", "iki ılık", ((0, 0), (0, 1)), titles=False, language="tr") == ("İKİ ILIK", 2)
    assert copy_casing("my Cat", "x ırmak", STRAIGHT, titles=True, language="az") == ("x Irmak", 1)
    assert copy_casing("BIG", "iki ılık", ((0, 0), (0, 1)), titles=False) == ("IKI ıLıK", 2)


def test_only_case_changes():
    draw = random.Random(0)
    words = ["Aa", "BB", "c", "ﬁ", "ß", "ſ", "ŉ", "Σς", "ı", "İ", "ǆ", "ა", "日本", "x1", "μ", ".", "'", "{a}", "é"]
    for _ in range(300):
        source, output = (" ".join(draw.choices(words, k=draw.randint(0, 6))) for _ in range(2))
        every = [*itertools.product(range(len(unit_spans(source))), range(len(unit_spans(output))))]
        links = draw.sample(every, draw.randint(0, len(every)))
        actual, count = copy_casing(source, output, tuple(sorted(links)), titles=draw.random() < 0.5)
        assert actual.casefold() == output.casefold()
        assert len(actual) == len(output)
        assert (count == 0) == (actual == output)


LETTERS = Tokenizers(
    WordTokenizer(["a", "BB", "Cc", "DD", "e", "f", "g"]), WordTokenizer([2 * letter for letter in "tuvwxyz"])
)
"""With the ids of `test_final_texts`, whose compiled functions are those of this test."""


def test_an_output_follows_its_weights_and_keeps_placeholders_and_names_of_unknown_tokens():
    source = LETTERS.source.encode("a DD Cc")
    decode = DecodeConfig(casing="titles")
    tokens = [*LETTERS.target.encode("vv tt ww"), UNK]
    weights = np.array([[0.1, 0.7, 0.1, 0.1], [0.6, 0.2, 0.2, 0], [0.1, 0.2, 0.7, 0], [0, 1, 0, 0]])
    output = Unfinished(decode, [*source, EOS], BOS, "a DD Cc", text="vv tt ww <unk>", tokens=tokens)
    finisher = Finisher(None, None, LETTERS, 1)
    assert finisher._finished(output, weights) == Finished("VV tt Ww <unk>", None, 2)
    both = dataclasses.replace(output, decode=DecodeConfig(casing="capitals", alignments=True))
    assert finisher._finished(both, weights) == Finished("VV tt ww <unk>", ((0, 1), (1, 0), (1, 3), (2, 2)), 1)
    marked = take_out("a <b>DD</b> Cc")
    tagged = dataclasses.replace(output, decode=DecodeConfig(casing="capitals", markup="align"), segment=marked)
    assert finisher._finished(tagged, weights).text == "<b>VV tt ww <unk></b>"  # the name is aligned with DD, too
    assert is_withheld(decode)


@pytest.mark.slow
def test_outputs_have_the_case_of_the_words_that_they_attend_to(model):
    texts, decode = ["a BB DD", "DD BB", "BB g e DD"], DECODINGS["sample"]
    plain = outputs(*model, decode, texts, LETTERS)
    cased = outputs(*model, dataclasses.replace(decode, casing="capitals"), texts, LETTERS)
    changed = []
    for (request, sample), (text, ids, last) in plain.items():
        words, source = texts[request].split(), LETTERS.source.special.wrap_side(LETTERS.source.encode(texts[request]))
        batch = {"source": np.array([source]), "target_in": np.array([[BOS, *ids[:-1]]])}
        weights = np.asarray(watch(model[0], model[1], batch).weights["cross"])[0, -1].mean(axis=0)
        shown = [(t, LETTERS.target.decode([i], unknown="<unk>")) for t, i in enumerate(ids)]
        attended = [(words[weights[t, : len(words)].argmax()], word) for t, word in shown if word]
        expected = [b.upper() if len(a) > 1 and a.isupper() and b != "<unk>" else b for a, b in attended]
        actual, same, event = cased[request, sample]
        assert (actual.split(), same) == (expected, ids)
        changed.append(event.recased)
        assert event.recased == sum(a != b for a, b in zip(actual.split(), text.split(), strict=True))
        assert last.recased == 0
    assert 0 < sum(changed) < sum(len(text.split()) for text, _, _ in plain.values())


@pytest.mark.slow
def test_words_have_the_case_of_the_language_of_the_output(model):
    """Regression test: outputs had that of the rules of normalization, and of no language without these."""
    tokenizers = Tokenizers(LETTERS.source, WordTokenizer(["ii", *(2 * letter for letter in "uvwxyz")]))
    cfg = config(dataclasses.replace(DECODINGS["greedy"], casing="capitals"), model[0])
    files = {"source": "tsv", "train": ("a.tsv",), "bucket_lengths": (16,)}
    cfg = dataclasses.replace(cfg, data=DataConfig(**files, target_language="tur_Latn"))
    engine = Engine(cfg, *model, tokenizers, max_rows=1)
    ids = tuple(tokenizers.source.special.wrap_side(tokenizers.source.encode("BB")))
    (row,) = engine._queue_request(0, Request(ids, cfg.decode, text="BB")).rows
    row.unfinished.text, row.unfinished.tokens = "ii", tokenizers.target.encode("ii")
    assert engine._finish([row.unfinished])[0].text == "İİ"


@pytest.mark.slow
def test_changed_words_are_counted_and_said(model, caplog):
    decode, texts = dataclasses.replace(DECODINGS["sample"], casing="titles"), ["a BB DD", "DD BB", ""]
    translate = Translator(config(decode, model[0]), model[0], LETTERS)
    count = sum(output.recased > 0 for output in translate.outputs(model[1], texts))
    translate(model[1], texts)
    assert count > 0
    assert f"{count} of 3 outputs have words in the case of the source (decode.casing='titles')" in caplog.text


def test_language_models_have_no_source_to_follow():
    lm = DataConfig(source="stdlib_text", batching="windows", window=8)
    with pytest.raises(UserError, match="decode.casing='capitals': must be 'keep'"):
        Config(model=tiny("decoder_lm"), data=lm, decode=DecodeConfig(casing="capitals"))
