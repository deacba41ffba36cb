"""Outputs get the placeholders of their source, wherever they are decoded; inputs have the format of sources."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.helpers import build, rest_slow, tiny
from tests.inference.engines import finish
from tests.serving.live import around
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.data.placeholders import NUMBERED, has_same_placeholders
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import WordTokenizer
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.outputs import RowDecoder
from tformer_jax.inference.requests import Request as TextRequest
from tformer_jax.inference.scores import Scorer
from tformer_jax.inference.text import Translator
from tformer_jax.serving.model import ServedModel
from tformer_jax.special_tokens import EOS, UNK

NAMES = ("percent", "tags")
SOURCE = WordTokenizer(["a", "b", "c"]).with_symbols(NUMBERED[:3], NAMES)
TARGET = WordTokenizer(["T", "U", "V"]).with_symbols(NUMBERED[:3], NAMES)
TOKENIZERS = Tokenizers(SOURCE, TARGET)
PLACEHOLDERS = TOKENIZERS.placeholders
TEXTS = ["a %s b <b>", "<b> %d %(x)s c", "c"]
ORIGINALS = [("%s", "<b>"), ("<b>", "%d", "%(x)s"), ()]


@pytest.fixture(scope="module")
def model():
    cfg = tiny("seq2seq", vocab_size=TARGET.vocab_size, output_bias=True)
    model, params = build(cfg, seed=3)
    params["head"]["bias"] = np.array([0, 0, -2, 0.5, 0, 0, 0, 1, 1, 1], np.float32)
    return model, params


def config(model, **decode) -> Config:
    settings = DecodeConfig(**{"max_new_tokens": 8} | decode)
    return Config(model=model.cfg, data=DataConfig(bucket_lengths=(16,)), decode=settings)


def restored(ids, originals, **options) -> str:
    """Replaces symbols by hand."""
    text = TARGET.decode(ids, **options)
    for number, symbol in enumerate(NUMBERED):
        text = text.replace(symbol, originals[number] if number < len(originals) else "")
    return text


@pytest.mark.parametrize("setting", ["stop", "forbidden"])
def test_texts_with_placeholders_neither_end_outputs_nor_are_forbidden(setting):
    """Outputs get them from their source, after the search."""
    cases = [({setting: ("T %s",)}, TARGET), ({setting: ("<b>",), "markup": "align"}, WordTokenizer(["T"]))]
    for settings, tokenizer in cases:
        with pytest.raises(UserError, match=f"decode.{setting}=.* has a placeholder or a tag, which outputs get"):
            Constraints.from_config(DecodeConfig(**settings), tokenizer)


SAMPLE = {"strategy": "sample", "temperature": 2.0}
BEAM = {"strategy": "beam", "beams": 3}


def decoded(model, cfg, tokenizers) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """Returns the text and the ids of each output, by request and sample."""
    engine = Engine(cfg, *model, tokenizers, max_rows=4)
    for number, (text, masked) in enumerate(zip(TEXTS, ["a 0 b 1", "0 1 2 c", "c"], strict=True)):
        read = "".join(NUMBERED[int(c)] if c.isdigit() else c for c in masked)
        ids = tuple(SOURCE.special.wrap_side(SOURCE.encode(read)))
        engine.submit(Request(ids, cfg.decode, 5, number, cfg.decode.beams or 1, text=text))
    events = list(itertools.chain.from_iterable(iter(lambda: engine.step() if not engine.idle else None, None)))
    ids: dict[tuple[int, int], list[int]] = {}
    for event in events:
        ids.setdefault(event[:2], []).extend(event.ids)
    return {key: (text, ids[key]) for key, (text, _) in finish(engine, events).items()}


@pytest.mark.long
@pytest.mark.parametrize("decode", rest_slow({"copy": SAMPLE | {"unknown": "copy"}, "beam": BEAM, "sample": SAMPLE}, 2))
def test_every_output_has_the_placeholders_of_its_own_source(model, decode):
    cfg = config(model[0], **decode)
    results = decoded(model, cfg, TOKENIZERS)
    assert len({i for _, row in results.values() for i in row if i >= TARGET.own_size}) > 1
    for (request, _), (text, ids) in results.items():
        assert not {*NUMBERED} & {*text}
        if UNK not in ids or "unknown" not in decode:
            assert text == restored(ids, ORIGINALS[request], unknown="<unk>")
    outputs = Translator(cfg, model[0], TOKENIZERS).outputs(model[1], TEXTS, seed=5)
    assert [output.text for output in outputs] == [results[number, 0][0] for number in range(3)]
    for number, (text, output) in enumerate(zip(TEXTS, outputs, strict=True)):
        written = {i - TARGET.own_size for i in results[number, 0][1] if i >= TARGET.own_size}
        known_numbers = all(symbol < len(ORIGINALS[number]) for symbol in written)
        assert output.placeholders_kept == (known_numbers and has_same_placeholders(PLACEHOLDERS, text, output.text))


@pytest.mark.long
def test_beam_search_prefers_outputs_with_exactly_the_placeholders_of_their_source(model):
    cfg = config(model[0], strategy="beam", beams=8, max_new_tokens=2)
    translate = Translator(cfg, model[0], TOKENIZERS)
    moved = 0
    for text, outputs in zip(TEXTS, translate.stream(model[1], TEXTS, outputs=8), strict=True):
        by_score = sorted(outputs, key=lambda output: -output.score)
        expected = sorted(by_score, key=lambda output: not has_same_placeholders(PLACEHOLDERS, text, output.text))
        assert [output.text for output in outputs] == [output.text for output in expected]
        moved += outputs != by_score
    assert moved


@pytest.mark.long
@pytest.mark.parametrize("decode", [SAMPLE, BEAM, {}], ids=["sample", "beam", "greedy"])
def test_no_output_has_a_symbol_that_its_source_lacks(model, decode):
    """Although the bias of the symbols is the largest of all tokens."""
    results = decoded(model, config(model[0], **decode), TOKENIZERS)
    size = TARGET.own_size
    written = {(request, i - size) for (request, _), (_, ids) in results.items() for i in ids if i >= size}
    assert written
    assert all(symbol < len(ORIGINALS[request]) for request, symbol in written)


@pytest.mark.long
def test_pieces_of_a_stream_have_placeholders(model):
    translate = Translator(config(model[0], **SAMPLE), model[0], TOKENIZERS)
    (output,) = translate.outputs(model[1], TEXTS[1:2], seed=5)
    pieces = [*translate.stream_pieces(model[1], TEXTS[1], seed=5)]
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.placeholders_kept for piece in pieces] == [*[None] * (len(pieces) - 1), output.placeholders_kept]
    assert any(original in piece.text for piece in pieces for original in ORIGINALS[1])


def test_the_server_translates_as_the_api_does(model):
    cfg = config(model[0], **BEAM)
    outputs = Translator(cfg, model[0], TOKENIZERS).outputs(model[1], TEXTS)
    parts = (cfg, *model, TOKENIZERS)
    with around(Engine(*parts, max_rows=4), ServedModel.build(*parts)) as server:
        translations = server.post("/translate", text=TEXTS).json()["translations"]
    assert [(best["text"], best["score"]) for best, *_ in translations] == [output[:2] for output in outputs]
    assert any(original in outputs[1].text for original in ORIGINALS[1])


@pytest.mark.slow
def test_a_prefix_has_the_symbols_of_its_source(model):
    """The vocabulary has no other tokens for them."""
    prefixes = ["T <b> U", "<b> V"]
    requests = [TextRequest(text, prefix=prefix) for text, prefix in zip(TEXTS, prefixes, strict=False)]
    outputs = Translator(config(model[0]), model[0], TOKENIZERS)(model[1], requests)
    assert [text[: len(prefix)] for text, prefix in zip(outputs, prefixes, strict=True)] == prefixes
    cfg = config(model[0], prefix="<b>")
    outputs = Translator(cfg, model[0], TOKENIZERS)(model[1], TEXTS[:2])
    assert [text.split()[0] for text in outputs] == ["<b>"] * 2


def test_outputs_with_other_placeholders_are_counted(model, caplog):
    translate = Translator(config(model[0], **SAMPLE), model[0], TOKENIZERS)
    outputs = translate.outputs(model[1], TEXTS)
    others = sum(output.placeholders_kept is False for output in outputs)
    assert others
    translate(model[1], TEXTS)
    assert f"{others} of 3 outputs have other placeholders or markup than the source" in caplog.text


def test_given_targets_are_scored_with_symbols(model):
    score = Scorer(config(model[0]), model[0], TOKENIZERS)
    (scored,) = score.stream(model[1], [("a %s b <b>", "<b> T %s %d")])
    first = TARGET.own_size
    assert scored.tokens == [first + 1, *TARGET.encode("T"), first, UNK, EOS]


def test_a_language_model_has_no_placeholders_to_keep():
    """It may have the tokenizer of a translator."""
    data = DataConfig(source="lines", train="a", batching="packed", window=8)
    decoder = RowDecoder(Config(model=tiny("decoder_lm"), data=data), None, None, TOKENIZERS)
    assert decoder._keeps_placeholders("a %s", "b", []) is None


def test_inputs_have_the_format_of_transforms_wherever_they_are_read(model):
    """A source without a tag starts with that of held-out splits, and the model reads equal ids."""
    source = WordTokenizer(["a", "b", "c"]).with_symbols(("<bt>", "<hq>", *NUMBERED), NAMES)
    cfg = config(model[0])
    tags = ({"kind": "entry_tags", "tags": ("<hq>", "<bt>"), "held_out": "<hq>"},)
    data = {"source": "tsv", "train": ("x", "y"), "validation": "z", "weights": (1, 1), "symbols": ("<bt>", "<hq>")}
    tagged = dataclasses.replace(cfg, data=DataConfig(**data, transforms=tags, bucket_lengths=(16,)))
    tokenizers = Tokenizers(source, TARGET)
    for text, written in {"a b": "<hq>a b", "<bt>a": "<bt>a", "<hq>c <b>": f"<hq>c {NUMBERED[0]}"}.items():
        expected = source.special.wrap_side(source.encode(written))
        read = Translator(tagged, model[0], tokenizers)._encode(LongTexts("stop"), 0, TextRequest(text))
        assert read.ids == expected
        scored = Scorer(tagged, model[0], tokenizers).encode_pair(LongTexts("stop"), 0, (text, "T"))
        assert list(scored.inputs["source"]) == expected
        served = ServedModel.build(tagged, *model, tokenizers)
        assert served.encode("text", [text], 16) == [tuple(expected)]
    blank = Translator(tagged, model[0], tokenizers)._encode(LongTexts("stop"), 0, TextRequest(" "))
    assert not blank.ids
