"""Filters of examples, headers, and what they count."""

import dataclasses

import pytest

from tests.data.corpus_files import config, write
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig, FilterConfig
from tformer_jax.data.corpora import DataError, load_corpus, stream_corpus
from tformer_jax.data.corpora.filters import digest_of

PAIRS = ["a\tb", "a\tb", "\u200b\tb", "a\t ", "same\tsame", "long long long\tx", "c\td"]
KINDS = ("tsv", "jsonl", "parallel_lines")


def written(folder, kind: str, lines: list[str]) -> str:
    pairs = [line.split("\t") for line in lines]
    if kind == "tsv":
        write(folder, **{"a.tsv": "\n".join(lines).encode() + b"\n"})
    elif kind == "jsonl":
        objects = (f'{{"source": "{source}", "target": "{target}"}}\n' for source, target in pairs)
        write(folder, **{"a.jsonl": "".join(objects).encode()})
    else:
        sides = zip(*pairs, strict=True)
        write(
            folder,
            **{f"a.{lang}": "\n".join(side).encode() + b"\n" for lang, side in zip(["en", "de"], sides, strict=True)},
        )
    return {"tsv": "a.tsv", "jsonl": "a.jsonl", "parallel_lines": "a.{lang}"}[kind]


def filtered(folder, kind: str, **filters) -> tuple[list[str], dict[str, int]]:
    name = written(folder, kind, PAIRS)
    cfg = config(kind, name, validation=name, filters=FilterConfig(**filters))
    splits = stream_corpus(cfg, folder)
    for _ in range(2):  # each pass counts from zero
        train = [f"{pair['source']}\t{pair['target']}" for pair in splits.train]
    assert [f"{pair['source']}\t{pair['target']}" for pair in load_corpus(cfg, folder).train] == train
    return train, dict(splits.filters["train"].dropped)


@pytest.mark.parametrize("kind", KINDS)
def test_each_filter_by_hand_for_every_format(kind, tmp_path):
    visible = [PAIRS[number] for number in (0, 1, 4, 5, 6)]
    assert filtered(tmp_path, kind) == (visible, {"blank texts": 2})
    assert filtered(tmp_path, kind, blank_sides=False)[0] == PAIRS
    some = [PAIRS[number] for number in (0, 6)]
    dropped = {"blank texts": 2, "duplicates": 1, "identical sides": 1, "length ratio": 1}
    assert filtered(tmp_path, kind, duplicates=True, identical_sides=True, max_length_ratio=5.0) == (some, dropped)


def test_links_do_not_tell_pairs_apart():
    """Regression test: training examples alone have them, so that none seemed to be in a held-out split."""
    pair = {"source": "a", "target": "b"}
    assert digest_of(pair) == digest_of({**pair, "links": "0-0"}) != digest_of({**pair, "direction": "en-de"})


def test_held_out_examples_are_dropped_for_blank_texts_only(tmp_path):
    name = written(tmp_path, "tsv", PAIRS)
    filters = FilterConfig(duplicates=True, identical_sides=True, max_length_ratio=2)
    corpus = load_corpus(config("tsv", name, validation=name, filters=filters), tmp_path)
    assert (len(corpus.train), len(corpus.validation)) == (2, 5)


def test_a_header_is_no_example_and_names_columns(tmp_path):
    write(tmp_path, **{"a.tsv": b"id\tde\ten\n1\tHaus\thouse\n2\tBaum\ttree\n"})
    cfg = config("tsv", "a.tsv", validation="a.tsv", header=True, fields=("en", "de"))
    splits = stream_corpus(cfg, tmp_path)
    assert list(splits.train) == [{"source": "house", "target": "Haus"}, {"source": "tree", "target": "Baum"}]
    assert splits.filters["train"].dropped == {"header lines": 1}
    (tmp_path / "twice.tsv").write_text("en\tde\tde\na\tb\tc\n")
    with pytest.raises(DataError, match=r"twice\.tsv names two columns 'de': rename one of them"):
        load_corpus(config("tsv", "twice.tsv", header=True, fields=("en", "de")), tmp_path)
    with pytest.raises(DataError, match=r"a\.tsv has no column 'fr', only 'id', 'de', 'en': set data\.fields"):
        load_corpus(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, fields=("en", "fr"))), tmp_path)
    with pytest.raises(UserError, match="column numbers, such as .* without data.header"):
        load_corpus(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, header=False)), tmp_path)


def test_an_empty_file_without_a_header_is_skipped(tmp_path):
    write(tmp_path, **{"a.tsv": b"en\tde\nhouse\tHaus\n", "b.tsv": b""})
    named = {"validation": "a.tsv", "header": True, "fields": ("en", "de")}
    with pytest.raises(DataError, match=r"b\.tsv is empty"):
        load_corpus(config("tsv", "*.tsv", **named), tmp_path)
    corpus = load_corpus(config("tsv", "*.tsv", on_bad_line="skip", **named), tmp_path)
    assert list(corpus.train) == [{"source": "house", "target": "Haus"}]
    assert corpus.left_out["train"]["the file is empty"] == 1


def test_a_header_of_each_of_two_files(tmp_path):
    write(tmp_path, **{"a.en": b"English\none\n", "a.de": b"Deutsch\neins\n"})
    cfg = config("parallel_lines", "a.{lang}", validation="a.{lang}", header=True)
    assert load_corpus(cfg, tmp_path).train == [{"source": "one", "target": "eins"}]


def test_filters_of_sources_without_files_are_refused():
    with pytest.raises(UserError, match="data.filters.duplicates=True: is used only by data.source="):
        DataConfig(filters=FilterConfig(duplicates=True))


SAME = ["a b", "a  b", "a\u00a0b", " a b ", "a\u200b b"]
"""Texts that a model cannot distinguish."""


def test_pairs_are_compared_as_models_read_them(tmp_path):
    pairs = [*((text, "c d") for text in SAME), ("same", "same "), ("x" + 60 * " " + "z", "u v")]
    write(tmp_path, **{"a.tsv": "".join(f"{source}\t{target}\n" for source, target in pairs).encode()})
    rules = FilterConfig(duplicates=True, identical_sides=True, max_length_ratio=3.0)
    for clean, dropped, left in [
        (None, {"duplicates": 4, "identical sides": 1}, 2),
        (False, {"length ratio": 1}, 6),  # every text is then another
    ]:
        cfg = config("tsv", "a.tsv", validation="a.tsv", filters=rules, clean_whitespace=clean)
        splits = stream_corpus(cfg, tmp_path)
        assert len(list(splits.train)) == len(load_corpus(cfg, tmp_path).train) == left
        assert splits.filters["train"].dropped == dropped
