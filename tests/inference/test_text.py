"""Text functions: outputs in order, independent of the batches, and clear errors for texts that do not fit."""

import dataclasses

import numpy as np
import pytest

from tests import oracles
from tests.helpers import build, rest_slow, tiny
from tests.inference.beam_search import best_translations
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference import batching
from tformer_jax.inference.batching import pad_rows
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.engine import Engine
from tformer_jax.inference.text import LabelClassifier, TextGenerator, Translator
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD, UNK

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc", "g", "fedcba", "", "aa", "abcdefgabc"]


def setup(family: str, batch_size: int = 2) -> Config:
    source, batching = {
        "seq2seq": ("cldr_translation", "buckets"),
        "decoder_lm": ("stdlib_text", "windows"),
        "classifier": ("cldr_language", "buckets"),
    }[family]
    return Config(
        model=tiny(family, output_bias=family != "classifier"),
        data=DataConfig(source=source, batching=batching, window=8, bucket_lengths=(8, 16)),
        decode=DecodeConfig(max_new_tokens=5),
        eval=EvalConfig(batch_size=batch_size),
    )


@pytest.fixture(scope="module", autouse=True)
def same_slots():
    """Gives all engines of a batch size as many rows, so that few functions are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tformer_jax.inference.outputs.power_of_two", lambda needed: 64)
        yield


@pytest.fixture(scope="module")
def translations():
    """Returns the outputs for TEXTS one by one."""
    cfg = setup("seq2seq", batch_size=1)
    _, params = build(tiny("seq2seq"), seed=1)
    model, params = registry.build(cfg.model), params | {"head": {"bias": np.zeros(11, np.float32)}}
    translate = Translator(cfg, model, TOKENIZERS)
    return model, params, [translate(params, [text])[0] for text in TEXTS]


@pytest.mark.long
@pytest.mark.parametrize("batch_size", rest_slow([2, 8], 1))
def test_translations_are_in_order_for_any_batch_size(translations, batch_size):
    model, params, expected = translations
    assert len(set(expected)) > 1
    translate = Translator(setup("seq2seq", batch_size), model, TOKENIZERS)
    assert translate(params, TEXTS) == expected
    assert translate(params, TEXTS[::-1]) == expected[::-1]
    assert translate(params, []) == []


@pytest.mark.long
def test_a_blank_text_has_a_blank_translation(translations):
    model, params, expected = translations
    translate = Translator(setup("seq2seq"), model, TOKENIZERS)
    blanks = ["", " \t", "\u3000", "\u200b\ufeff", "\x00", "\u0301", "\u2028"]
    assert translate(params, [*blanks, "abc"]) == [*[""] * len(blanks), expected[0]]


def test_white_space_and_invisible_characters_do_not_change_translations(translations):
    model, params, expected = translations
    tokenizer = LETTERS.normalized(("whitespace",), "en")
    translate = Translator(setup("seq2seq"), model, Tokenizers(tokenizer, tokenizer))
    changes = [" {}", "{} ", "\t{}\r\n", "\u3000{}\xa0", "{}\u2028", "\ufeff{}", "\u200b{}\u200f", "{}\x07"]
    assert translate(params, [change.format(TEXTS[0]) for change in changes]) == [expected[0]] * len(changes)


class WithoutZeroWidth(CharacterTokenizer):
    """Removes zero-width spaces before tokenization, as SentencePiece does."""

    @staticmethod
    def split(text: str) -> str:
        return text.replace("\u200b", "")


def test_a_text_without_tokens_has_a_blank_translation(translations):
    model, params, expected = translations
    tokenizer, cfg = WithoutZeroWidth("abcdefg"), setup("seq2seq")
    translate = Translator(cfg, model, Tokenizers(tokenizer, tokenizer))
    assert translate(params, ["\u200b", "abc\u200b"]) == ["", expected[0]]


def test_labels_have_probabilities():
    cfg = setup("classifier")
    model, params = build(cfg.model)
    actual = LabelClassifier(cfg, model, TOKENIZERS, ["x", "y", "z"])(params, TEXTS)
    for text, (label, probability) in zip(filter(None, TEXTS), (each for each in actual if each[0]), strict=True):
        tokens = np.array([LETTERS.encode(text)])
        expected = oracles.softmax(oracles.classifier(oracles.f64(params), model.cfg, tokens, tokens != PAD))[0]
        assert label == "xyz"[expected.argmax()]
        assert probability == pytest.approx(expected.max(), rel=1e-4)


def test_blank_texts_have_no_label():
    cfg = setup("classifier")
    model, params = build(cfg.model)
    classify = LabelClassifier(cfg, model, TOKENIZERS, ["x", "y", "z"])
    assert classify(params, ["", "ab", "\u200b "]) == [("", 0.0), *classify(params, ["ab"]), ("", 0.0)]
    assert list(classify.stream(params, iter([" "]))) == [("", 0.0)]


@pytest.fixture(scope="module")
def language_model():
    """Returns a model that never chooses EOS."""
    model, params = build(setup("decoder_lm").model)
    params["head"]["bias"] = params["head"]["bias"].at[EOS].set(-1e4)
    return model, params


@pytest.mark.slow
def test_continuations_exclude_the_prompt_and_are_independent(language_model):
    model, params = language_model
    prompts = ["abcdefgabcdefg", "abc", "g"]
    continue_text = TextGenerator(setup("decoder_lm"), model, TOKENIZERS)
    together = continue_text(params, prompts)
    tokens = [LETTERS.encode(text) for text in together]
    assert [len(ids) for ids in tokens] == [16 - 14, 5, 5]
    assert together == [continue_text(params, [prompt])[0] for prompt in prompts]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["greedy", "beam"])
def test_outputs_that_end_at_the_maximum_length_of_the_model(language_model, strategy):
    """The model has 16 positions; the second prompt and its output fill them."""
    model, params = language_model
    decode = DecodeConfig(strategy=strategy, max_new_tokens=5)
    prompts = ["abcdefgabcdefg", "abcdefgabcd", "g"]

    def outputs(decode):
        return TextGenerator(dataclasses.replace(setup("decoder_lm"), decode=decode), model, TOKENIZERS).outputs(
            params, prompts
        )

    actual = outputs(decode)
    assert [output.limit for output in actual] == ["model.max_length", "decode.max_new_tokens", "decode.max_new_tokens"]
    stopped = outputs(dataclasses.replace(decode, stop=(actual[0].text[-1],)))
    assert (stopped[0].limit, stopped[0].finish_reason) == (None, "stop")


@pytest.mark.long
@pytest.mark.parametrize("strategy", rest_slow(["greedy", "beam"], 1))
def test_outputs_are_as_long_as_the_model_can_be(language_model, strategy, caplog):
    """A prompt and its output have 16 tokens together; a truncated prompt leaves room for half of them."""
    model, params = language_model
    cfg = dataclasses.replace(setup("decoder_lm"), decode=DecodeConfig(strategy=strategy))
    continue_text = TextGenerator(cfg, model, TOKENIZERS)
    actual = continue_text.outputs(params, ["abcdefgabcdefg", "g"])
    assert [len(LETTERS.encode(output.text)) for output in actual] == [2, 15]
    assert [output.limit for output in actual] == ["model.max_length"] * 2
    (cut,) = continue_text.outputs(params, ["abcdefg" * 3], long_texts=LongTexts("truncate"))
    assert len(LETTERS.encode(cut.text)) == 8
    continue_text(params, ["g"])
    assert "1 of 1 output ends at model.max_length=16 and may be incomplete" in caplog.text


def test_translations_are_as_long_as_the_model_can_be(translations):
    """The decoder reads BOS and 15 tokens, and writes 16."""
    cfg = dataclasses.replace(setup("seq2seq"), decode=DecodeConfig())
    model, params, _ = translations
    params = params | {"head": {"bias": np.where(np.arange(11) == LETTERS.encode("b")[0], 1e4, 0).astype(np.float32)}}
    (output,) = Translator(cfg, model, TOKENIZERS).outputs(params, ["a"])
    assert (output.text, output.limit) == (16 * "b", "model.max_length")


@pytest.mark.slow
def test_samples_depend_on_seed_and_index_but_not_on_the_batch(language_model):
    model, params = language_model
    sample = DecodeConfig(strategy="sample", temperature=2.0, max_new_tokens=5)

    def samples(batch_size, seed=0):
        cfg = dataclasses.replace(setup("decoder_lm", batch_size), decode=sample)
        return TextGenerator(cfg, model, TOKENIZERS)(params, ["abc", "abc", "a", "abcdef", "abc"], seed=seed)

    first = samples(2)
    assert len({first[0], first[1], first[4]}) == 3
    assert samples(8) == first
    assert samples(2, seed=1) != first


@pytest.mark.parametrize(
    ("family", "kind", "texts", "sentence"),
    [
        (
            "seq2seq",
            Translator,
            ["a" * 16],
            "text 1: the source has 16 tokens, but the model takes at most 15: shorten it",
        ),
        ("seq2seq", Translator, ["a", "a" * 16], "text 2: the source has 16 tokens, but the model takes at most 15"),
        ("decoder_lm", TextGenerator, ["a" * 16], "the prompt has 16 tokens, but the model takes at most 15"),
        (
            "decoder_lm",
            TextGenerator,
            ["a", ""],
            "text 2: the prompt is empty, and the model has no token that starts a text: write at least one character",
        ),
    ],
)
def test_what_does_not_fit(family, kind, texts, sentence):
    cfg = setup(family)
    if "starts a text" in sentence:
        cfg = without_start(cfg)
    with pytest.raises(UserError, match=sentence):
        kind(cfg, registry.build(cfg.model), TOKENIZERS)({}, texts)


def without_start(cfg: Config) -> Config:
    """Returns the config with documents in segments of their own, whose first tokens no other token precedes."""
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batching="packed", bucket_lengths=(16, 32, 64)))


def test_evaluation_truncates_long_texts():
    cfg = setup("classifier")
    model, params = build(cfg.model)
    classify = LabelClassifier(cfg, model, TOKENIZERS, ["x", "y", "z"])
    assert classify(params, ["ab" * 20], long_texts=LongTexts("truncate")) == classify(params, ["ab" * 8])


def streamed(generator, params, texts, **options) -> list[list]:
    return list(generator.stream(params, iter(texts), **options))


@pytest.mark.long
@pytest.mark.parametrize("chunk", [2, 1024])
def test_a_stream_equals_a_call(translations, language_model, monkeypatch, chunk):
    monkeypatch.setattr(batching, "ROWS_PER_CHUNK", chunk)
    model, params, expected = translations
    actual = streamed(Translator(setup("seq2seq"), model, TOKENIZERS), params, TEXTS)
    assert [output.text for (output,) in actual] == expected
    model, params = language_model
    continue_text = TextGenerator(setup("decoder_lm"), model, TOKENIZERS)
    prompts = ["abc", "g", "abcdefgabcdefg"]
    actual = streamed(continue_text, params, prompts)
    assert [output.text for (output,) in actual] == continue_text(params, prompts)
    pieces = list(continue_text.stream_pieces(params, "abc"))
    assert "".join(piece.text for piece in pieces) == actual[0][0].text
    assert [piece.limit for piece in pieces] == [*[None] * 4, "decode.max_new_tokens"]
    assert len(pieces) == 5


@pytest.mark.slow
def test_a_stream_of_the_best_outputs(translations):
    model, params, _ = translations
    cfg = dataclasses.replace(setup("seq2seq"), decode=DecodeConfig(strategy="beam", beams=3, max_new_tokens=5))
    translate = Translator(cfg, model, TOKENIZERS)
    actual = streamed(translate, params, TEXTS, outputs=2)
    source = pad_rows([[*LETTERS.encode(text), EOS] for text in TEXTS], len(TEXTS), 16)
    expected = best_translations(model, params, source, length=5, cfg=cfg.decode)
    for text, outputs, tokens, scores in zip(TEXTS, actual, *map(np.asarray, expected), strict=True):
        texts = [LETTERS.decode(row, unknown="<unk>") for row in tokens[:2]] if text else ["", ""]
        assert [output.text for output in outputs] == texts
        if text:
            assert [output.score for output in outputs] == pytest.approx(scores[:2].tolist(), rel=1e-5)


@pytest.mark.long
def test_samples_of_a_stream_depend_only_on_their_index(language_model, monkeypatch):
    model, params = language_model
    decode = DecodeConfig(strategy="sample", temperature=2.0, max_new_tokens=5)
    continue_text = TextGenerator(dataclasses.replace(setup("decoder_lm"), decode=decode), model, TOKENIZERS)
    actual = streamed(continue_text, params, ["abc", "a", "abc"], outputs=2, seed=3)
    called = continue_text(params, ["abc", "abc", "a", "a", "abc", "abc"], seed=3)
    assert [output.text for outputs in actual for output in outputs] == called
    assert streamed(continue_text, params, ["abc", "a", "abc"], outputs=2, seed=3, skip=1) == actual[1:]
    monkeypatch.setattr(batching, "ROWS_PER_CHUNK", 2)
    assert streamed(continue_text, params, ["abc", "a", "abc"], outputs=2, seed=3) == actual


def test_outputs_are_yielded_once_all_earlier_ones_are_known(translations, monkeypatch):
    model, params, expected = translations
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(1) or step(engine))
    monkeypatch.setattr("tformer_jax.inference.text.WINDOW", 1)
    actual, counts = [], []
    for (output,) in Translator(setup("seq2seq"), model, TOKENIZERS).stream(params, iter([*TEXTS, *TEXTS])):
        actual.append(output.text)
        counts.append(len(steps))
    assert actual == [*expected, *expected]
    assert counts[0] < counts[len(TEXTS)] < len(steps)


@pytest.mark.slow
def test_a_resumed_stream_has_bit_identical_scores(translations, monkeypatch):
    model, params, _ = translations
    monkeypatch.setattr(batching, "ROWS_PER_CHUNK", 3)
    translate = Translator(setup("seq2seq", 4), model, TOKENIZERS)  # batches of 2 would hide wrong chunks
    texts = ["abcdefgabcdefg", "", "", *TEXTS[:4]]
    expected = streamed(translate, params, texts, scores=True)
    for skip in (4, 6):
        assert streamed(translate, params, texts, scores=True, skip=skip) == expected[skip:]


def test_long_texts_are_cut_or_left_out(translations, language_model):
    model, params, expected = translations
    translate = Translator(setup("seq2seq"), model, TOKENIZERS)
    long, texts = "abcdefg" * 3, ["abc", "abcdefg" * 3, "g"]
    cut, skip = LongTexts("truncate"), LongTexts("skip")
    assert translate(params, texts, long_texts=cut) == [expected[0], *translate(params, [long[:15]]), expected[1]]
    assert translate(params, texts, long_texts=skip) == [expected[0], "", expected[1]]
    for long_texts in (cut, skip):
        assert [long_texts.pop(index) for index in (0, 1, 1, 2)] == [False, True, False, False]
    model, params = language_model
    continue_text = TextGenerator(setup("decoder_lm"), model, TOKENIZERS)
    assert continue_text(params, [long], long_texts=LongTexts("truncate")) == continue_text(params, [long[-(16 - 5) :]])


@pytest.mark.parametrize("strategy", ["greedy", "sample"])
@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm"])
def test_scores_of_a_stream_are_those_of_the_formulas(family, strategy):
    decode = DecodeConfig(strategy=strategy, max_new_tokens=5, temperature=2.0)
    cfg = dataclasses.replace(setup(family), decode=decode)
    model, params = build(cfg.model, seed=2)
    params["head"]["bias"] = params["head"]["bias"].at[UNK].set(-30)  # it would not be seen in the text
    kind = Translator if family == "seq2seq" else TextGenerator
    continue_text = kind(cfg, model, TOKENIZERS)
    for prompt in ("abc", "gfedcbagfed"):
        ((output,),) = streamed(continue_text, params, [prompt], scores=True)
        (plain,) = continue_text(params, [prompt])
        assert output.text == plain
        begin, ids = LETTERS.encode(prompt), LETTERS.encode(plain)
        ids += [EOS] * (len(ids) < 5)
        if family == "seq2seq":
            read, source = np.array([[BOS, *ids[:-1]]]), np.array([[*begin, EOS]])
            logits = oracles.seq2seq(oracles.f64(params), cfg.model, source, read, source != PAD, read != PAD)
        else:
            read = np.array([begin + ids[:-1]])
            logits = oracles.decoder_lm(oracles.f64(params), cfg.model, read, read != PAD)[:, len(begin) - 1 :]
        log_p = np.log(oracles.softmax(logits[0]))
        assert output.score == pytest.approx(log_p[np.arange(len(ids)), ids].sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("family", "texts", "sentence"),
    [
        ("seq2seq", ["a", "", "a" * 16, "b"], "text 3: the source has 16 tokens, but the model takes at most 15"),
        ("seq2seq", ["a" * 16, "b"], "text 1: the source has 16 tokens"),
        ("seq2seq", ["a" * 16], "the source has 16 tokens"),
        ("decoder_lm", ["a", "b", "", "b"], "text 3: the prompt is empty, and the model has no token that starts"),
        ("decoder_lm", ["a", "b", "a" * 16], "text 3: the prompt has 16 tokens"),
        ("decoder_lm", [""], "the prompt is empty"),
    ],
)
def test_a_stream_ends_at_a_text_that_is_too_long(family, texts, sentence):
    cfg = without_start(setup(family)) if "empty" in sentence else setup(family)
    model, params = build(cfg.model)
    kind = Translator if family == "seq2seq" else TextGenerator
    actual = kind(cfg, model, TOKENIZERS).stream(params, iter(texts))
    for _ in range(2 if "3" in sentence else 0):
        next(actual)
    with pytest.raises(UserError, match=sentence):
        next(actual)


def test_a_stream_of_labels():
    cfg = setup("classifier")
    model, params = build(cfg.model)
    classify = LabelClassifier(cfg, model, TOKENIZERS, ["x", "y", "z"])
    assert list(classify.stream(params, iter(TEXTS), skip=2)) == classify(params, TEXTS)[2:]
