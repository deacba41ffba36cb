"""Languages of translators: which are meant, their tags, and batches of several directions."""

import numpy as np
import pytest

from tests import oracles
from tests.helpers import build, rest_slow, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.encoding import TextError
from tformer_jax.inference.languages import Languages
from tformer_jax.inference.requests import Request
from tformer_jax.inference.text import TextGenerator, Translator
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD

LETTERS = CharacterTokenizer("abcdefg").extended([f"<2{code}>" for code in ("de", "en", "fr", "pt_BR")])
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TAG = languages_of(LETTERS)
V = LETTERS.vocab_size


def data(*directions: str, **settings) -> DataConfig:
    files = {"train": ("{src}-{tgt}.tsv",), "validation": ("dev.{src}-{tgt}.tsv",)}
    return DataConfig(source="tsv", **files, directions=directions, **settings)


MANY = data("en-de", "en-fr", "de-en", "en-pt_BR", target_tags=("source", "target"))


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        ("de", "en", ("en", "de")),
        ("German", "English", ("en", "de")),
        ("pt-BR", "en", ("en", "pt_BR")),
        ("pt", "eng", ("en", "pt_BR")),
        ("fr", "de", ("de", "fr")),  # a pair that training did not have
    ],
)
def test_languages_are_named_by_code_or_in_english(target, source, expected):
    source_language, target_language = (TAG[code] for code in expected)
    assert Languages(MANY, TOKENIZERS).tags(target, source) == ((target_language,), (source_language, target_language))


@pytest.mark.parametrize(
    ("settings", "target", "source", "sentence"),
    [
        (MANY, None, "en", "the target language is missing: name one of de, fr, en, pt_BR"),
        (MANY, "de", None, "the source language is missing: name one of en, de"),
        (MANY, "de", "fr", "the model has no source language 'fr', only en, de"),
        (MANY, "Portugese", "en", r"the model has no language 'Portugese'; did you mean 'pt_BR'\?; it has"),
        (MANY, "gr", "en", r"the model has no language 'gr'; did you mean 'fr'\?; it has de, en, fr, pt_BR"),
        (
            DataConfig(source="tsv", train=("a.tsv",)),
            *("de", None, "the model has one direction: leave out the target language 'de'"),
        ),
        (
            DataConfig(source="cldr_translation", target_language="fr"),
            *("de", None, "the model has one direction, en to fr: leave out the target language 'de'"),
        ),
    ],
)
def test_languages_that_the_model_does_not_have(settings, target, source, sentence):
    with pytest.raises(UserError, match=sentence):
        Languages(settings, TOKENIZERS).tags(target, source)


def test_languages_need_no_name_where_there_is_only_one():
    into_english = Languages(data("de-en", "fr-en"), TOKENIZERS)
    assert into_english.tags() == into_english.tags("en", "French") == ((TAG["en"],), ())
    assert (into_english.sources, into_english.targets) == (("de", "fr"), ("en",))
    pair = Languages(DataConfig(source="cldr_translation", target_language="fr"), TOKENIZERS)
    assert pair.tags() == pair.tags("French", "eng") == ((), ())
    assert pair.targets == ()


@pytest.mark.parametrize("source_tags", [(), ("target",), ("source", "target")])
@pytest.mark.parametrize("target_tags", [("target",), ("target", "source")])
def test_the_language_of_an_output_is_that_of_its_tags(source_tags, target_tags):
    sides = {"source_tags": source_tags, "target_tags": target_tags}
    if source_tags == ("target",):
        sides["target_tags"] = tuple(name for name in target_tags if name == "source")  # one side tells the target
    languages = Languages(data("en-de", "de-en", "en-pt_BR", **sides), TOKENIZERS)
    for source, target, code in (("en", "de", "de"), ("de", "en", "en"), ("en", "pt_BR", "pt")):
        before, forced = languages.tags(target, source)
        assert languages.of_output([*before, *LETTERS.encode("abc"), EOS], forced) == code
        assert languages.of_output([*LETTERS.encode("abc"), EOS, *before], forced) == code


def test_languages_of_texts_that_need_no_name():
    into_english = Languages(data("de-en", "fr-en", target_tags=("source",), source_tags=()), TOKENIZERS)
    assert into_english.of_output(LETTERS.encode("abc"), (TAG["fr"],)) == "en"
    from_german = Languages(data("de-en", "de-fr"), TOKENIZERS)
    assert from_german.language_of_source(Request("abc", "en")) == "de"
    turkish = DataConfig(source="tsv", train=("a.tsv",), source_language="de", target_language="tur_Latn")
    assert Languages(turkish, TOKENIZERS).of_output(LETTERS.encode("abc"), ()) == "tr"
    assert Languages(turkish, TOKENIZERS).language_of_source(Request("abc")) == "de"
    assert Languages(DataConfig(source="tsv", train=("a.tsv",)), TOKENIZERS).of_output((), ()) == "en"


def greedy(model, params, source: list[int], forced: list[int], length: int) -> tuple[str, float]:
    """Returns the most probable output after `forced`, and its log-probability, by float64 full passes."""
    output, total = list(forced), 0.0
    allowed = np.array([token not in (0, BOS, *TAG.values()) for token in range(V)])
    while len(output) < length and EOS not in output:
        rows = np.array([source]), np.array([[BOS, *output]])
        logits = oracles.seq2seq(oracles.f64(params), model.cfg, *rows, *(row != PAD for row in rows))[0, -1]
        output.append(int(np.where(allowed, logits, -np.inf).argmax()))
        total += np.log(oracles.softmax(logits))[output[-1]]
    return LETTERS.decode(output, unknown="<unk>"), total


@pytest.mark.slow
@pytest.mark.parametrize(
    "sides", rest_slow([(("source",), ("target",)), (("target",), ()), ((), ("source", "target"))], 1)
)
def test_one_batch_has_many_directions_and_prefixes(sides):
    """Tags stand before a source, and with the prefix before an output; a scored target has no score of its tags."""
    cfg = Config(
        model=tiny("seq2seq", vocab_size=V, source_vocab_size=V, max_length=16),
        data=data("en-de", "en-fr", "de-en", source_tags=sides[0], target_tags=sides[1], bucket_lengths=(8, 16)),
        decode=DecodeConfig(max_new_tokens=6, prefix="f"),
        eval=EvalConfig(batch_size=4),
    )
    model, params = build(cfg.model, seed=7)
    requests = [
        Request("abc", "de", "en"),
        Request("abc", "fr", "en"),
        Request("gfedcba", "en", "German", prefix="ba"),
        Request("abc", "de", "en", prefix=""),
        Request("", "de", "en"),
        Request("bb", "fr", "de", prefix="cab"),
    ]
    expected = []
    for text, target, source, prefix, *_ in requests:
        codes = {"target": target, "source": "de" if source == "German" else source}
        before, first = ([TAG[codes[name]] for name in names] for names in sides)
        ids = [*before, *LETTERS.encode(text), EOS]
        forced = [*first, *LETTERS.encode("f" if prefix is None else prefix)]
        expected.append(greedy(model, params, ids, forced, 6) if text else ("", None))
    translate = Translator(cfg, model, TOKENIZERS)
    actual = [(output.text, output.score) for (output,) in translate.stream(params, iter(requests), scores=True)]
    assert [text for text, _ in actual] == translate(params, requests) == [text for text, _ in expected]
    for (_, score), (_, total) in zip(actual, expected, strict=True):
        assert score == (total if total is None else pytest.approx(total, rel=1e-5))
    assert len({score for _, score in actual}) == len(requests)
    assert "".join(piece.text for piece in translate.stream_pieces(params, requests[5])) == expected[5][0]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request("a", "Klingon"), "text 2: the model has no language 'Klingon'"),
        (Request("a", prefix="Ω"), "text 2: decode.prefix='Ω': cannot be encoded with this vocabulary"),
        (Request("a", prefix="b"), "text 2: decode.stop=.*'b' occurs in decode.prefix='b'"),
        (Request("a", prefix="aaaa"), "text 2: decode.prefix='aaaa': has 5 tokens, more than decode.max_new_tokens=4"),
    ],
)
def test_a_request_that_cannot_be_served_is_named(request_, sentence):
    cfg = Config(
        model=tiny("seq2seq", vocab_size=V, source_vocab_size=V),
        data=data("de-en", "fr-en", source_tags=(), target_tags=("target",), bucket_lengths=(8,)),
        decode=DecodeConfig(max_new_tokens=4, stop=("b",)),
    )
    with pytest.raises(TextError, match=sentence):
        Translator(cfg, registry.build(cfg.model), TOKENIZERS)(None, ["a", request_])


def test_a_language_model_has_no_languages():
    cfg = Config(model=tiny("decoder_lm"), data=DataConfig(source="stdlib_text", batching="windows", window=8))
    with pytest.raises(TextError, match="text 1: has a language, but a language model continues texts: leave it out"):
        TextGenerator(cfg, None, TOKENIZERS)(None, [Request("a", "de")])
