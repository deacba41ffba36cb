"""The summary of a corpus, by hand, and its warnings."""

import copy
import csv
import dataclasses
import itertools

import numpy as np
import pytest

from tests.data.corpus_files import write
from tformer_jax.base.numbers import two_digits
from tformer_jax.config import Config, DataConfig, FilterConfig, ModelConfig
from tformer_jax.data import summary
from tformer_jax.data.corpora import Corpus, Joined, load_corpus
from tformer_jax.data.features import feature_converter, tokenize
from tformer_jax.data.placeholders import NUMBERED
from tformer_jax.data.summary import SplitSummary, language_lines, lines, summarize, summarize_languages
from tformer_jax.data.summary_warnings import warnings
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers

LETTERS = CharacterTokenizer("abcdefgh")
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
CFG = Config(
    model=ModelConfig(max_length=16),
    data=DataConfig(source="tsv", train="a.tsv", bucket_lengths=(4, 8), batch_tokens=64),
)


def pair(source: str, target: str) -> dict[str, str]:
    return {"source": source, "target": target}


TRAIN = [pair("abc", "de"), pair("abc", "de"), pair("a", "bcdefgha"), pair("Ωb", "aXYZ"), pair("", "b"), pair("h", "h")]
HELD_OUT = [pair("abc", "de"), pair("c", "c" * 20), pair("c", "d")]


def test_every_number_by_hand():
    actual = summarize(CFG, Corpus(TRAIN, HELD_OUT, HELD_OUT), TOKENIZERS)
    assert list(actual) == ["train", "validation"], "a test split that is the validation split has no summary"
    train, held_out = actual["train"], actual["validation"]
    assert (train.examples, train.read, train.duplicates, train.in_training) == (6, 6, 1, 0)
    assert (train.identical_sides, train.large_ratio, train.long) == (1, 0, 1)
    source, target = train.sides["source"], train.sides["target"]
    assert (source.tokens, source.longest, source.unknown, source.blank) == (3 + 3 + 1 + 2 + 0 + 1, 3, 1, 1)
    assert (target.tokens, target.longest, target.unknown, target.blank) == (2 + 2 + 8 + 4 + 1 + 1, 8, 3, 0)
    assert (source.limit, target.limit, target.too_long, target.tokens_beyond) == (7, 7, 1, 1)
    assert train.length_ratio == 18 / 10
    assert (held_out.in_training, held_out.large_ratio, held_out.long) == (1, 1, 1)
    assert (held_out.sides["target"].limit, held_out.sides["target"].tokens_beyond) == (15, 5)


def test_pairs_that_differ_in_white_space_are_the_same():
    train = [{"source": "a b", "target": "c d"}, {"source": "a\u00a0b", "target": "c  d "}]
    held_out = [{"source": "a\u200b b", "target": "c d"}]
    actual = summarize(CFG, Corpus(train, held_out, held_out), TOKENIZERS)
    assert (actual["train"].duplicates, actual["validation"].in_training) == (1, 1)


def test_what_would_spoil_a_run_is_said():
    corpus = Corpus(TRAIN, HELD_OUT, HELD_OUT)
    told = " | ".join(warnings(CFG, corpus, summarize(CFG, corpus, TOKENIZERS)))
    for part in (
        "17 % of the training examples are too long for their row and dropped; increase data.bucket_lengths",
        "1 example of validation (33 %) is truncated to model.max_length",
        "10 % of the source tokens of train are unknown",
        "17 % of the training examples occurred before; data.filters.duplicates=True drops such training examples",
        "1 of 3 examples of validation are in the training split, too",
        "33 % of the pairs of validation have a side of more than 9 times",
        "17 % of the pairs of train have identical sides",
        "validation has only 3 examples",
    ):
        assert part in told
    assert "blank" not in told, "they are dropped"
    remaining = dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, filters=FilterConfig(blank_sides=False)))
    blank = "1 source text of train is blank, so that a model that answers nothing is right there; data.filters"
    assert f"{blank}.blank_sides=True drops such examples" in " | ".join(
        warnings(remaining, corpus, summarize(remaining, corpus, TOKENIZERS))
    )


def test_shares_have_two_digits_and_no_exponent():
    assert [two_digits(value) for value in (100.0, 99.6, 33.3, 9.96, 0.123, 0.0, 430.4)] == [
        *("100", "100", "33", "10", "0.12", "0", "430")
    ]


def test_good_data_has_no_warning():
    train = [pair("abcdefg"[n % 5 :] + "abc"[: n % 3] + "ab" * (n % 2), "gfedc"[: n % 4 + 1]) for n in range(12)]
    corpus = Corpus(train * 1, [pair("g", "abc")] * 100, [pair("fg", "abc")] * 100)
    actual = summarize(CFG, corpus, TOKENIZERS)
    assert not [each for each in warnings(CFG, corpus, actual) if "too long" not in each]


def test_a_large_split_is_sampled_evenly_and_says_so(monkeypatch):
    monkeypatch.setattr(summary, "TOKENIZED", 4)
    train = [pair("ab"[: number % 2 + 1], "c") for number in range(12)]
    actual = summarize(CFG, Corpus(train, HELD_OUT, HELD_OUT), TOKENIZERS)
    assert (actual["train"].examples, actual["train"].read) == (12, 4)
    assert next(lines(actual)).startswith("train: 12 examples (4 read)  source 1.5 tokens on average, at most 2")


@pytest.mark.parametrize(("batching", "examples", "tokens"), [("packed", 0.5, 0.8), ("windows", 0.2, 0.5)])
def test_shares_of_a_mixture(batching, examples, tokens):
    """Texts of four tokens and of one, mixed equally: by examples, or by windows of equal numbers of tokens."""
    data = DataConfig(
        source="lines", train=("a", "b"), validation="c", weights=(1, 1), batching=batching, window=4, batch_size=2
    )
    cfg = Config(model=ModelConfig(family="decoder_lm"), data=data)
    train = Joined([[{"text": "abcd"}] * 30, [{"text": "a"}] * 60])
    first, second = summarize(cfg, Corpus(train, [{"text": "ab"}], [{"text": "ab"}]), TOKENIZERS)["train"].parts
    assert (first["examples"], first["tokens"]) == pytest.approx((examples, tokens))
    assert (second["examples"], second["tokens"]) == pytest.approx((1 - examples, 1 - tokens))


def test_languages_by_hand():
    """Each language is a source and a target; all of its texts count, and of 6 texts of a direction, 3 are read."""
    train = [pair("abc", "deΩ") | {"direction": "en-de"}] * 6 + [pair("aΩ", "b") | {"direction": "fr-en"}]
    corpus = Corpus(train, HELD_OUT, HELD_OUT, directions={"en-de": 6, "fr-en": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "TOKENIZED_BY_LANGUAGE", 3)
        actual = summarize_languages(corpus, Tokenizers(*[LETTERS.extended(("<2de>", "<2en>", "<2fr>"))] * 2))
    assert {name: dataclasses.astuple(language) for name, language in actual.items()} == {
        "de": (6, 3, 9, 9, 1.0, 3),
        "en": (7, 4, 10, 10, 1.0, 0),
        "fr": (1, 1, 2, 2, 1.0, 1),
    }
    assert [" ".join(line.split()) for line in language_lines(actual)] == [
        "language texts tokens/text tokens/character unknown",
        "de 6 3.0 1.00 33 %",
        "en 7 2.5 1.00 0 %",
        "fr 1 2.0 1.00 50 %",
    ]


def test_placeholders_that_sources_lack_are_counted():
    letters = LETTERS.with_symbols(NUMBERED, ("braces",))
    train = [pair("a {0}", "{0} {1} b {2}"), pair("{a} b", "a {a}{a} {0}")]
    actual = summarize(CFG, Corpus(train, HELD_OUT, HELD_OUT), Tokenizers(letters, letters))
    assert actual["train"].unmatched_placeholders == 3
    assert "3 placeholders of targets are not in their source" in next(lines(actual))


def test_texts_of_other_tasks_have_no_placeholders():
    """A language model may have the tokenizer of a translator."""
    letters = LETTERS.with_symbols(NUMBERED, ("braces",))
    data = DataConfig(source="lines", train="a", batching="packed", window=8)
    cfg = Config(model=ModelConfig(family="decoder_lm"), data=data)
    texts = [{"text": "a {0}"}] * 9
    assert (
        summarize(cfg, Corpus(texts, texts, texts), Tokenizers(letters, letters))["train"].unmatched_placeholders == 0
    )


def lost_tokens(cfg, examples, tokenizers, key):
    """Returns the number of examples that training drops or shortens, and that of the tokens of a side lost by this."""
    block = tokenize(examples, tokenizers, labels=("x", "y"))
    convert = dataclasses.replace(feature_converter(cfg, tokenizers), drop=False)
    endless = dataclasses.replace(convert, length=99, source_length=99)
    rows, whole = ([column.lengths for column in each(block).values()] for each in (convert, endless))
    short = np.any([a < b for a, b in zip(rows, whole, strict=True)], axis=0)
    return int(short.sum()), int((endless(block)[key].lengths - convert(block)[key].lengths).sum())


def test_truncated_texts_of_classifiers_are_counted():
    data = DataConfig(source="tsv", train="a", bucket_lengths=(4, 8), batch_tokens=64)
    cfg = Config(model=ModelConfig(family="classifier", max_length=8), data=data)
    bracketed = copy.copy(LETTERS)
    bracketed.special = dataclasses.replace(LETTERS.special, before=(1,), after=(2,))
    tokenizers = Tokenizers(bracketed, bracketed)
    texts = [{"text": "a" * size, "label": "xy"[size % 2]} for size in (1, 5, 6, 7, 9, 12)]
    corpus = Corpus(texts, texts, texts, ("x", "y"))
    actual = summarize(cfg, corpus, tokenizers)
    for split in ("train", "validation"):
        side = actual[split].sides["text"]
        lost = actual[split].long, side.tokens_beyond
        assert lost == lost_tokens(cfg, texts, tokenizers, "tokens") == (3, 1 + 3 + 6)
        assert (side.limit, side.too_long) == (6, 3)
    told = " | ".join(warnings(cfg, corpus, actual))
    assert "50 % of the training examples are too long for their row and truncated, by 10 tokens" in told
    assert "3 examples of validation (50 %) are truncated to model.max_length" in told


@pytest.mark.parametrize(
    ("tags", "limits"), [({"source_tags": ("source", "target")}, (5, 7)), ({"target_tags": ("target",)}, (6, 6))]
)
def test_tags_of_languages_take_room(tags, limits):
    data = DataConfig(
        source="tsv",
        train="a",
        validation="b",
        fields=("1", "2"),
        language_fields=("3", "4"),
        **{"bucket_lengths": (8,), "batch_tokens": 64, **tags},
    )
    cfg = Config(model=ModelConfig(max_length=16), data=data)
    tokenizers = Tokenizers(*[LETTERS.extended(("<2de>", "<2en>"))] * 2)
    sizes = itertools.product(range(4, 9), repeat=2)
    train = [pair("a" * n, "b" * m) | {"direction": "en-de"} for n, m in sizes]
    summary = summarize(cfg, Corpus(train, train, train, directions={"en-de": 25}), tokenizers)["train"]
    assert (summary.sides["source"].limit, summary.sides["target"].limit) == limits
    assert (summary.long, summary.sides["source"].tokens_beyond) == lost_tokens(cfg, train, tokenizers, "source")


def test_texts_with_several_labels(tmp_path):
    write(tmp_path, **{"a.tsv": b"x\ta\ny\ta\nx\ta\nx\tb\ny\t b\n"})
    data = DataConfig(source="tsv", train="a.tsv", validation="a.tsv", tokenizer="bytes")
    cfg = Config(model=ModelConfig(family="classifier"), data=data)
    corpus = load_corpus(cfg, tmp_path)
    actual = summarize(cfg, corpus, train_tokenizers(data, corpus.train))
    assert actual["train"].contradictory == 2  # y of "a", and of "b" but for its space
    told = " | ".join(warnings(cfg, corpus, actual))
    assert "2 of 5 examples of train have the text of another one with another label" in told


def test_texts_of_splits_are_compared_as_normalized():
    """Held-out pairs of decomposed letters and of capitals, which the model reads as training pairs; in training, they
    are no duplicates for the filter, which reads them as they are."""
    train = [pair("caf\u00e9", "b"), pair("x", "y"), pair("X", "Y")]
    held_out = [pair("cafe\u0301", "B"), pair("X", "z"), pair("new", "b")]
    corpus = Corpus(train, held_out, held_out)
    actual = {}
    for steps in ((), ("nfkc",), ("nfkc", "lowercase")):
        cfg = dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, normalize=steps))
        split = summarize(cfg, corpus, train_tokenizers(cfg.data, train))
        assert split["train"].duplicates == 0
        actual[steps] = (split["validation"].in_training, split["validation"].known_sources)
    assert actual == {(): (0, 1), ("nfkc",): (0, 2), ("nfkc", "lowercase"): (1, 1)}


def test_texts_of_training_with_other_labels():
    cfg = Config(model=ModelConfig(family="classifier", max_length=16), data=CFG.data)
    train = [{"text": text, "label": label} for text, label in (("a", "x"), ("b", "y"), ("c", "y"))]
    held_out = [{"text": text, "label": label} for text, label in (("a", "x"), (" b", "x"), ("d", "x"), ("d", "y"))]
    corpus = Corpus(train, held_out, held_out, ("x", "y"))
    actual = summarize(cfg, corpus, TOKENIZERS)
    assert (actual["train"].contradictory, actual["validation"].contradictory) == (0, 2)
    assert actual["validation"].in_training == 1
    told = " | ".join(warnings(cfg, corpus, actual))
    assert "2 of 4 examples of validation have the text of another one, or of a training example, with another" in told


def test_few_training_examples_show_that_many_held_out_ones_are_among_all(monkeypatch):
    """Regression test: a test split of training examples was told to be new if few of these were compared."""
    monkeypatch.setattr(summary, "COMPARED", 200)
    train = [pair(f"a {number}", f"b {number}") for number in range(40_000)]
    held_out = [train[number] for number in range(0, 40_000, 201)]
    assert len(held_out) == 200
    corpus = Corpus(train, held_out, held_out)
    actual = summarize(CFG, corpus, TOKENIZERS)
    assert actual["validation"].share_of_training == 0.005
    assert actual["validation"].in_training == 1 < 2  # 1 % of them
    told = " | ".join(warnings(CFG, corpus, actual))
    assert "1 of 200 examples of validation are in the training split (0.5 % of it was compared), too" in told
    others = Corpus(train, [pair("c", "d")] * 200, [])
    assert "in the training split" not in " | ".join(warnings(CFG, others, summarize(CFG, others, TOKENIZERS)))


def test_sources_of_training_with_other_targets():
    held_out = [pair("abc", "e"), pair("h ", "g"), pair("abc", "de"), pair("d", "d")]
    corpus = Corpus(TRAIN, held_out, held_out)
    actual = summarize(CFG, corpus, TOKENIZERS)
    assert (actual["train"].known_sources, actual["validation"].known_sources) == (0, 2)
    assert actual["validation"].in_training == 1
    assert "2 with a source of the training split" in "".join(lines(actual))
    assert "2 of 4 sources of validation are in the training split with another target" in " | ".join(
        warnings(CFG, corpus, actual)
    )
    parts = [[example | {"direction": name} for example in held_out] for name in ("en-de", "en-fr")]
    fields = {"language_fields": ("1", "2"), "fields": ("3", "4"), "validation": "b.tsv"}
    cfg = dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, **fields))
    train = [*parts[0], pair("fgh", "a") | {"direction": "en-fr"}]
    corpus = Corpus(train, [*parts[1], parts[0][0] | {"target": "c"}], train, directions={"en-de": 4, "en-fr": 1})
    actual = summarize(cfg, corpus, train_tokenizers(cfg.data, train))
    assert actual["validation"].known_sources == 1, "other directions are other texts"


def test_the_only_direction_of_a_corpus_is_a_part():
    """Regression test: without `data.directions`, evaluation did not know which directions are zero-shot ones."""
    fields = {"language_fields": ("1", "2"), "fields": ("3", "4"), "validation": "b.tsv"}
    cfg = dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, **fields))
    train = [pair("abc", "de") | {"direction": "en-de"}] * 3
    actual = summarize(cfg, Corpus(train, train, train, directions={"en-de": 3}), train_tokenizers(cfg.data, train))
    assert [(part["name"], part["size"], part["examples"]) for part in actual["train"].parts] == [("en-de", 3, 1.0)]


def test_a_held_out_pair_that_is_trained_the_other_way_round_is_in_training():
    fields = {"language_fields": ("1", "2"), "fields": ("3", "4"), "validation": "b.tsv"}
    cfg = dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, **fields))
    train = [pair("abc", "de") | {"direction": "en-de"}, pair("f", "g") | {"direction": "en-fr"}]
    turned = [pair("d\u200be", "abc") | {"direction": "de-en"}, pair("g", "f") | {"direction": "fr-en"}]
    other = [pair("abc", "de") | {"direction": "de-en"}, pair("de", "abc") | {"direction": "fr-en"}]
    corpus = Corpus(train, [*turned, *other], train, directions={"en-de": 1, "en-fr": 1})
    actual = summarize(cfg, corpus, train_tokenizers(cfg.data, train))
    assert (actual["train"].duplicates, actual["validation"].in_training, actual["test"].in_training) == (0, 2, 2)
    told = "2 of 4 examples of validation are in the training split, in the same direction or the other, too"
    assert told in " | ".join(warnings(cfg, corpus, actual))


def test_remedies_are_settings_that_the_source_has():
    cfg = dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, source="cldr_translation", train=()))
    corpus = Corpus(TRAIN, HELD_OUT, HELD_OUT)
    told = " | ".join(warnings(cfg, corpus, summarize(cfg, corpus, TOKENIZERS)))
    assert "17 % of the training examples occurred before |" in told
    assert "data.filters" not in told


def test_left_out_lines_and_headers(tmp_path):
    write(tmp_path, **{"a.tsv": b"en\tde\na\tb\n\n\tc\nd\n" + b"e\tf\n" * 3})
    data = DataConfig(source="tsv", train="a.tsv", validation="a.tsv", tokenizer="bytes", on_bad_line="skip")
    cfg = Config(data=data)
    corpus = load_corpus(cfg, tmp_path)
    actual = summarize(cfg, corpus, train_tokenizers(data, corpus.train))
    expected = {"has 1 column where source<tab>target is expected": 1, "blank lines": 1, "blank texts": 1}
    assert actual["train"].left_out == expected
    told = " | ".join(warnings(cfg, corpus, actual))
    assert "the first training example is {'source': 'en', 'target': 'de'}, which looks like a header" in told
    assert "left out for a blank text" in told


def test_quotes_of_csv_are_said(tmp_path):
    """As csv.writer writes them: texts with quotes are quoted, with doubled quotes inside."""
    pairs = [('he said "yes"', "ja"), ("a", "b"), ('"c"', "d"), ("e", "f")] * 5
    with (tmp_path / "a.tsv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows(pairs)
    (tmp_path / "b.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    for name, quoted in (("a.tsv", 10), ("b.tsv", 0)):
        data = DataConfig(source="tsv", train=name, validation=name, tokenizer="bytes")
        cfg, corpus = Config(data=data), load_corpus(Config(data=data), tmp_path)
        actual = summarize(cfg, corpus, train_tokenizers(data, corpus.train))
        assert actual["train"].quoted == quoted
        told = " | ".join(warnings(cfg, corpus, actual))
        assert ("50 % of the examples of train have quoted texts" in told) == bool(quoted)


def test_one_is_singular():
    split = SplitSummary(1, 1, {}, left_out={"blank texts": 1}, compared=1, in_training=1, share_of_training=1.0)
    split.parts = [{"name": "a", "size": 1, "examples": 1.0, "tokens": 1.0, "epochs": 1.0}]
    first, part = summary.lines({"validation": split})
    assert "1 left out (blank texts)" in first
    assert part.endswith("100 % of the tokens, 1 epoch")
    told = warnings(CFG, Corpus([pair("a", "b")], [], []), {"validation": split})
    assert any("1 of 1 example of validation is in the training split" in text for text in told)
