"""Outputs with unknown tokens, copied words and detokenization, against attention weights and sacremoses."""

import dataclasses
import itertools
import random
import re

import numpy as np
import pytest
import sacremoses

from tests.helpers import build, rest_slow, tiny
from tests.inference.engines import finish
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.config.transforms import Transform
from tformer_jax.data.markup import take_out
from tformer_jax.data.tokenizers import UNKNOWN_MARK, Tokenizers
from tformer_jax.data.tokenizers.simple import WordTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.final_texts import Finisher, Unfinished
from tformer_jax.inference.outputs import OutputCounts
from tformer_jax.inference.text import Translator
from tformer_jax.inference.watch import watch
from tformer_jax.special_tokens import BOS, EOS, UNK

SOURCE, TARGET = WordTokenizer(["a", "b", "c", "d", "e", "f", "g"]), WordTokenizer(["T", "U", "V", "W", "X", "Y", "Z"])
TOKENIZERS = Tokenizers(SOURCE, TARGET)
TEXTS = ["a  Zebra b", "Yak, c Emu f", "g"]
DECODINGS = {
    "greedy": DecodeConfig(max_new_tokens=8),
    "beam": DecodeConfig(max_new_tokens=8, strategy="beam", beams=3),
    "sample": DecodeConfig(max_new_tokens=8, strategy="sample", temperature=2.0),
}
TAGS = Transform.from_value({"kind": "entry_tags", "tags": ("<hq>", "<bt>"), "held_out": "<hq>"})


@pytest.fixture(scope="module")
def model():
    cfg = tiny("seq2seq", decoder_layers=2, output_bias=True)
    model, params = build(cfg, seed=3)
    params["head"]["bias"] = np.zeros(11, np.float32)
    params["head"]["bias"][[UNK, 2]] = 1.0, -2.0
    return model, params


def config(decode: DecodeConfig, model, **data) -> Config:
    return Config(model=model.cfg, data=DataConfig(bucket_lengths=(16,), **data), decode=decode)


def outputs(model, params, decode, texts=TEXTS, tokenizers=TOKENIZERS, **options):
    """Returns the text and the ids of each output, by request and sample."""
    served = Engine(config(decode, model), model, params, tokenizers, max_rows=4, **options)
    for text in texts:
        ids = tuple(tokenizers.source.special.wrap_side(tokenizers.source.encode(text)))
        served.submit(Request(ids, decode, seed=5, num_outputs=1 if decode.strategy == "greedy" else 2, text=text))
    events = list(itertools.chain.from_iterable(iter(lambda: served.step() if not served.idle else None, None)))
    ids: dict[tuple[int, int], list[int]] = {}
    for event in events:
        ids.setdefault(event[:2], []).extend(event.ids)
    return {key: (text, ids[key], last) for key, (text, last) in finish(served, events).items()}


def with_copies(model, params, text: str, ids: list[int]) -> str:
    """Returns an output with the word, for each unknown token, that it attends to most in the last layer."""
    words, source = text.split(), SOURCE.special.wrap_side(SOURCE.encode(text))
    batch = {"source": np.array([source]), "target_in": np.array([[BOS, *ids[:-1]]])}
    weights = np.asarray(watch(model, params, batch).weights["cross"])[0, -1].mean(axis=0)
    shown = [words[weights[t, : len(words)].argmax()] if i == UNK else TARGET.decode([i]) for t, i in enumerate(ids)]
    return " ".join(filter(None, shown))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", rest_slow([*DECODINGS], 1))
def test_unknown_tokens_are_shown_copied_or_left_out(model, strategy):
    actual = {
        unknown: outputs(*model, dataclasses.replace(DECODINGS[strategy], unknown=unknown))
        for unknown in ("show", "copy", "omit")
    }
    seen = set()
    for (request, sample), (shown, ids, last) in actual["show"].items():
        assert shown.split().count("<unk>") == ids.count(UNK)
        assert actual["omit"][request, sample][0] == " ".join(shown.replace("<unk>", "").split())
        copied, same_ids, event = actual["copy"][request, sample]
        assert (same_ids, event.finish, event.score, event.tokens) == (ids, last.finish, last.score, last.tokens)
        assert copied == with_copies(*model, TEXTS[request], ids)
        seen |= {*copied.split()} & {"Zebra", "Yak,", "Emu", "g", "a", "b", "c", "f"}
    assert len(seen) > 1


@pytest.mark.slow
def test_without_a_source_text_the_name_is_shown(model):
    decode = dataclasses.replace(DECODINGS["greedy"], unknown="copy")
    served = Engine(config(decode, model[0]), *model, TOKENIZERS, max_rows=4)
    served.submit(Request(tuple(SOURCE.special.wrap_side(SOURCE.encode("a b"))), decode))
    ((text, _),) = finish(served).values()
    shown = outputs(*model, DECODINGS["greedy"], ["a b"])
    assert text == shown[0, 0][0]
    assert "<unk>" in text


@pytest.mark.slow
def test_copied_words_do_not_depend_on_the_batch_and_are_cut_at_stop_sequences(model):
    decode = dataclasses.replace(DECODINGS["greedy"], unknown="copy")
    whole = outputs(*model, decode)
    for request, text in enumerate(TEXTS):
        assert outputs(*model, decode, [text])[0, 0][0] == whole[request, 0][0]
    for strategy in ("sample", "beam"):
        decode = dataclasses.replace(DECODINGS[strategy], stop=tuple(TARGET.pieces))
        plain, cut = outputs(*model, decode), outputs(*model, dataclasses.replace(decode, unknown="copy"))
        assert strategy == "beam" or any({*ids} - {UNK, EOS} for _, ids, _ in plain.values())
        for key, (shown, ids, _) in plain.items():
            assert cut[key][1] == ids
            assert len(cut[key][0].split()) == len(shown.split()) == ids.count(UNK)


@pytest.mark.long
def test_translations_count_unknown_tokens_and_say_so(model, caplog):
    translate = Translator(config(DECODINGS["greedy"], model[0]), model[0], TOKENIZERS)
    actual = translate.outputs(model[1], [*TEXTS, ""])
    assert [output.unknown for output in actual] == [output.text.split().count("<unk>") for output in actual]
    unknown = sum(output.unknown > 0 for output in actual)
    assert unknown
    assert translate(model[1], [*TEXTS, ""]) == [output.text for output in actual]
    assert f"{unknown} of 4 outputs have unknown tokens, shown by name" in caplog.text
    assert "2 of 4 texts have unknown tokens, which the model cannot tell apart" in caplog.text
    sources = ["a zzz yyy", "a b", ""]
    assert [output.unknown_read for output in translate.outputs(model[1], sources)] == [2, 0, 0]
    translate(model[1], sources)
    assert "1 of 3 texts have unknown tokens, which the model cannot tell apart" in caplog.text
    decode = dataclasses.replace(DECODINGS["greedy"], unknown="copy")
    copying = Translator(config(decode, model[0]), model[0], TOKENIZERS)
    copied = copying.outputs(model[1], [*TEXTS, ""])
    assert [output.unknown for output in copied] == [output.unknown for output in actual]
    expected = outputs(*model, decode)
    assert [output.text for output in copied[:3]] == [expected[n, 0][0] for n in range(3)]
    assert "".join(piece.text for piece in copying.stream_pieces(model[1], TEXTS[0])) == copied[0].text


def test_words_are_copied_from_their_place_after_the_tags_of_languages():
    tagged = TOKENIZERS.source.extended(["<2de>", "<2en>"])
    finisher = Finisher(None, None, Tokenizers(tagged, TOKENIZERS.target), 1)
    tags, text = (tagged.id_of("<2en>"), tagged.id_of("<2de>")), "a zebra c"
    output = Unfinished(DecodeConfig(), [*tags, *tagged.encode(text), EOS], BOS, text, text=UNKNOWN_MARK, tokens=[UNK])
    weights = np.array([[0.3, 0.2, 0.1, 0.25, 0.15, 0.0]])  # of tags, words and the end
    assert finisher._filled(output, output.text, weights) == "zebra"
    source = [*tagged.encode("a zebra"), EOS, tags[0]]  # of which the last word did not fit
    output = Unfinished(DecodeConfig(), source, tags[1], text, text=UNKNOWN_MARK, tokens=[UNK])
    assert finisher._filled(output, output.text, np.array([[0.1, 0.2, 0.4, 0.3]])) == "zebra"


DATA = DataConfig(normalize=("moses",), tokenizer="words", target_language="en", shared_vocab=False)


@pytest.mark.long
@pytest.mark.parametrize("strategy", rest_slow([*DECODINGS], 1))
def test_outputs_are_detokenized(model, strategy):
    examples = [{"source": "a b c", "target": "& < > | [ ] A&B"}]
    tokenizers = train_tokenizers(DATA, examples)
    small, params = build(tiny("seq2seq", vocab_size=tokenizers.target.vocab_size), seed=1)
    decode = dataclasses.replace(DECODINGS[strategy], unknown="omit")
    cfg = dataclasses.replace(config(decode, small), data=dataclasses.replace(DATA, bucket_lengths=(16,)))
    plain = Translator(cfg, small, tokenizers).outputs(params, ["a b", "c"])
    detokenizing = dataclasses.replace(cfg, decode=dataclasses.replace(decode, detokenize=True))
    actual = Translator(detokenizing, small, tokenizers).outputs(params, ["a b", "c"])
    moses = sacremoses.MosesDetokenizer("en")
    assert [output.text for output in actual] == [moses.detokenize(output.text.split()) for output in plain]
    assert [output.text for output in actual] != [output.text for output in plain]


def test_what_cannot_be_copied_or_detokenized_is_refused(model):
    lm = {"source": "stdlib_text", "batching": "windows", "window": 8}
    with pytest.raises(UserError, match="decode.unknown='copy': must be 'show' or 'omit' for model.family="):
        Config(model=tiny("decoder_lm"), data=DataConfig(**lm), decode=DecodeConfig(unknown="copy"))
    with pytest.raises(UserError, match="decode.detokenize=True: needs outputs in tokens of Moses"):
        config(DecodeConfig(detokenize=True), model[0])
    cfg = config(DecodeConfig(detokenize=True), model[0], normalize=("moses",))
    with pytest.raises(UserError, match="decode.detokenize=True: outputs are not tokens of Moses"):
        Translator(cfg, model[0], TOKENIZERS)(model[1], ["a"])


@pytest.mark.long
@pytest.mark.parametrize("strategy", rest_slow([*DECODINGS], 1))
def test_markup_is_taken_out_and_put_back(model, strategy):
    decode = dataclasses.replace(DECODINGS[strategy], unknown="omit")
    texts = ["a <b>b c</b> {0}", "<i>d</i>", "%s<br/>"]
    keeping = Translator(config(decode, model[0]), model[0], TOKENIZERS)
    aligning = dataclasses.replace(decode, markup="align")
    translate = Translator(config(aligning, model[0]), model[0], TOKENIZERS)
    plain = keeping.outputs(model[1], ["a b c", "d", ""])
    actual = translate.outputs(model[1], texts)
    marks = re.compile(r"<[^>]*>|\{0\}|%s")
    for output, other, text in zip(actual, plain, texts, strict=True):
        assert marks.sub("", output.text).split() == other.text.split()
        assert sorted(marks.findall(output.text)) == sorted(marks.findall(text))
        assert output.placeholders_kept
    assert actual[2].text == "%s<br/>"
    assert [*translate.stream_pieces(model[1], texts[2])] == [actual[2]]


def test_markup_alone_is_an_output_without_the_space_around_it(model):
    translate = Translator(config(DecodeConfig(markup="align"), model[0]), model[0], TOKENIZERS)
    outputs = translate.outputs(model[1], [" ", "\u3000\t", " <b> </b> ", "{0}\n"])
    assert [output.text for output in outputs] == ["", "", "<b> </b>", "{0}"]
    assert all(output.placeholders_kept for output in outputs)


def test_the_tag_that_a_format_puts_before_a_source_is_no_word():
    """By hand: tokens attend most to the tag. Regression test: words were taken for their neighbors."""
    tagged = WordTokenizer(["a", "b"]).with_symbols(("<hq>", "<bt>"))
    finisher = Finisher(None, None, Tokenizers(tagged, TARGET), 1, (TAGS,))
    for text, written in (("a zebra", "<hq>a zebra"), ("<bt>a zebra", "<bt>a zebra")):
        source = tagged.special.wrap_side(tagged.encode(written))
        decode = DecodeConfig(alignments=True, unknown="copy")
        tokens = [UNK, *TARGET.encode("T")]
        output = Unfinished(decode, source, BOS, text, text=f"{UNKNOWN_MARK} T", tokens=tokens)
        weights = np.array([[0.5, 0.1, 0.4, 0.0], [0.5, 0.4, 0.1, 0.0]]) if text[0] == "a" else np.eye(4)[[2, 1]]
        assert finisher._finished(output, weights) == ("zebra T", ((0, 1), (1, 0)), 0)


def test_markup_of_the_model_is_left_out():
    """By hand: a vocabulary whose words are marks, of which none was in the source, and the name of unknown tokens."""
    target = WordTokenizer(["T", "<b>", "{0}", "%s", "X", "Y", "Z"])
    finisher = Finisher(None, None, Tokenizers(SOURCE, target), 1)
    segment, words = take_out("<i>a</i> b"), ["T", "<b>", "X", "{0}"]
    source = SOURCE.special.wrap_side(SOURCE.encode(segment.plain))
    ids, decode = [*target.encode(" ".join(words)), UNK], DecodeConfig(markup="align")
    weights = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]], float)
    output = Unfinished(decode, source, BOS, segment.plain, segment=segment, text="T <b> X {0} <unk>", tokens=ids)
    assert finisher._finished(output, weights).text.split() == ["<i>T</i>", "X", "<unk>"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*DECODINGS])
def test_no_mark_of_1000_segments_is_lost_or_invented_by_random_weights(model, strategy):
    """The model has not learned anything, and some of its words are marks; the marks are counted by their texts."""
    from tests.programs.alignments import with_marks

    draw = random.Random(1)
    tokenizers = Tokenizers(SOURCE, WordTokenizer(["T", "<b>", "{0}", "%s", "X", "%d", "Z"]))
    decode = dataclasses.replace(DECODINGS[strategy], unknown="omit", markup="align")
    translate = Translator(config(decode, model[0]), model[0], tokenizers)
    texts = [with_marks(draw.choices(SOURCE.pieces, k=draw.randint(1, 6)), draw) for _ in range(1000)]
    actual = translate.outputs(model[1], texts)
    pattern = re.compile(r"</?[a-z][^<>]*>|\{\d\}|%[sd]")
    for text, output in zip(texts, actual, strict=True):
        assert sorted(pattern.findall(output.text)) == sorted(pattern.findall(text)), (text, output)
        assert output.placeholders_kept
    assert sum(len(pattern.findall(text)) for text in texts) > 1000
    counts = OutputCounts()
    for output in actual:
        counts.add([output])
    invented = sum(output.invented > 0 for output in actual)
    assert (invented > 0) == (strategy == "sample")  # the others write unknown tokens, which are left out
    said = f"{invented:,} of 1,000 outputs have markup that the model wrote itself"
    assert (said in " ".join(counts.describe(translate.cfg))) == (invented > 0)
