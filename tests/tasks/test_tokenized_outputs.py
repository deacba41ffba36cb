"""Scores of Moses' tokens and of detokenized outputs, and of outputs with unknown tokens, against sacrebleu."""

import pytest
import sacrebleu

from tests.helpers import build, tiny
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import WordTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference.outputs import Output
from tformer_jax.tasks.evaluators.evaluation import Segment
from tformer_jax.tasks.evaluators.translation import TranslationEvaluator

REFERENCES = ['It\'s R&D, "he" said (twice).', "Don't walk & don't run!"]
TOKENS = ["it &apos;s R &amp; D , &quot; he &quot; said ( twice ) .", "don &apos;t walk &amp; don &apos;t run !"]
NORMALIZE = ("lowercase", "moses")


@pytest.fixture(scope="module")
def parts():
    examples = [{"source": "a b c", "target": target} for target in REFERENCES]
    tokenizers = train_tokenizers(DataConfig(normalize=NORMALIZE, target_language="en", vocab_size=300), examples)
    model, _ = build(tiny("seq2seq", vocab_size=tokenizers.target.vocab_size))
    return model, tokenizers, examples


def evaluation(parts, outputs, *, detokenize: bool = False, given=REFERENCES, **settings):
    model, tokenizers, examples = parts
    cfg = Config(
        model=model.cfg,
        data=DataConfig(normalize=NORMALIZE, bucket_lengths=(16,), target_language="en"),
        decode=DecodeConfig(detokenize=detokenize),
        eval=EvalConfig(**settings),
    )
    segments = [Segment(example["source"], (target,)) for example, target in zip(examples, given, strict=True)]
    evaluate = TranslationEvaluator(cfg, model, tokenizers, segments)
    evaluate._translate.outputs = lambda params, sources, **_: outputs
    return evaluate(None)


def bleu(outputs, references, tokenize) -> float:
    return sacrebleu.corpus_bleu(outputs, [references], tokenize=tokenize, force=True).score


def test_tokens_compared_with_texts_are_said(parts, caplog):
    actual = evaluation(parts, [Output(text, 0.0) for text in TOKENS])
    assert "outputs are tokens of Moses, but references are not" in caplog.text
    assert actual.metrics["bleu"] == pytest.approx(bleu(TOKENS, REFERENCES, "13a"))
    assert actual.signatures["bleu"].endswith("|outputs:moses")
    assert actual.signatures["references"] == "raw"


def test_normalized_references_have_no_invisible_characters(parts):
    marked = [text.replace(" ", " \u200b", 1) for text in REFERENCES]
    actual = evaluation(parts, [Output(text, 0.0) for text in TOKENS], references="normalized", given=marked)
    expected = evaluation(parts, [Output(text, 0.0) for text in TOKENS], references="normalized")
    assert actual.metrics == expected.metrics
    assert actual.signatures["references"].startswith("whitespace|")


def test_tokenized_bleu_names_itself(parts, caplog):
    actual = evaluation(parts, [Output(text, 0.0) for text in TOKENS], references="normalized", bleu_tokenize="none")
    assert not caplog.text
    tokens = ["it &apos;s r &amp; d , &quot; he &quot; said ( twice ) .", TOKENS[1]]
    assert actual.metrics["bleu"] == pytest.approx(bleu(TOKENS, tokens, "none"))
    assert all(actual.signatures[name].endswith("|outputs:moses") for name in ("bleu", "chrf"))


@pytest.mark.parametrize(
    ("references", "expected"), [("raw", REFERENCES), ("normalized", [text.lower() for text in REFERENCES])]
)
def test_detokenized_outputs_are_compared_with_texts(parts, caplog, references, expected):
    texts = ['it\'s r&d, "he" said (twice).', "don't walk & don't run!"]
    actual = evaluation(parts, [Output(text, 0.0) for text in texts], detokenize=True, references=references)
    assert not caplog.text
    assert actual.metrics["bleu"] == pytest.approx(bleu(texts, expected, "13a"))
    assert "moses" not in "".join(actual.signatures.values())


@pytest.mark.parametrize(("counts", "share"), [((2, 0), 50), ((0, 0), 0)])
def test_the_share_of_outputs_with_unknown_tokens(parts, counts, share):
    outputs = [Output("x", 0.0, unknown=count) for count in counts]
    model, _, examples = parts
    words = WordTokenizer(["x"])
    actual = evaluation((model, Tokenizers(words, words), examples), outputs)
    assert actual.metrics["unknown_outputs"] == share
    assert ("unknown_outputs" in evaluation(parts, outputs).metrics) == (share > 0)  # byte-level BPE has no such token
