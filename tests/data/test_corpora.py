"""Generated corpora: deterministic, held out by text, and without two targets for the same source."""

import datetime
import json
import pickle
import random
import re
from pathlib import Path

import babel
import pytest

from tests.helpers import rest_slow
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.corpora import DataError, cldr_phrases, load_corpus
from tformer_jax.data.corpora.cldr_phrases import PhraseBook
from tformer_jax.data.corpora.heldout import split_of


def load(family: str = "seq2seq", seed: int = 0, **data):
    return load_corpus(Config(seed=seed, model=ModelConfig(family=family), data=DataConfig(**data)), None)


@pytest.fixture(scope="module")
def translation():
    return load(heldout_examples=50)


@pytest.fixture(scope="module")
def examples(translation):
    return [translation.train[i] for i in range(6000)]


def test_a_source_has_one_target(examples):
    targets = {}
    for example in examples:
        assert targets.setdefault(example["source"], example["target"]) == example["target"]
    assert len(targets) > 4000


def test_held_out_phrases_never_occur_in_training(translation, examples):
    heldout = {example["source"] for split in (translation.validation, translation.test) for example in split}
    assert len(heldout) == 100
    assert not heldout & {example["source"] for example in examples}
    assert {split_of(example["source"]) for example in examples} == {"train"}
    other_seed = load(seed=1, heldout_examples=50).train
    assert not heldout & {other_seed[i]["source"] for i in range(2000)}


def test_held_out_phrases_are_the_same_for_all_seeds(translation):
    other = load(seed=1, heldout_examples=50)
    assert (other.validation, other.test) == (translation.validation, translation.test)


def test_example_i_depends_on_seed_and_i_alone(translation):
    again = pickle.loads(pickle.dumps(translation.train))
    assert [again[i] for i in (5, 3, 2**31 - 1)] == [translation.train[i] for i in (5, 3, 2**31 - 1)]
    other = load(seed=1, heldout_examples=1).train
    assert [other[i] for i in range(5)] != [translation.train[i] for i in range(5)]
    with pytest.raises(IndexError):
        translation.train[2**31]


def test_the_kinds_of_phrase_are_all_there(examples):
    targets = [f" {example['target']} " for example in examples]
    for word in (" Dienstag,", " vor ", " Kilometer ", " Euro ", "%", " und ", " oder ", "(", " Millionen ", ":"):
        assert any(word in target for target in targets), word


def test_sources_have_the_space_of_the_keyboard_and_targets_those_of_the_language(examples):
    assert not re.search(r"[^\S ]", "".join(example["source"] for example in examples))
    assert any("\u2009" in example["target"] or "\xa0" in example["target"] for example in examples)


@pytest.mark.long
def test_full_dates_are_phrases():
    book = PhraseBook(("en", "de"))
    phrases = (book.phrase(random.Random(seed)) for seed in range(100_000))
    actual = ((re.fullmatch(r"Tuesday, March (\d+), (\d+)", source), target) for source, target in phrases)
    date, target = next((date, target) for date, target in actual if date)
    assert target == f"Dienstag, {date[1]}. März {date[2]}"


def test_an_interval_has_two_days():
    """The pattern `MMMM d – d, y` of CLDR, with thin spaces."""
    *_, (_, render), _, _ = PhraseBook(("en",), admitted=[()] * 7)._dates()
    days = datetime.date(2026, 5, 3), datetime.date(2026, 5, 9)
    assert render(babel.Locale("en"), days) == "May 3\u2009–\u20099, 2026"


def test_prices_are_whole_or_have_cents():
    cents = {round(100 * cldr_phrases._price(random.Random(seed)), 6) % 100 for seed in range(2000)}
    assert cents == {float(number) for number in range(100)}


@pytest.mark.long
@pytest.mark.parametrize("pair", rest_slow([("ar", "fr"), ("en", "zh"), ("zh", "en"), ("de", "ja")], 1))
def test_any_two_locales(pair):
    corpus = load(source_language=pair[0], target_language=pair[1], heldout_examples=5)
    targets = {}
    for i in range(1500):
        example = corpus.train[i]
        assert targets.setdefault(example["source"], example["target"]) == example["target"]
        assert not any(unit in example["target"] for unit in ("length-", "mass-", "duration-", "digital-"))


@pytest.mark.slow
def test_languages_are_recognizable():
    corpus = load("classifier", source="cldr_language", languages=("en", "de", "fr"), heldout_examples=40)
    assert corpus.labels == ("en", "de", "fr")
    examples = [corpus.train[i] for i in range(800)]
    labels = {}
    for example in examples:
        assert labels.setdefault(example["text"], example["label"]) == example["label"]
    assert set(labels.values()) == {"en", "de", "fr"}
    assert not {example["text"] for example in corpus.test} & set(labels)
    assert min(sum(map(str.isalpha, text)) for text in labels if text.isascii()) == 4


@pytest.mark.parametrize(
    ("languages", "sentence"),
    [
        (("en", "klingon"), "'klingon' is not a CLDR locale"),
        (("en", "en"), "the CLDR locales en, en must differ from each other"),
    ],
)
def test_unknown_locales(languages, sentence):
    with pytest.raises(DataError, match=sentence):
        load(source_language=languages[0], target_language=languages[1])


@pytest.mark.slow
def test_the_standard_library_is_split_by_path():
    corpus = load("decoder_lm", source="stdlib_text", batching="windows")
    sizes = [len(split) for split in (corpus.train, corpus.validation, corpus.test)]
    assert sizes[0] > 300
    assert min(sizes[1:]) > 10
    wanted = Path(json.__file__).read_text(encoding="utf-8")
    assert any(
        example["text"] == wanted for split in (corpus.train, corpus.test, corpus.validation) for example in split
    )
