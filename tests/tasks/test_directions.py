"""Metrics by direction: means and groups by hand, scores by sacreBLEU, losses by the scorer of pairs."""

import collections

import numpy as np
import pytest
import sacrebleu
from rich.console import Console

from tests.helpers import build, tiny
from tformer_jax.config import Config, ConfigError, DataConfig, DecodeConfig, EvalConfig, TrainConfig
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.corpora.corpus import evaluated_indices
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer
from tformer_jax.inference.outputs import Output
from tformer_jax.inference.requests import directed_request
from tformer_jax.inference.scores import Scorer
from tformer_jax.inference.text import Translator
from tformer_jax.runs.evaluations import shown_samples
from tformer_jax.runs.progress import ProgressView
from tformer_jax.tasks.evaluators.directions import group_directions, hub_of, signatures_of, with_means
from tformer_jax.tasks.evaluators.evaluation import Segment, merged
from tformer_jax.tasks.evaluators.likelihood import Losses, Measured
from tformer_jax.tasks.evaluators.perplexity import PerplexityEvaluator
from tformer_jax.tasks.evaluators.split import evaluators_for
from tformer_jax.tasks.evaluators.translation import TranslationEvaluator
from tformer_jax.tasks.metrics.off_target import language_code
from tformer_jax.train.monitor import BestMetric

TRAINED = ("en-de", "de-en", "en-zh", "zh-en")
ROWS = [
    ("en-de", "a dog", "ein Hund rennt heute", "ein Hund läuft heute"),
    ("en-de", "a cat", "eine Katze", "eine Katze"),
    ("zh-en", "狗", "a dog runs", "a dog runs fast"),
    ("en-zh", "breakfast", "我今天早上在家里吃了苹果", "我今天早上在家里吃了梨"),
    ("de-zh", "Hund", "他们在海边跑步", "他们在海边走"),
]


def test_means_over_directions_and_groups():
    parts = {
        "en-de": {"chrf": 10.0, "ter": 4.0},
        "de-en": {"chrf": 20.0},
        "fr-en": {"chrf": 60.0},
        "de-fr": {"chrf": 30.0, "ter": 8.0},
    }
    assert with_means(parts, ("en-de", "de-en", "en-fr", "fr-en")) == {
        "chrf": 30.0,
        "ter": 6.0,
        "chrf:to-en": 40.0,
        "chrf:from-en": 10.0,
        "ter:from-en": 4.0,
        "chrf:zero-shot": 30.0,
        "ter:zero-shot": 8.0,
        **{f"{metric}:{name}": value for name, part in parts.items() for metric, value in part.items()},
    }


@pytest.mark.parametrize(
    ("directions", "hub"),
    [
        (("en-de",), None),
        (("en-de", "de-en"), None),
        (("en-de", "en-fr"), "en"),
        (("en-de", "de-en", "en-fr", "fr-en", "de-fr"), "en"),
        (("en-de", "de-en", "en-fr", "fr-en", "de-fr", "fr-de"), None),
        (("en-de", "fr-it", "es-pt", "nl-en"), None),
    ],
)
def test_a_hub_is_in_more_directions_than_any_other_language_and_in_most(directions, hub):
    assert hub_of(directions) == hub
    assert set(group_directions(directions, ())) <= {f"to-{hub}", f"from-{hub}"}


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (0, {"a-b": 9, "b-c": 2, "c-a": 5}),
        (2, {"a-b": 1, "c-a": 1}),
        (6, {"a-b": 2, "b-c": 2, "c-a": 2}),
        (11, {"a-b": 5, "b-c": 2, "c-a": 4}),
        (15, {"a-b": 8, "b-c": 2, "c-a": 5}),
        (99, {"a-b": 9, "b-c": 2, "c-a": 5}),
    ],
)
def test_each_direction_has_equally_many_examples_of_a_limited_evaluation(limit, counts):
    directions = ["a-b"] * 4 + ["b-c", "c-a", "c-a", "b-c"] + ["a-b", "c-a"] * 3 + ["a-b"] * 2
    chosen = evaluated_indices([{"direction": direction} for direction in directions], limit)
    assert collections.Counter(directions[index] for index in chosen) == counts
    assert list(chosen) == sorted({*chosen})
    if limit == 6:
        assert list(chosen) == [0, 4, 5, 7, 8, 9]  # the first and fifth of nine a-b, the first and third of five c-a


def evaluation(rows=ROWS, trained=TRAINED, **settings):
    cfg = Config(
        model=tiny("seq2seq"),
        data=DataConfig(bucket_lengths=(16,)),
        decode=DecodeConfig(max_new_tokens=4),
        eval=EvalConfig(**settings),
    )
    segments = [
        Segment(source, references if isinstance(references, tuple) else (references,), direction)
        for direction, source, references, _ in rows
    ]
    evaluate = TranslationEvaluator(cfg, None, Tokenizers(ByteTokenizer(), ByteTokenizer()), segments, trained=trained)
    evaluate._translate.outputs = lambda params, sources, **_: [Output(row[3], -1.0) for row in rows]
    return evaluate(None)


def test_each_direction_is_scored_with_the_tokenizer_of_its_own_target():
    actual = evaluation()
    for direction, tokenize in {"en-de": "13a", "zh-en": "13a", "en-zh": "zh", "de-zh": "zh"}.items():
        references, outputs = zip(*(row[2:] for row in ROWS if row[0] == direction), strict=True)
        assert (
            actual.metrics[f"bleu:{direction}"] == sacrebleu.corpus_bleu(outputs, [references], tokenize=tokenize).score
        )
        assert actual.metrics[f"chrf:{direction}"] == sacrebleu.corpus_chrf(outputs, [references]).score
        assert f"|tok:{tokenize}|" in actual.signatures[f"bleu:{direction}"]
    assert actual.metrics["exact_match"] == (50 + 0 + 0 + 0) / 4
    names = ("en-de", "zh-en", "en-zh", "de-zh")
    assert actual.metrics["chrf"] == pytest.approx(sum(actual.metrics[f"chrf:{name}"] for name in names) / 4)
    assert actual.metrics["bleu:zero-shot"] == actual.metrics["bleu:de-zh"]
    assert actual.metrics["bleu:to-en"] == actual.metrics["bleu:zh-en"]
    assert "nc:6" in actual.signatures["chrf"]
    assert [sample.direction for sample in actual.outputs] == [row[0] for row in ROWS]


def test_examples_without_directions_have_plain_names_only():
    actual = evaluation([(None, *row[1:]) for row in ROWS[:2]], ())
    assert set(actual.metrics) == {"bleu", "chrf", "exact_match"}
    assert "direction" not in actual.outputs[0].to_record()


def test_signatures_that_differ_name_their_directions():
    actual = signatures_of("bleu", evaluation().signatures)
    assert [*actual.values()] == [["en-de", "zh-en"], ["en-zh", "de-zh"]]
    assert list(signatures_of("chrf", evaluation().signatures).values()) == [[]]


def test_signatures_count_the_references_of_their_own_direction():
    """Regression test: directions into one language had the signature of all texts in it."""
    rows = [("de-en", "Hund", ("a dog", "the dog"), "a dog"), ("fr-en", "chien", "a dog", "the dog")]
    actual = evaluation(rows, ()).signatures
    for direction, count in (("de-en", 2), ("fr-en", 1)):
        assert actual[f"bleu:{direction}"].startswith(f"nrefs:{count}|")
        assert actual[f"chrf:{direction}"].startswith(f"nrefs:{count}|")


def test_a_group_has_another_name_than_a_direction():
    """From Tongan, whose code is `to`."""
    parts = {"to-en": {"chrf": 10.0}, "de-en": {"chrf": 20.0}, "en-fr": {"chrf": 60.0}}
    actual = with_means(parts, ())
    assert (actual["chrf:to-en"], actual["chrf:into-en"], actual["chrf:from-en"]) == (10, 15, 60)
    assert with_means({"de-en": {"chrf": 20.0}}, tuple(parts))["chrf:into-en"] == 20


def test_the_log_shows_means_over_directions_and_outputs_of_several():
    actual, console = evaluation(), Console(record=True, width=200)
    ProgressView(steps=1, console=console).evaluation("validation", actual.metrics, shown_samples(actual.outputs, 2))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0][1::2] == ["bleu", "chrf", "exact_match"]
    assert [line for line in lines if line[0] == "direction"] == [["direction", "en-de"], ["direction", "zh-en"]]
    plain = evaluation([(None, *row[1:]) for row in ROWS], ()).outputs
    assert shown_samples(plain, 2) == plain[:2]
    assert not shown_samples(actual.outputs, 0)


def test_the_loss_of_each_direction():
    """Rows of 1, 2, 3 and 4 labels; the second direction has no row with a label."""
    sums = np.array([[2.0, 0, 1], [2.0, 1, 2], [9.0, 1, 3], [0.0, 0, 0], [2.0, 4, 4]])
    total = sums.sum(axis=0)

    def likelihood(params):
        return Measured(total[0] / total[2], 100 * total[1] / total[2], Losses([], []), sums)

    directions = ["en-de", "de-en", "en-de", "fr-de", "de-en"]
    metrics = PerplexityEvaluator(likelihood, directions, ("en-de",))(None).metrics
    assert metrics["loss"] == 1.5
    assert metrics["loss:en-de"] == 11 / 4
    assert metrics["loss:de-en"] == metrics["loss:zero-shot"] == 4 / 6
    assert "loss:fr-de" not in metrics
    assert metrics["token_accuracy"] == 60


@pytest.mark.slow
@pytest.mark.parametrize("batching", [{"bucket_lengths": (6, 9)}, {"batching": "packed", "window": 16}])
def test_losses_and_translations_of_directions_are_those_of_the_pairs_alone(batching):
    """Of at most four evaluated examples; the reference scores and translates each pair with its own tags."""
    letters = CharacterTokenizer("abcdefg").extended(["<2de>", "<2en>", "<2fr>"])
    model, params = build(tiny("seq2seq", vocab_size=letters.vocab_size, source_vocab_size=letters.vocab_size))
    rows = [("en-de", "abc", "cba"), ("de-en", "g", "gfedcb"), ("en-de", "a", "b"), ("en-de", "ff", "f")]
    rows += [("de-fr", "ab", "ba"), ("de-en", "dcba", "a"), ("en-de", "e", "e")]
    names = ("direction", "source", "target")
    examples = [dict(zip(names, row, strict=True)) for row in rows]
    files = {"source": "tsv", "train": ("t",), "validation": ("v",), "language_fields": ("1", "2")}
    data = DataConfig(**files, fields=("3", "4"), target_tags=("target",), **batching)
    cfg = Config(model=model.cfg, data=data, decode=DecodeConfig(max_new_tokens=4), eval=EvalConfig(batch_size=3))
    corpus = Corpus([], examples, [], directions={"en-de": 1, "de-en": 1})
    tokenizers = Tokenizers(letters, letters)
    actual = merged(run(params) for run in evaluators_for(cfg, model, corpus, tokenizers, "validation", 4))
    chosen = [rows[0], rows[1], rows[4], rows[3]]  # one of each direction, and another of the one with the most
    assert sorted(sample.source for sample in actual.outputs) == sorted(source for _, source, _ in chosen)
    requests = [directed_request(source, direction) for direction, source, _ in chosen]
    pairs = [(request, target) for request, (*_, target) in zip(requests, chosen, strict=True)]
    scored = list(Scorer(cfg, model, tokenizers).stream(params, pairs))
    for name in ("en-de", "de-en", "de-fr"):
        own = [each for each, (direction, *_) in zip(scored, chosen, strict=True) if direction == name]
        expected = -sum(each.total for each in own) / sum(len(each.log_probabilities) for each in own)
        assert actual.metrics[f"loss:{name}"] == pytest.approx(expected, rel=1e-5)
    assert actual.metrics["loss:zero-shot"] == actual.metrics["loss:de-fr"]
    translations = Translator(cfg, model, tokenizers)(params, requests)
    assert {sample.source: sample.output for sample in actual.outputs} == {
        source: output for (_, source, _), output in zip(chosen, translations, strict=True)
    }


@pytest.mark.long
def test_outputs_in_another_language_than_the_target():
    pytest.importorskip("lingua")
    rows = [
        ("en-de", "", "", "Das ist ein kleines Haus in der Stadt."),
        ("en-de", "", "", "This is a small house in the town."),
        ("en-de", "", "", ""),
        ("en-de", "", "", "Dies ist das Buch, das ich gestern gelesen habe."),
        ("de-en", "", "", "This is the book that I read yesterday."),
        ("en-zh", "", "", "我今天早上在家里吃了苹果"),
        ("en-tlh", "", "", "tlhIngan maH"),
    ]
    reference = "Das ist nur eine Probe der Sprache."  # in the language of four of six known targets
    actual = evaluation([(*row[:2], reference, *row[3:]) for row in rows], TRAINED, metrics=("off_target",))
    assert actual.metrics["off_target:en-de"] == 25
    assert actual.metrics["off_target:de-en"] == actual.metrics["off_target:en-zh"] == 0
    assert actual.metrics["off_target"] == pytest.approx(25 / 3)
    assert "off_target:en-tlh" not in actual.metrics
    assert actual.remarks == (
        "off_target leaves out languages that lingua does not know: tlh",
        "of the references themselves, 33.3 % are off-target for lingua",
    )
    assert actual.signatures["off_target"].endswith("|languages:en,de,zh")
    stored = [sample.to_record().get("metrics") for sample in actual.outputs]
    assert stored == [{"off_target": 0}, {"off_target": 100}, *4 * [{"off_target": 0}], None]


def test_scripts_and_regions_are_one_language():
    assert language_code("zh_Hans") == language_code("zho_Hant") == "zh"
    assert language_code("pt_BR") == "pt"


def test_training_selects_by_a_direction_or_a_group_of_data_with_directions():
    many = DataConfig(
        source="tsv", train=("{src}-{tgt}.tsv",), validation=("{src}-{tgt}",), directions=("en-de", "de-en")
    )
    cfg = Config(data=many, train=TrainConfig(metric="chrf:to-en"))
    assert BestMetric(cfg.train).score({"chrf": 1.0, "chrf:to-en": 2.0}) == 2.0
    assert BestMetric(TrainConfig(metric="loss:de-en")).score({"loss:de-en": 2.0}) == -2.0
    with pytest.raises(
        ConfigError, match="train.metric='chrf:to-en': the evaluated examples have no such direction or "
    ):
        BestMetric(cfg.train).score({"chrf": 1.0, "chrf:en-de": 2.0})
    with pytest.raises(
        ConfigError, match="train.metric='chrf:en-de': names a direction, but .* only one; write 'chrf'"
    ):
        Config(train=TrainConfig(metric="chrf:en-de"))
    with pytest.raises(
        ConfigError, match="train.metric='ter:en-de': must be one of .*'chrf:en-de'.*; eval.metrics adds"
    ):
        Config(data=many, train=TrainConfig(metric="ter:en-de"))
    Config(data=many, train=TrainConfig(metric="ter:en-de"), eval=EvalConfig(metrics=("ter",)))
