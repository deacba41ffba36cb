"""Mistakes in data of many languages: settings, codes and directions that do not fit, and what is said of them."""

import dataclasses
import itertools

import pytest

from tests.data.test_directions import config, experiment, write_table
from tformer_jax.base.errors import UserError
from tformer_jax.config import ConfigError, EvalConfig, TrainConfig
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.pipeline import evaluation_batches
from tformer_jax.data.summary import summarize
from tformer_jax.data.summary_warnings import warnings
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.tasks.evaluators.directions import check_metric


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"directions": ("en",)}, r"data.directions=\('en',\): 'en' must be two different codes, joined by a hyphen"),
        ({"directions": ("en-pt-BR",)}, "'en-pt-BR' must be two different codes, joined by a hyphen: 'en-de' or 'en-p"),
        ({"directions": ("en-de", "de-en"), "both_directions": True}, "has 'en-de' twice|has 'de-en' twice"),
        ({"directions": ("en-de",), "zero_shot": ("en-de",)}, "has 'en-de' twice, with both_directions and zero_shot"),
        ({"language_fields": (), "directions": ("en-de",)}, r"'train.tsv' must contain \{src\} and \{tgt\}"),
        (
            {"language_fields": (), "temperature": 5.0},
            "is used only with data.directions or language_fields; write 1.0",
        ),
        ({"target_language": "fr"}, "is not used with several directions; leave it out"),
        ({"validation": ()}, "must name data, because many languages have no common last part to hold out"),
        ({"normalize": ("moses",)}, "cannot have moses or punctuation with several languages"),
        ({"weights": (1.0,)}, "needs data.directions, whose order the weights have"),
        ({"directions": ("(en-de",)}, "must be two different codes, joined by a hyphen"),
        ({"directions": ("en-de", "en-fr"), "weights": (1.0,)}, "must have one number for each of the 2 directions"),
    ],
)
def test_settings_that_do_not_fit(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config(**changes)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("en\ten\ta\tb", "line 1: the languages 'en' and 'en' are no direction"),
        ("en\t\ta\tb", "line 1: the languages 'en' and '' are no direction"),
        (
            "A dog runs\tEin Hund läuft\ten\tde",
            "line 1: the languages 'A dog runs' and 'Ein Hund läuft' are no direction",
        ),
        (
            "source_language\ttarget_language\ta\tb",
            "line 1: the language 'source_language' looks like the name of a col",
        ),
        ("src\ttgt\ta\tb", "line 1: the language 'src' looks like the name of a column: set data.header=True"),
        ("en\tdeu\ta\tb", "data.train has the language 'deu', which is 'de' in another place: write one code"),
        ("en\tde\ta\tb\nen\tde\tc\td\te", "line 2: has 5 columns where 4 columns are expected"),
        ("en\tfr\ta\tb", "data.train has no example of direction en-de, only en-fr: correct it in data.directions"),
    ],
)
def test_rows_that_do_not_fit(tmp_path, row, sentence):
    write_table(tmp_path)
    (tmp_path / "train.tsv").write_text(row + "\n")
    with pytest.raises(DataError, match=sentence):
        load_corpus(config(directions=("en-de",)), tmp_path)


def test_languages_that_differ_only_in_case(tmp_path):
    write_table(tmp_path)
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("EN\tfr\ta\tb\n")
    with pytest.raises(DataError, match="data.train has the language 'EN', which is 'en' in another place"):
        load_corpus(config(directions=()), tmp_path)


def test_another_code_in_held_out_data_is_refused(tmp_path):
    """Regression test: a direction that is trained was evaluated as one that is not."""
    write_table(tmp_path)
    (tmp_path / "dev.tsv").write_text("eng\tde\ta\tb\n")
    for directions in ((), ("en-de",)):
        with pytest.raises(DataError, match="the language 'eng', which is 'en' in another place: write one code"):
            load_corpus(config(directions=directions), tmp_path)


def test_what_is_said_of_languages(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path)
    assert "language" not in " ".join(warnings(cfg, corpus, summarize(cfg, corpus, tokenizers)))
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("en\txx\ta\tb\n")
    cfg = config(source_tags=(), target_tags=())
    corpus = load_corpus(cfg, tmp_path)
    told = list(warnings(cfg, corpus, summarize(cfg, corpus, train_tokenizers(cfg.data, corpus.train, tmp_path))))
    assert any(text.startswith("no standard names the languages 'xx': if they are none, correct") for text in told)
    assert "no tag tells the model into which language to translate: set data.source_tags=('target',)" in told


def test_a_zero_shot_direction_without_examples_is_said(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path, zero_shot=("de-fr", "fr-pt_PT", "fr-de"))
    told = list(warnings(cfg, corpus, summarize(cfg, corpus, tokenizers)))
    assert any(text.startswith("no held-out example is of fr-pt_PT, fr-de in data.zero_shot") for text in told)
    cfg, corpus, tokenizers = experiment(tmp_path, zero_shot=("de-fr",))
    assert "zero_shot" not in " ".join(warnings(cfg, corpus, summarize(cfg, corpus, tokenizers)))


def test_two_codes_of_a_language(tmp_path):
    for code in ("deu", "de\u200b "):
        write_table(tmp_path)
        with (tmp_path / "train.tsv").open("a", encoding="utf-8") as file:
            file.write(f"en\t{code}\ta\tb\n")
        if code == "deu":
            with pytest.raises(
                DataError, match="data.train has the language 'deu', which is 'de' in another place: write one"
            ):
                load_corpus(config(directions=()), tmp_path)
        else:
            assert not any("\u200b" in name for name in load_corpus(config(directions=()), tmp_path).directions)


def test_a_direction_that_no_row_has(tmp_path):
    """Regression test: the directions of rows that were left out were not named."""
    write_table(tmp_path)
    with pytest.raises(DataError) as caught:
        load_corpus(config(directions=("en-de", "en-pt"), both_directions=True), tmp_path)
    assert str(caught.value) == (
        "data.train has no example of direction en-pt, only de-en, en-de, en-fr, en-pt_BR: correct it in "
        "data.directions, or leave it out"
    )


def test_the_number_of_duplicates_does_not_depend_on_the_direction_of_rows(tmp_path):
    """Regression test: equal rows counted once, and rows that repeat a pair the other way round twice."""
    (tmp_path / "dev.tsv").write_text("en\tde\te\tf\n")
    counts = []
    for second in ("en\tde\ta\tb", "de\ten\tb\ta"):
        (tmp_path / "train.tsv").write_text(f"en\tde\ta\tb\n{second}\n")
        corpus = load_corpus(config(both_directions=True, filters={"duplicates": True}), tmp_path)
        counts.append((len(corpus.train), corpus.left_out["train"]))
    assert counts == [(2, {"duplicates": 2})] * 2


def test_a_direction_without_a_pair_that_fits_is_said(tmp_path):
    """Regression test: it was drawn, but not trained, and only counted among all examples."""
    cfg, corpus, tokenizers = experiment(tmp_path)
    assert "drawn but not" not in " ".join(warnings(cfg, corpus, summarize(cfg, corpus, tokenizers)))
    rows = (tmp_path / "train.tsv").read_text()
    (tmp_path / "train.tsv").write_text(rows + f"en\tit\ta\t{'b ' * 40}\n")
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train, tmp_path)
    told = " ".join(warnings(cfg, corpus, summarize(cfg, corpus, tokenizers)))
    assert "en-it is drawn but not trained, because no example that was read fits its row (examples: 1)" in told


def test_a_metric_of_a_direction_that_is_not_evaluated(tmp_path):
    """Regression test: the first evaluation found the mistake."""
    _, corpus, _ = experiment(tmp_path)
    for group in ("en-de", "from-en", "zero-shot"):
        check_metric(dataclasses.replace(config(), train=TrainConfig(metric=f"chrf:{group}")), corpus)
    wrong = dataclasses.replace(config(), train=TrainConfig(metric="chrf:en-fr"))
    names = "write 'chrf', or one of chrf:en-de, chrf:de-fr, "
    with pytest.raises(ConfigError, match=f"the validation split has no direction or group 'en-fr'; {names}"):
        check_metric(wrong, corpus)


def test_fewer_evaluated_examples_than_directions(tmp_path):
    """Regression test: the first evaluation found that it lacks the direction of `train.metric`."""
    cfg, corpus, tokenizers = experiment(tmp_path)
    few = dataclasses.replace(cfg, eval=EvalConfig(examples=1))
    told = list(warnings(few, corpus, summarize(few, corpus, tokenizers)))
    assert any(text.startswith("eval.examples=1 is less than the 2 directions of validation") for text in told)
    enough = dataclasses.replace(cfg, eval=EvalConfig(examples=2))
    assert "eval.examples" not in " ".join(warnings(enough, corpus, summarize(enough, corpus, tokenizers)))
    for name in ("en-de", "de-fr"):
        check_metric(dataclasses.replace(enough, train=TrainConfig(metric=f"chrf:{name}")), corpus)
    problem = "eval.examples=1: leaves out 'en-de' of train.metric='chrf:en-de'; write at least 2, the number of"
    with pytest.raises(ConfigError, match=problem):
        check_metric(dataclasses.replace(few, train=TrainConfig(metric="chrf:en-de")), corpus)


def test_a_language_that_only_held_out_pairs_have(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path)
    (tmp_path / "dev.tsv").write_text("en\tde\ta\tb\nen\tit\ta\tb\n")
    problem = "data.validation has 1 example of direction en-it, but no training example has the language 'it': add"
    with pytest.raises(DataError, match=problem):
        load_corpus(cfg, tmp_path)
    loaded = config(tokenizer="file", tokenizer_file="other.json", vocab_size=8000)
    assert len(load_corpus(loaded, tmp_path).validation) == 2
    pair = [{"source": "a", "target": "b", "direction": "en-it"}]
    with pytest.raises(UserError, match="the model has no language 'it'; it has de, en, fr, pt_BR"):
        list(itertools.islice(evaluation_batches(cfg, pair, tokenizers), 1))
    assert corpus.validation


@pytest.mark.parametrize("source", ["jsonl", "tsv"])
def test_a_missing_field_of_a_language_names_its_setting(tmp_path, source):
    """Regression test: the message named `data.fields`, which cannot mend it."""
    row = '{"from": "en", "source": "a", "target": "b"}\n' if source == "jsonl" else "from\tsource\ttarget\nen\ta\tb\n"
    (tmp_path / f"pairs.{source}").write_text(row)
    header = {"header": True} if source == "tsv" else {}
    names = {"language_fields": ("from", "to"), "fields": ("source", "target")}
    cfg = config(source=source, train=f"pairs.{source}", validation=f"pairs.{source}", **names, **header)
    with pytest.raises(DataError, match="'to', only 'from', 'source', 'target': set data.language_fields"):
        load_corpus(cfg, tmp_path)
