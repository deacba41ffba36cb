"""Catalogues: pairs through equal messages, splits by message, and Django's messages as Python's gettext reads them."""

import codecs
import gettext
import itertools
import json
from pathlib import Path

import pytest
from babel.messages import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import write_po

from tests.data.corpus_files import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import train
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.corpora.gettext import Gettext, find_catalogues, language_of_locale

WORDS = [f"word {number}" for number in range(60)]


def write(path: Path, texts: dict, fuzzy=(), plural=()) -> None:
    """Writes a catalogue of texts by id, or by id and context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    catalogue = Catalog("de")
    for key, text in texts.items():
        message_id, context = key if isinstance(key, tuple) else (key, None)
        flags = ["fuzzy"] if key in fuzzy else []
        if key in plural:
            catalogue.add((message_id, f"{message_id}s"), (text, text))
        else:
            catalogue.add(message_id, text, context=context, flags=flags)
    with path.open("wb") as file:
        (write_mo if path.suffix == ".mo" else write_po)(file, catalogue)


def pairs(corpus) -> dict[str, set[tuple[str, str]]]:
    """Returns the pairs of all splits by direction."""
    actual: dict[str, set[tuple[str, str]]] = {}
    for example in itertools.chain(corpus.train, corpus.validation, corpus.test):
        actual.setdefault(example["direction"], set()).add((example["source"], example["target"]))
    return actual


@pytest.fixture
def folder(tmp_path) -> Path:
    """Catalogues in three languages with 60 common words each."""
    words = {language: {word: f"{word} {language}" for word in WORDS} for language in ("de", "fr", "pt_BR")}
    special = {
        ("May", "month"): "Mai",
        ("May", "verb"): "dürfen",
        "day": "Tag",
        "none": "",
        "Sure?": "Klar?",
    }
    write(tmp_path / "a/locale/de/LC_MESSAGES/app.po", words["de"] | special, fuzzy=["Sure?"], plural=["day"])
    write(tmp_path / "a/locale/fr/LC_MESSAGES/app.mo", words["fr"] | {("May", "month"): "mai"})
    write(tmp_path / "a/locale/pt-BR/LC_MESSAGES/app.mo", words["pt_BR"])
    write(tmp_path / "a/locale/fr/LC_MESSAGES/other.mo", {"May": "Mayenne", "word 0": "word 0 fr"})
    return tmp_path


def test_pairs_are_texts_of_the_same_message(folder):
    directions = ("en-de", "de-fr", "fr-pt_BR")
    corpus = load_corpus(config("gettext", "a", directions=directions, both_directions=True), folder)
    actual = pairs(corpus)
    assert set(corpus.directions) == {"en-de", "de-en", "de-fr", "fr-de", "fr-pt_BR", "pt_BR-fr"}
    assert corpus.train.sizes == list(corpus.directions.values())
    joined = {(f"{word} de", f"{word} fr") for word in WORDS}
    assert actual["de-fr"] == joined | {("Mai", "mai")}
    assert actual["fr-de"] == {(target, source) for source, target in actual["de-fr"]}
    assert actual["en-de"] == {(word, f"{word} de") for word in WORDS} | {("May", "Mai"), ("May", "dürfen")}
    assert len(actual["fr-pt_BR"]) == 60
    counts = {}
    for split in corpus.left_out.values():
        counts = {reason: counts.get(reason, 0) + split.get(reason, 0) for reason in {*counts, *split}}
    expected = {"fuzzy messages": 1, "untranslated messages": 1, "plural messages": 1, "headers of catalogues": 4}
    assert counts == expected


def test_no_message_is_in_two_splits_in_any_language_or_catalogue(folder):
    write(folder / "b/fr.po", {f"{word.replace(' ', '  ')}": f"{word} encore" for word in WORDS})
    corpus = load_corpus(
        config("gettext", ("a", "b/*.po"), directions=("en-fr", "fr-de"), validation_fraction=0.2), folder
    )
    words = [
        {" ".join(example["source"].split()[:2]) for example in split if example["source"].startswith("word")}
        for split in (corpus.train, corpus.validation, corpus.test)
    ]
    assert sorted(itertools.chain.from_iterable(words)) == sorted(WORDS)
    assert 30 < len(words[0]) < 44
    assert min(map(len, words)) > 5
    assert ("word  0", "word 0 encore") in pairs(corpus)["en-fr"]
    assert sum(split["repeated pairs"] for split in corpus.left_out.values()) == 1  # of app.mo and other.mo
    examples = [*corpus.train, *corpus.validation, *corpus.test]
    assert len(examples) == len({tuple(example.values()) for example in examples})


def test_no_text_of_a_language_is_in_two_splits(folder):
    many = {word: f"{word[:6]} de" for word in WORDS}
    write(folder / "same/de/LC_MESSAGES/app.mo", many)
    corpus = load_corpus(config("gettext", "same", directions=("de-en",), validation_fraction=0.3), folder)
    texts = [{example["source"] for example in split} for split in (corpus.train, corpus.validation, corpus.test)]
    assert sum(map(len, texts)) == len(set.union(*texts)) == len(set(many.values()))
    assert sum(split["texts of another split"] for split in corpus.left_out.values()) > 5


def test_texts_of_splits_are_compared_as_models_read_them(folder):
    """Half of the German texts differ from others in a last line end, which cleaning removes."""
    many = {word: f"{word[:6]} de" + "\n" * (number % 2) for number, word in enumerate(WORDS)}
    write(folder / "same/de/LC_MESSAGES/app.mo", many)
    settings = {"directions": ("de-en",), "validation_fraction": 0.3}
    corpus = load_corpus(config("gettext", "same", **settings), folder)
    texts = [
        {example["source"].strip() for example in split} for split in (corpus.train, corpus.validation, corpus.test)
    ]
    assert sum(map(len, texts)) == len(set.union(*texts)) == len({text.strip() for text in many.values()})
    uncleaned = load_corpus(config("gettext", "same", **settings, clean_whitespace=False), folder)
    assert len(uncleaned.validation) + len(uncleaned.test) > len(corpus.validation) + len(corpus.test)


def test_pairs_that_models_read_alike_are_read_once(folder):
    write(folder / "alike/de/LC_MESSAGES/app.mo", {word: f"{word} de" for word in WORDS})
    write(folder / "alike/de/LC_MESSAGES/other.mo", {f"{word}\n": f"{word} de\n" for word in WORDS})
    corpus = load_corpus(config("gettext", "alike", directions=("en-de",)), folder)
    assert len(corpus.train) + len(corpus.validation) + len(corpus.test) == len(WORDS)
    assert sum(split["repeated pairs"] for split in corpus.left_out.values()) == len(WORDS)


def test_held_out_directions_are_not_in_training(folder):
    corpus = load_corpus(config("gettext", "a", directions=("en-de", "en-fr"), zero_shot=("de-fr",)), folder)
    assert set(corpus.directions) == {"en-de", "en-fr"}
    assert {example["direction"] for example in corpus.test} == {"en-de", "en-fr", "de-fr"}


def test_without_directions_english_is_paired_with_each_language_that_has_enough(folder, monkeypatch):
    write(folder / "a/locale/en_GB/LC_MESSAGES/app.mo", {word: f"{word}, Sir" for word in WORDS})
    monkeypatch.setattr(Gettext, "ENOUGH", 61)
    assert set(load_corpus(config("gettext", "a"), folder).directions) == {"en-de", "de-en", "en-fr", "fr-en"}
    asked = load_corpus(config("gettext", "a", directions=("en-en_GB",)), folder)
    assert ("word 0", "word 0, Sir") in pairs(asked)["en-en_GB"]


@pytest.mark.parametrize("layout", ["{}/LC_MESSAGES/app.mo", "{}.po"])
def test_locales_with_modifiers(folder, monkeypatch, layout):
    """Regression test: English in other quotation marks was a foreign language, and some files an error."""
    for locale in ("sr", "sr@latin", "ca", "ca@valencia", "en@quot", "en_GB"):
        write(folder / "b" / layout.format(locale), {word: f"{word} {locale}" for word in WORDS})
    monkeypatch.setattr(Gettext, "ENOUGH", 60)
    corpus = load_corpus(config("gettext", "b"), folder)
    languages = {"sr": "sr", "sr_Latn": "sr@latin", "ca": "ca", "ca@valencia": "ca@valencia"}
    assert set(corpus.directions) == {name for code in languages for name in (f"en-{code}", f"{code}-en")}
    for code, locale in languages.items():
        assert pairs(corpus)[f"en-{code}"] == {(word, f"{word} {locale}") for word in WORDS}
    assert language_of_locale("sr-RS@latin") == "sr_Latn_RS"


def test_compiled_catalogues_come_before_their_sources(folder):
    write(folder / "a/locale/fr/LC_MESSAGES/app.po", {"word 1": "from the source"})
    names = [path.name for path in find_catalogues(folder, "a/locale/*/LC_MESSAGES/*.*o")]
    assert names == ["app.po", "app.mo", "other.mo", "app.mo"]


def test_malformed_lines_are_counted_if_they_are_skipped(folder, caplog):
    path = folder / "a/locale/de/LC_MESSAGES/app.po"
    path.write_text(path.read_text() + '\nmsgid "orphan"\n\nmsgid "last"\nmsgstr "letzte"\n')
    cfg = {"directions": ("en-de",), "on_bad_line": "skip"}
    corpus = load_corpus(config("gettext", "a", **cfg), folder)
    assert ("last", "letzte") in pairs(corpus)["en-de"]
    assert corpus.left_out["train"]["missing msgstr for msgid 'orphan'"] == 1
    (folder / "a/locale/de/LC_MESSAGES/app.mo").write_bytes(b"nothing")
    with pytest.raises(DataError, match="data.train has no"):
        load_corpus(config("gettext", "a", **cfg), folder)


def test_a_message_that_a_catalogue_has_twice_is_malformed(folder):
    """As for msgfmt, whatever its text, its plural and its flags; another context is another message."""
    path = folder / "a/locale/de/LC_MESSAGES/app.po"
    more = 'msgctxt "c"\nmsgid "word 1"\nmsgstr "eins"\n\n#, fuzzy\nmsgid "word 1"\nmsgstr "zwei"\n'
    path.write_text(path.read_text() + f'{more}\nmsgid "word 2"\nmsgid_plural "words"\nmsgstr[0] "a"\nmsgstr[1] "b"\n')
    line = path.read_text().splitlines().index('msgstr "eins"') + 4
    with pytest.raises(DataError, match=f"app.po, line {line}: repeats an earlier message; data.on_bad_line='skip'"):
        load_corpus(config("gettext", "a", directions=("en-de",)), folder)
    corpus = load_corpus(config("gettext", "a", directions=("en-de",), on_bad_line="skip"), folder)
    assert {("word 1", "word 1 de"), ("word 1", "eins"), ("word 2", "word 2 de")} < pairs(corpus)["en-de"]
    assert corpus.left_out["train"]["repeats an earlier message"] == 2


def test_a_mark_of_utf8_is_no_text(folder):
    """Regression test: Babel could not read the catalogue."""
    path = folder / "a/locale/de/LC_MESSAGES/app.po"
    before = pairs(load_corpus(config("gettext", "a", directions=("en-de",)), folder))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert pairs(load_corpus(config("gettext", "a", directions=("en-de",)), folder)) == before


@pytest.mark.parametrize(
    ("train", "changes", "sentence"),
    [
        (
            "no_such_package",
            {},
            "'no_such_package' is neither an installed Python .* run pip install no_such_package, or name",
        ),
        ("pytest", {}, "'pytest' has no .mo or .po file in "),
        ("a/*.po", {}, r"a/\*.po matches no file"),
        ("a", {"directions": ("en-ja",)}, "has no catalogue of language 'ja', only de, en, fr, pt_BR$"),
        ("a", {}, "has no message for the train split: name more catalogues"),
        ("bad", {"directions": ("en-de",)}, r"de.po, line 1: missing msgstr .*; data.on_bad_line='skip' skips"),
        ("cut", {"directions": ("en-de",)}, "de.po, line 2: has a quote that is not closed; data.on_bad_line='skip'"),
        (
            "odd",
            {"directions": ("en-de",)},
            r"messages.po is neither LOCALE/LC_MESSAGES/messages.po nor named by its lang",
        ),
        ("damaged", {"directions": ("en-de",)}, r"app.mo, line 1: is no catalogue that Babel can read \("),
    ],
)
def test_mistakes(folder, train, changes, sentence):
    (folder / "bad").mkdir()
    (folder / "bad/de.po").write_text('msgid "a"\n\nmsgid "b"\nmsgstr "c"\n')
    (folder / "cut").mkdir()
    (folder / "cut/de.po").write_text('msgid "a"\nmsgstr "b 9\n')
    write(folder / "odd/messages.po", {"a": "b"})
    write(folder / "damaged/de/LC_MESSAGES/app.mo", {"a": "b"})
    path = folder / "damaged/de/LC_MESSAGES/app.mo"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=sentence):
        load_corpus(config("gettext", train, **changes), folder)


def test_something_must_be_left_for_training():
    with pytest.raises(UserError, match="data.validation_fraction=0.5: must be below 0.5"):
        config("gettext", "django", validation_fraction=0.5)


@pytest.mark.long
def test_django_has_what_pythons_gettext_reads():
    pytest.importorskip("django", reason="the test extra installs it")
    corpus = load_corpus(config("gettext", "django", directions=("en-de", "de-fr")), None)
    actual = pairs(corpus)
    catalogues = {}
    for language in ("de", "fr"):
        for path in find_catalogues(None, "django"):
            if path.parents[1].name == language:
                with path.open("rb") as file:
                    catalogues[path.parents[2], path.stem, language] = gettext.GNUTranslations(file)._catalog
    expected: dict[str, set[tuple[str, str]]] = {"en-de": set(), "de-fr": set()}
    for (folder, domain, language), texts in catalogues.items():
        if language == "de":
            french = catalogues[folder, domain, "fr"]
            for key, text in texts.items():
                if key and isinstance(key, str) and text.strip():
                    expected["en-de"].add((key.rpartition("\x04")[2], text))
                    if french.get(key, "").strip():
                        expected["de-fr"].add((text, french[key]))
    examples = (*corpus.train, *corpus.validation)
    earlier = {text for example in examples for text in (example["source"], example["target"])}
    for direction, all_pairs in expected.items():
        assert actual[direction] <= all_pairs
        assert all(earlier & {*pair} for pair in all_pairs - actual[direction])
        assert len(actual[direction]) > 0.95 * len(all_pairs) > 500


CONFIG = """
import dataclasses

from tests.runs.conftest import small_config
from tformer_jax.config import to_config_dict


def get_config():
    cfg = small_config(steps=2)
    data = {"source": "gettext", "train": "django", "directions": ("en-de", "de-fr"), "placeholders": ("percent",)}
    return to_config_dict(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, validation=(), test=(), **data)))
"""


@pytest.mark.slow
def test_a_run_trains_on_django(tmp_path, capsys):
    pytest.importorskip("django", reason="the test extra installs it")
    (tmp_path / "messages.py").write_text(CONFIG)
    train.main(["--config", f"{tmp_path}/messages.py", "--run", f"{tmp_path}/run"])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"chrf:en-de", "chrf:de-fr", "placeholders_kept"} <= result["test"].keys()
    assert "\n  de-fr: " in capsys.readouterr().out
