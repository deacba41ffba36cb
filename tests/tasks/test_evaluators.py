"""Evaluators against results computed by hand or in NumPy."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import build, rest_slow, tiny
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, kinds
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.features import Tokenized
from tformer_jax.data.objectives import build_objective
from tformer_jax.data.objectives.windows import covering_corrupted
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.outputs import Output, RowDecoder
from tformer_jax.inference.requests import EncodedRequest
from tformer_jax.inference.scores import Scorer
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD
from tformer_jax.tasks.evaluators.classification import macro_f1
from tformer_jax.tasks.evaluators.continuations import ContinuationEvaluator
from tformer_jax.tasks.evaluators.evaluation import Segment
from tformer_jax.tasks.evaluators.split import Evaluation, evaluators_for
from tformer_jax.tasks.evaluators.translation import TranslationEvaluator

LETTERS = CharacterTokenizer("abcdefg")
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
WORDS = ["abc", "gfedcba", "a", "bb", "cafe"]
PAIRS = [{"source": word, "target": word[::-1] + "a"} for word in WORDS]
LABELED = [{"text": word, "label": "xyz"[len(word) % 3]} for word in WORDS]


def log_probabilities(logits) -> np.ndarray:
    return np.log(oracles.softmax(np.float64(logits)))


def evaluations(
    family: str, model, params, split: list, *, batch_size: int, limit: int = 0, tokenizers=TOKENIZERS
) -> list[Evaluation]:
    source = {"seq2seq": "cldr_translation", "classifier": "cldr_language", "decoder_lm": "stdlib_text"}[family]
    cfg = Config(
        model=model.cfg,
        data=DataConfig(
            source=source,
            batching="windows" if family == "decoder_lm" else "buckets",
            window=4,
            bucket_lengths=(4, 9),
        ),
        decode=DecodeConfig(max_new_tokens=5),
        eval=EvalConfig(batch_size=batch_size, samples=2),
    )
    corpus = Corpus([], [], split, ("x", "y", "z") if family == "classifier" else None)
    return [evaluator(params) for evaluator in evaluators_for(cfg, model, corpus, tokenizers, "test", limit)]


def evaluate(family: str, model, params, split: list, **settings) -> tuple[dict, list]:
    metrics, outputs = {}, []
    for actual in evaluations(family, model, params, split, **settings):
        metrics |= actual.metrics
        outputs += actual.outputs
    return metrics, outputs


@pytest.mark.long
@pytest.mark.parametrize("batch_size", rest_slow([2, 5], 1))
def test_translation(batch_size):
    model, params = build(tiny("seq2seq"))
    total, hits, count = 0.0, 0, 0
    for pair in PAIRS:
        source = np.array([[*LETTERS.encode(pair["source"]), EOS]], np.int32)
        target = LETTERS.encode(pair["target"])
        read = np.array([[BOS, *target]], np.int32)
        logits = oracles.seq2seq(oracles.f64(params), model.cfg, source, read, source != PAD, read != PAD)
        actual = log_probabilities(logits[0])
        labels = [*target, EOS]
        total -= actual[np.arange(len(labels)), labels].sum()
        hits += (actual.argmax(-1) == labels).sum()
        count += len(labels)
    metrics, outputs = evaluate("seq2seq", model, params, PAIRS, batch_size=batch_size)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(100 * hits / count)
    assert {"bleu", "chrf", "exact_match"} <= set(metrics)
    assert [(output.source, output.reference) for output in outputs] == [tuple(pair.values()) for pair in PAIRS]


@pytest.mark.long
@pytest.mark.parametrize("batch_size", rest_slow([3, 1], 1))
def test_language_model(batch_size):
    model, params = build(tiny("decoder_lm"))
    text = "abcdefgabcdefggg"
    stream = LETTERS.encode(text)
    total = 0.0
    for start in range(0, len(stream) - 1, 4):
        window, targets = np.array([stream[start : start + 4]]), stream[start + 1 : start + 5]
        actual = log_probabilities(oracles.decoder_lm(oracles.f64(params), model.cfg, window, window != PAD)[0])
        total -= actual[np.arange(len(targets)), targets].sum()
    metrics, outputs = evaluate("decoder_lm", model, params, [{"text": text}], batch_size=batch_size)
    assert metrics["loss"] == pytest.approx(total / (len(stream) - 1), rel=1e-5)
    bits = total / (len(stream) - 1) * len(stream) / math.log(2) / 16  # the first token counts as much as the others
    assert metrics["bits_per_byte"] == metrics["bits_per_character"] == pytest.approx(bits)
    assert (outputs[0].source, outputs[0].reference) == ("abcd", "efgabcdefggg")
    cleaned = CharacterTokenizer("abcdefg").normalized(("whitespace",), "en")
    spaced = [{"text": f"  {text}\n\n"}]
    again, _ = evaluate(
        "decoder_lm", model, params, spaced, batch_size=batch_size, tokenizers=Tokenizers(cleaned, cleaned)
    )
    assert again == metrics


@pytest.mark.slow
def test_continuations_of_prompts_with_unknown_tokens():
    """Unknown tokens have their name, and the model reads them; an empty document has no continuation."""
    model, params = build(tiny("decoder_lm"))
    texts = ["????abcdefg", "??abcdefg", "", "gfedcba", "abc"]
    cfg = Config(
        model=model.cfg,
        data=DataConfig(source="stdlib_text", batching="windows", window=4),
        decode=DecodeConfig(max_new_tokens=5),
        eval=EvalConfig(samples=5),
    )
    actual = ContinuationEvaluator(cfg, model, TOKENIZERS, [{"text": text} for text in texts])(params)
    prompts = [EncodedRequest(LETTERS.encode(text)[: min(4, (len(text) + 1) // 2)]) for text in texts if text]
    expected = RowDecoder(cfg, model, params, TOKENIZERS)(prompts)
    assert [output.source for output in actual.outputs] == ["<unk>" * 4, "<unk><unk>ab", "gfed", "ab"]
    assert [output.reference for output in actual.outputs] == ["abcdefg", "cdefg", "cba", "c"]
    assert [output.output for output in actual.outputs] == [output.text for (output,) in expected]


@pytest.mark.long
def test_prompts_leave_room_for_the_prefix_of_outputs():
    """Regression test: the first evaluation ended the run."""
    model, params = build(tiny("decoder_lm"))
    prefix = "abcdefgabcdefg"[: model.cfg.max_length - 2]
    cfg = Config(
        model=model.cfg,
        data=DataConfig(source="stdlib_text", batching="windows", window=4),
        decode=DecodeConfig(max_new_tokens=len(prefix), prefix=prefix),
    )
    (sample,) = ContinuationEvaluator(cfg, model, TOKENIZERS, [{"text": "gfedcba"}])(params).outputs
    assert (sample.source, sample.output) == ("gf", prefix)


@pytest.mark.long
@pytest.mark.parametrize(("family", "objective"), [("masked_lm", "masked_tokens"), ("seq2seq", "span_corruption")])
def test_pre_training_objectives(family, objective):
    """The mean negative log-likelihood and the accuracy of the labels of corrupted windows, in NumPy."""
    tokenizer = LETTERS.extended(kinds.load(kinds.OBJECTIVES, objective).added)
    vocabularies = {"vocab_size": tokenizer.vocab_size, "tie_embeddings": "output"}
    if family == "seq2seq":
        vocabularies["source_vocab_size"] = tokenizer.vocab_size
    model, params = build(tiny(family, **vocabularies))
    data = DataConfig(source="stdlib_text", batching="windows", window=8, objective=objective)
    cfg = Config(model=model.cfg, data=data, eval=EvalConfig(batch_size=2))
    corpus = Corpus([], [], [{"text": "abcdefgabcdefggg"}, {"text": "cab"}])
    (evaluator,) = evaluators_for(cfg, model, corpus, Tokenizers(tokenizer, tokenizer), "test", 0)
    stream = np.array([*LETTERS.encode("abcdefgabcdefggg"), EOS, *LETTERS.encode("cab")])
    forward = jax.jit(lambda batch: registry.forward(model, params, batch)[:2])
    total, hits, count = 0.0, 0, 0
    for batch in covering_corrupted(stream, build_objective(data, tokenizer), 3):
        logits, labels = map(np.asarray, forward(batch))
        counted = labels != IGNORED
        labels, actual = labels[counted], log_probabilities(logits)[counted]
        total -= actual[np.arange(len(labels)), labels].sum()
        hits, count = hits + (actual.argmax(-1) == labels).sum(), count + len(labels)
    metrics = evaluator(params).metrics
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(100 * hits / count)


@pytest.mark.parametrize("batch_size", rest_slow([2, 4], 1))
def test_classification(batch_size):
    model, params = build(tiny("classifier"))
    losses, hits = [], []
    for example in LABELED:
        tokens = np.array([LETTERS.encode(example["text"])], np.int32)
        actual = log_probabilities(oracles.classifier(oracles.f64(params), model.cfg, tokens, tokens != PAD))[0]
        label = "xyz".index(example["label"])
        losses.append(-actual[label])
        hits.append(actual.argmax() == label)
    (actual,) = evaluations("classifier", model, params, LABELED, batch_size=batch_size)
    metrics, outputs = actual.metrics, actual.outputs
    assert actual.losses.nll == pytest.approx(losses, rel=1e-5)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(100 * np.mean(hits))
    assert [output.output == output.reference for output in outputs] == hits
    pairs = [(output.reference, output.output) for output in outputs]
    scores = []
    for label in {label for pair in pairs for label in pair}:
        occurs, predicted = (np.array([label == each for each in side]) for side in zip(*pairs, strict=True))
        true = (occurs & predicted).sum()
        precision, recall = true / max(predicted.sum(), 1), true / max(occurs.sum(), 1)
        scores.append(2 * precision * recall / (precision + recall) if true else 0)
    assert metrics["macro_f1"] == pytest.approx(100 * np.mean(scores))


def test_macro_f1_weights_labels_equally():
    """By hand: F1 of "a" is 2 * 3 / (4 + 4), of "b" 2 * 1 / (1 + 2); "c", which is not predicted, counts as 0."""
    actual = macro_f1(["a", "a", "a", "a", "b", "c"], ["a", "a", "a", "b", "b", "a"])
    assert actual == pytest.approx(100 * (2 * 3 / (4 + 4) + 2 * 1 / (1 + 2) + 0) / 3)


@pytest.mark.slow
def test_the_labels_of_long_texts_are_those_that_the_accuracy_counts():
    """Texts are read as far as the model takes them, 16 tokens, although the longest bucket has 9."""
    model, params = build(tiny("classifier"))
    texts = [first * 9 + second * 9 for first in "abcdefg" for second in "abcdefg"]
    expected = [label_of(model, params, text[:16]) for text in texts]
    assert expected != [label_of(model, params, text[:9]) for text in texts]
    examples = [{"text": text, "label": label} for text, label in zip(texts, expected, strict=True)]
    (actual,) = evaluations("classifier", model, params, examples, batch_size=8)
    assert [output.output for output in actual.outputs] == expected
    assert actual.metrics["accuracy"] == 100
    assert actual.remarks == ("49 of 49 texts were longer than model.max_length=16 and were truncated",)


@pytest.mark.long
@pytest.mark.parametrize(
    "batching",
    [
        {"bucket_lengths": (4,), "batch_tokens": 32},
        {"bucket_lengths": (5, 9, 16), "batch_tokens": 128},
        {"batching": "packed", "window": 6},
        {"batching": "packed", "window": 16, "source_window": 7},
    ],
)
def test_the_loss_of_pairs_does_not_depend_on_the_batching(batching):
    """The reference scores each pair alone; the last one exceeds the model's 16 tokens and has no end."""
    model, params = build(tiny("seq2seq"))
    pairs = [("abc", "cba"), ("a", "g"), ("abcdefg", "gfedcbagfed"), ("ab" * 7, "ba" * 10)]
    examples = [{"source": source, "target": target} for source, target in pairs]
    cfg = Config(model=model.cfg, data=DataConfig(**batching), eval=EvalConfig(batch_size=3))
    likelihood, _ = evaluators_for(cfg, model, Corpus([], [], examples), TOKENIZERS, "test", 0)
    scored = list(Scorer(cfg, model, TOKENIZERS).stream(params, pairs, long_texts=LongTexts("truncate")))
    assert [len(each.tokens) for each in scored] == [4, 2, 12, 16]
    expected = -sum(each.total for each in scored) / sum(len(each.tokens) for each in scored)
    assert likelihood(params).metrics["loss"] == pytest.approx(expected, rel=1e-5)


def label_of(model, params, text: str) -> str:
    tokens = np.array([LETTERS.encode(text)], np.int32)
    return "xyz"[oracles.classifier(oracles.f64(params), model.cfg, tokens, tokens != PAD)[0].argmax()]


@pytest.mark.parametrize("limit", [2, 5])
def test_a_limit_takes_evenly_spread_examples(limit):
    """Regression test: the first examples of a sorted file are of one class."""
    model, params = build(tiny("classifier"))
    examples = sorted(LABELED, key=lambda example: example["label"])
    chosen = [examples[number * len(examples) // limit] for number in range(limit)]
    expected, outputs = evaluate("classifier", model, params, chosen, batch_size=2)
    limited, actual = evaluate("classifier", model, params, examples, batch_size=2, limit=limit)
    assert limited == expected
    assert actual == outputs
    assert len({output.reference for output in actual}) > 1


@pytest.mark.long
def test_sources_and_outputs_that_a_limit_ended_are_remarked_on():
    model, params = build(tiny("seq2seq"))
    cfg = Config(
        model=model.cfg, data=DataConfig(bucket_lengths=(16,)), decode=DecodeConfig(max_new_tokens=1, min_new_tokens=1)
    )
    examples = [{"source": word, "target": word} for word in (*WORDS[:2], "ab" * 9)]
    actual = TranslationEvaluator(cfg, model, TOKENIZERS, list(map(Segment.from_example, examples)))(params)
    assert actual.remarks == (
        "1 of 3 sources was longer than model.max_length=16 and was truncated",
        "3 of 3 outputs end at decode.max_new_tokens=1 and may be incomplete",
    )


def test_outputs_that_are_not_as_requested_are_remarked_on():
    evaluator = TranslationEvaluator(
        Config(data=DataConfig(target_language="de")), None, TOKENIZERS, [Segment("a", ("b",))] * 2
    )
    outputs = [Output("a", None, constraints_met=False), Output("a", None, unknown=1, constraints_met=True, invented=2)]
    lacking, invented = evaluator._output_remarks(outputs, LongTexts("truncate"))
    assert lacking.startswith("1 of 2 outputs have not all phrases of their constraints")
    assert invented.startswith("1 of 2 outputs have markup that the model wrote itself")


def test_the_likelihood_of_prepared_texts_needs_no_tokenization(tmp_path, monkeypatch):
    model, params = build(tiny("decoder_lm"))
    (tmp_path / "a.txt").write_text("abcdefg\ngfedcba\ncafe\n" * 9)
    data = DataConfig(source="lines", train="a.txt", batching="windows", window=4)
    cfg = Config(model=model.cfg, data=data, eval=EvalConfig(batch_size=2))
    prepare(cfg, tmp_path, tmp_path / "p", tokenizers=TOKENIZERS)
    texts = load_corpus(cfg, tmp_path)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(data, source="prepared", train=("p",)))
    corpora, metrics = (texts, load_corpus(cfg, tmp_path)), []
    for corpus in corpora:
        likelihood, _ = evaluators_for(cfg, model, corpus, TOKENIZERS, "validation", 2)
        metrics.append(likelihood(params).metrics)
        monkeypatch.delattr(Tokenized, "read", raising=False)
    assert metrics[0] == metrics[1]
