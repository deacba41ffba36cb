"""Sentences of documents are translated as their texts with context say, composed by hand."""

import argparse
import dataclasses
import types

import pytest

import tformer_jax as tj
from tests.helpers import build, rest_slow, tiny
from tests.inference.test_text import setup
from tformer_jax.cli.serve import make_engine
from tformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, OptimConfig, TrainConfig
from tformer_jax.config.fields import ConfigError
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.requests import Request
from tformer_jax.inference.sentences import split_sentences
from tformer_jax.inference.text import Translator
from tformer_jax.special_tokens import EOS

LETTERS = CharacterTokenizer("abcdefgCE. ").with_symbols(("<br>",))
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc. Cde. Efg. Ca", "g", " Ea.\n\nCb. ", "", "fed. Cba. Eb"]
CONCATENATION = {"kind": "concatenation", "separator": " <br> ", "count": 3}


ENDING = 1.5
SIZES = {"vocab_size": LETTERS.vocab_size, "source_vocab_size": LETTERS.vocab_size, "max_length": 48}


@pytest.fixture(scope="module")
def model():
    """A random model, which ends outputs after a few tokens."""
    model, params = build(tiny("seq2seq", **SIZES, output_bias=True), seed=6)
    params["head"]["bias"] = params["head"]["bias"].at[EOS].add(ENDING)
    return model, params


def configure(transforms=(CONCATENATION,), **decode) -> Config:
    cfg = setup("seq2seq")
    data = dataclasses.replace(cfg.data, symbols=("<br>",), transforms=transforms)
    sizes = dataclasses.replace(cfg.model, **SIZES)
    decode = {"max_new_tokens": None, "repetition_penalty": 1.3, **decode}
    return dataclasses.replace(cfg, model=sizes, data=data, decode=DecodeConfig(**decode))


def outputs_by_hand(translate, params, text: str, context: int) -> list[str]:
    """Returns the outputs of the sentences of a text, each of a request of its own."""
    written: list[str] = []
    for number, sentence in enumerate(split_sentences(text, "en")[0]):
        before = split_sentences(text, "en")[0][max(number - context, 0) : number]
        outputs = written[number - len(before) :]
        prefix = " <br> ".join([*outputs, ""]).rstrip()
        output = translate(params, [Request(" <br> ".join([*before, sentence]), prefix=prefix)])[0]
        assert output.startswith(prefix)
        written.append(output.removeprefix(prefix).strip() if before else output)
    return written


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_slow([("greedy", 2), ("greedy", 1), ("beam", 1)], 1))
def test_each_sentence_is_read_and_written_after_those_before_it(model, case):
    strategy, context = case
    limits = {"strategy": strategy, "beams": 2} if strategy == "beam" else {"strategy": strategy}
    plain = Translator(configure(**limits), model[0], TOKENIZERS)
    cfg = configure(**limits, split_sentences=True, context=context)
    translate = Translator(cfg, model[0], TOKENIZERS)
    outputs = translate.outputs(model[1], TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        gaps = split_sentences(text, "en")[1]
        expected = outputs_by_hand(plain, model[1], text, context)
        joined = "".join(gap + sentence for gap, sentence in zip(gaps, (*expected, ""), strict=True))
        assert output.text == joined
        assert output.lacking_context == 0
    assert list(translate.stream(model[1], TEXTS)) == [[output] for output in outputs]
    assert [piece.text for piece in translate.stream_pieces(model[1], TEXTS[0])] == [outputs[0].text]


@pytest.mark.slow
def test_fewer_sentences_are_read_where_more_do_not_fit(model, caplog):
    """24 of 48 tokens are left for the last sentence."""
    cfg = configure(strategy="greedy", min_new_tokens=20, max_new_tokens=48, split_sentences=True, context=2)
    translate = Translator(cfg, model[0], TOKENIZERS)
    plain = Translator(configure(strategy="greedy", min_new_tokens=20, max_new_tokens=48), model[0], TOKENIZERS)
    text = "abc. Cde. Efg."
    output = translate.outputs(model[1], [text])[0]
    assert output.lacking_context == 2
    alone = plain(model[1], split_sentences(text, "en")[0])
    assert output.text == " ".join(alone)
    translate(model[1], [text, "g"])
    sentence = (
        "2 of 4 sentences were read with fewer than decode.context=2 sentences before them, since more do not fit"
    )
    assert sentence in caplog.text


def test_a_server_refuses_context():
    run = types.SimpleNamespace(config=configure(split_sentences=True, context=1))
    with pytest.raises(ConfigError, match="decode.context=1: is not supported by the server, .*: write 0"):
        make_engine(run, argparse.Namespace())


@pytest.mark.parametrize(
    ("transforms", "decode", "problem"),
    [
        ((CONCATENATION,), {"context": 1}, r"decode.context=1: is in sentences: write decode.split_sentences=True"),
        ((CONCATENATION,), {"context": 3}, "trained on at most 3 sentences at once: write at most 2"),
        ((CONCATENATION,), {"context": 1, "markup": "align"}, "cannot be combined with decode.markup='align'"),
        ((CONCATENATION,), {"context": 1, "detokenize": True}, "cannot be combined with decode.detokenize"),
        ((CONCATENATION,), {"context": 1, "casing": "titles"}, "cannot be combined with decode.casing='titles'"),
        ((CONCATENATION,), {"context": 1, "stop": ("<br>",)}, "decode.stop=.*: '<br>' is in the separator ' <br> '"),
        ((CONCATENATION,), {"context": 1, "forbidden": ("b",)}, "decode.forbidden=.*: 'b' is in the separator"),
        ((), {"context": 1}, "needs a model trained with concatenation in data.transforms"),
        (({"kind": "concatenation"},), {"context": 1}, "needs a model trained with concatenation"),
        (({**CONCATENATION, "others": "random"},), {"context": 1}, "of the next examples and with a separator"),
    ],
)
def test_a_model_must_have_been_trained_on_documents(transforms, decode, problem):
    decode = {"split_sentences": decode != {"context": 1} or transforms != (CONCATENATION,), **decode}
    with pytest.raises(ConfigError, match=problem):
        configure(transforms, **decode)


NOUNS = {
    "cat": "le chat",
    "dog": "le chien",
    "horse": "le cheval",
    "cow": "la vache",
    "hen": "la poule",
    "goat": "la chèvre",
}
VERBS = {"sleeps": "dort", "runs": "court", "waits": "attend", "falls": "tombe"}


@pytest.mark.slow
def test_a_pronoun_follows_the_sentence_before(tmp_path):
    """Of 96 documents, all have the gender of the noun with context, and half of them without."""
    documents = [(noun, first, second) for noun in NOUNS for first in VERBS for second in VERBS]

    def sentences(noun: str, first: str, second: str) -> tuple[list[str], list[str]]:
        pronoun = "Il" if NOUNS[noun].startswith("le") else "Elle"
        source = [f"The {noun} {first}.", f"It {second}."]
        return source, [f"{NOUNS[noun].capitalize()} {VERBS[first]}.", f"{pronoun} {VERBS[second]}."]

    pairs = [pair for document in documents for pair in zip(*sentences(*document), strict=True)]
    data = DataConfig(
        source="python",
        tokenizer="words",
        symbols=("<br>",),
        bucket_lengths=(16,),
        batch_tokens=1024,
        transforms=({"kind": "concatenation", "separator": " <br> ", "count": 2, "probability": 0.7},),
    )
    sizes = {"dim": 32, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 4, "ffn_dim": 64, "dropout": 0.0}
    cfg = Config(
        model=ModelConfig(**sizes, max_length=32),
        data=data,
        optim=OptimConfig(learning_rate=5e-3, warmup_steps=20),
        train=TrainConfig(steps=300, eval_every=300),
        decode=DecodeConfig(strategy="greedy"),
    )
    run = tj.train(cfg, {"train": pairs, "validation": pairs[:8]}, run=tmp_path / "run")
    texts, expected = zip(*(map(" ".join, sentences(*document)) for document in documents), strict=True)
    with_context = run.translate(texts, split_sentences=True, context=1)
    assert with_context == list(expected)
    alone = run.translate(texts, split_sentences=True)
    assert sum(output == text for output, text in zip(alone, expected, strict=True)) == len(texts) // 2
