"""Translation between many languages: which pairs are read, in which shares, and the tags that tell them apart."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.test_pipeline import assert_restored_exactly, assert_same, assert_shards_of, take
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ConfigError, DataConfig, ModelConfig
from tformer_jax.config.directions import Direction
from tformer_jax.data import order
from tformer_jax.data.corpora import Corpus, DataError, Joined, load_corpus
from tformer_jax.data.mixtures import direction_shares
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.summary import summarize
from tformer_jax.data.tags import tag_ids
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.language_tags import find_language, languages_of
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD

PAIRS = {"en-de": 60, "en-fr": 25, "en-pt_BR": 5}
BUCKETS = {"bucket_lengths": (24,), "batch_tokens": 192, "batch_multiple": 4, "tokenizer": "characters"}
BY_COLUMNS = {"source": "tsv", "language_fields": ("1", "2"), "fields": ("3", "4")}


def write_table(folder: Path) -> None:
    """Writes rows of two languages and two texts; each text names its number."""
    rows = [
        f"en\t{name[3:].replace('_', '-')}\te {n}\t{name[3]} {n}" for name, size in PAIRS.items() for n in range(size)
    ]
    (folder / "train.tsv").write_text("\n".join(rows[::-1]) + "\n")
    (folder / "dev.tsv").write_text("en\tde\te 100\td 100\nde\tfr\td 101\tf 101\n")


def config(**changes) -> Config:
    settings = {**BY_COLUMNS, **BUCKETS, "train": "train.tsv", "validation": "dev.tsv", **changes}
    return Config(model=ModelConfig(max_length=32), data=DataConfig(**settings))


def experiment(folder: Path, **changes) -> tuple[Config, Corpus, Tokenizers]:
    write_table(folder)
    cfg = config(**changes)
    corpus = load_corpus(cfg, folder)
    return cfg, corpus, train_tokenizers(cfg.data, corpus.train, folder)


def texts(examples) -> set[tuple[str, str, str]]:
    return {(example["direction"], example["source"], example["target"]) for example in examples}


def test_rows_with_languages_are_grouped_and_read_in_both_directions(tmp_path):
    _, corpus, _ = experiment(tmp_path, both_directions=True)
    reverses = {"de-en": 60, "fr-en": 25, "pt_BR-en": 5}
    assert corpus.directions == dict(sorted((PAIRS | reverses).items()))
    assert [len({example["direction"] for example in part}) for part in corpus.train.parts] == [1] * 6
    assert {("en-pt_BR", "e 4", "p 4"), ("pt_BR-en", "p 4", "e 4")} <= texts(corpus.train)
    assert texts(corpus.validation) >= {("de-fr", "d 101", "f 101"), ("fr-de", "f 101", "d 101")}


def test_listed_directions_in_their_order_and_zero_shot_ones(tmp_path):
    _, corpus, _ = experiment(tmp_path, directions=("fr-en", "en-de"), zero_shot=("fr-de",))
    assert corpus.directions == {"fr-en": 25, "en-de": 60}
    assert corpus.left_out["train"] == {"examples of other directions": 5}
    assert texts(corpus.validation) == {("en-de", "e 100", "d 100"), ("fr-de", "f 101", "d 101")}


@pytest.mark.parametrize("names", [("en-de", "en-fr", "de-fr"), ("en-de", "en-fr", "de-fr", "fr-de")])
def test_files_of_a_zero_shot_pair_are_read_once_in_both_directions(tmp_path, names):
    for name in names:
        for language in name.split("-"):
            (tmp_path / f"{name}.{language}").write_text(f"{language} 1\n")
    files = dict.fromkeys(("train", "validation"), "{src}-{tgt}.{lang}")
    listed = {"directions": ("en-de", "en-fr"), "both_directions": True, "zero_shot": ("de-fr", "fr-de")}
    rows = {"source": "parallel_lines", "language_fields": (), "fields": ()}
    corpus = load_corpus(config(**rows, **files, **listed), tmp_path)
    assert corpus.directions == dict.fromkeys(("en-de", "de-en", "en-fr", "fr-en"), 1)
    expected = {(name, f"{name[:2]} 1", f"{name[3:]} 1") for name in (*corpus.directions, "de-fr", "fr-de")}
    assert texts(corpus.validation) == expected and len(corpus.validation) == 6


@pytest.mark.parametrize("source", ["tsv", "jsonl", "parquet"])
def test_a_record_with_a_text_in_each_language_is_a_pair_in_each_direction(tmp_path, source):
    """As files of each direction, which have the same texts."""
    records = [{"en": f"e {n}", "de": f"d {n}", "fr": f"f {n}"} for n in range(4)]
    records.append({"en": "e 4", "de": "d 4", "fr": " "})
    fields = ("{src}", "{tgt}") if source == "tsv" else ("translation.{src}", "translation.{tgt}")
    for split, rows in (("train", records), ("dev", records[:2])):
        nested = [{"translation": row} for row in rows]
        if source == "tsv":
            table = "\n".join("\t".join(row.values()) for row in rows)
            (tmp_path / f"{split}.tsv").write_text(f"en\tde\tfr\n{table}\n")
        elif source == "jsonl":
            (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in nested))
        else:
            pq.write_table(pa.Table.from_pylist(nested), tmp_path / f"{split}.parquet")
        for name in ("en-de", "en-fr", "de-fr"):
            pairs = "".join(f"{row[name[:2]]}\t{row[name[3:]]}\n" for row in rows)
            (tmp_path / f"{split}.{name}.txt").write_text(pairs)
    listed = {"directions": ("en-de", "en-fr"), "both_directions": True, "zero_shot": ("de-fr",), "language_fields": ()}
    files = {"source": source, "train": f"train.{source}", "validation": f"dev.{source}", "header": source == "tsv"}
    actual = load_corpus(config(**listed, **files, fields=fields), tmp_path)
    files = {"source": "tsv", "train": "train.{src}-{tgt}.txt", "validation": "dev.{src}-{tgt}.txt", "fields": ()}
    expected = load_corpus(config(**listed, **files), tmp_path)
    assert actual.directions == expected.directions == {"en-de": 5, "de-en": 5, "en-fr": 4, "fr-en": 4}
    assert [*actual.train] == [*expected.train] and [*actual.validation] == [*expected.validation]
    assert actual.left_out["train"]["blank texts"] == expected.left_out["train"]["blank texts"]


def test_fields_with_languages_need_directions():
    with pytest.raises(ConfigError, match=r"data.fields.* has \{src\} or \{tgt\}, which need data.directions"):
        config(language_fields=(), fields=("{src}", "{tgt}"))
    with pytest.raises(ConfigError, match=r"which need data.directions, without data.language_fields"):
        config(directions=("en-de",), fields=("{src}", "{tgt}"))


def test_rows_are_read_in_their_own_direction_where_both_are_listed(tmp_path):
    """By hand. Regression test: all were read backwards, too, without `both_directions`."""
    (tmp_path / "train.tsv").write_text("en\tde\ta\tb\nde\ten\tc\td\nfr\tde\te\tf\n")
    (tmp_path / "dev.tsv").write_text("en\tde\tg\th\nfr\ten\ti\tj\nde\tfr\tk\tl\n")
    listed = {"directions": ("en-de", "de-en", "de-fr"), "zero_shot": ("en-fr", "fr-de")}
    corpus = load_corpus(config(**listed), tmp_path)
    assert texts(corpus.train) == {("en-de", "a", "b"), ("de-en", "c", "d"), ("de-fr", "f", "e")}
    held_out = {("en-de", "g", "h"), ("en-fr", "j", "i"), ("de-fr", "k", "l"), ("fr-de", "l", "k")}
    assert texts(corpus.validation) == held_out
    (tmp_path / "train.tsv").write_text("en\tde\ta\tb\n")
    with pytest.raises(DataError, match="de-en, only en-de: correct it in .*, or set data.both_directions=True"):
        load_corpus(config(directions=("en-de", "de-en")), tmp_path)


def test_reversed_pairs_are_duplicates_of_rows(tmp_path):
    write_table(tmp_path)
    (tmp_path / "train.tsv").write_text("en\tde\ta\tb\nde\ten\tb\ta\nde\ten\tc\td\nen\tde\td\tc\n")
    (tmp_path / "dev.tsv").write_text("en\tde\te\tf\n")
    corpus = load_corpus(config(both_directions=True, filters={"duplicates": True}), tmp_path)
    expected = [("de-en", "b", "a"), ("de-en", "c", "d"), ("en-de", "a", "b"), ("en-de", "d", "c")]
    assert len(corpus.train) == len(expected)
    assert texts(corpus.train) == {*expected}
    assert corpus.left_out["train"] == {"duplicates": 4}


@pytest.mark.parametrize("layout", ["{src}-{tgt}/train.{lang}", "{src}-{tgt}.tsv", "rows.jsonl"])
def test_files_by_language(tmp_path, layout):
    """Files of each pair, and records that name their languages, have the examples of the table."""
    write_table(tmp_path)
    rows = [row.split("\t") for row in (tmp_path / "train.tsv").read_text().splitlines()]
    for name, (source, target) in {pair: pair.split("-") for pair in PAIRS}.items():
        chosen = [row for row in rows if row[1].replace("-", "_") == target]
        (tmp_path / name).mkdir()
        (tmp_path / name / f"train.{source}").write_text("".join(f"{row[2]}\n" for row in chosen))
        (tmp_path / name / f"train.{target}").write_text("".join(f"{row[3]}\n" for row in chosen))
        (tmp_path / f"{name}.tsv").write_text("".join(f"{row[2]}\t{row[3]}\n" for row in chosen))
    records = (json.dumps({"from": row[0], "to": row[1], "source": row[2], "target": row[3]}) for row in rows)
    (tmp_path / "rows.jsonl").write_text("\n".join(records))
    formats = {"{lang}": "parallel_lines", "tsv": "tsv", "jsonl": "jsonl"}
    languages = {"language_fields": ("from", "to")} if layout == "rows.jsonl" else {"language_fields": ()}
    settings = {"source": formats[layout.rpartition(".")[2]], "fields": (), "train": layout, "validation": layout}
    cfg = config(directions=tuple(PAIRS), both_directions=True, **settings, **languages)
    corpus = load_corpus(cfg, tmp_path)
    expected = load_corpus(config(directions=tuple(PAIRS), both_directions=True), tmp_path)
    assert corpus.directions == expected.directions
    assert texts(corpus.train) == texts(expected.train)


@pytest.mark.parametrize("source_tags", [("target",), ("source",), ("target", "source"), ()])
@pytest.mark.parametrize("target_tags", [(), ("target",), ("source", "target")])
def test_tags_are_those_of_an_oracle(tmp_path, source_tags, target_tags):
    """A source starts with its tags; the decoder reads its tags after the start token, and does not predict them."""
    cfg, corpus, tokenizers = experiment(
        tmp_path, both_directions=True, source_tags=source_tags, target_tags=target_tags
    )
    tags = {name: i for i, name in tokenizers.target.special.names}
    (batch,) = evaluation_batches(cfg, corpus.validation, tokenizers)
    rows = batch["order"].tolist()
    for row, example in enumerate(corpus.validation[index] for index in rows):
        languages = dict(zip(("source", "target"), example["direction"].split("-"), strict=True))
        before, forced = ([tags[f"<2{languages[name]}>"] for name in names] for names in (source_tags, target_tags))
        source, target = (tokenizers.target.encode(example[side]) for side in ("source", "target"))
        expected = {
            "source": [*before, *source, EOS],
            "target_in": [BOS, *forced, *target],
            "target_out": [*[IGNORED] * len(forced), *target, EOS],
        }
        for key, ids in expected.items():
            width = batch[key].shape[1]
            np.testing.assert_array_equal(batch[key][row], [*ids, *[PAD] * (width - len(ids))])
    ids = {"source": tags["<2en>"], "target": tags["<2de>"]}
    expected = tuple(tuple(ids[name] for name in names) for names in (source_tags, target_tags))
    assert tag_ids(cfg.data, tokenizers, Direction("en", "de")) == expected


def test_tags_of_batches_may_stand_at_the_end_and_instead_of_the_start(tmp_path):
    """As mBART (2020) has them: `X </s> [source]`, and the decoder starts with `[target]`."""
    cfg, corpus, tokenizers = experiment(tmp_path, source_tags=("source",), target_tags=("target",))
    tokenizers.target.special = dataclasses.replace(tokenizers.target.special, tags_last=True)
    tags, encode = languages_of(tokenizers.target), tokenizers.target.encode
    (batch,) = evaluation_batches(cfg, corpus.validation, tokenizers)
    for row, example in enumerate(corpus.validation[index] for index in batch["order"].tolist()):
        source, target = example["direction"].split("-")
        expected = {
            "source": [*encode(example["source"]), EOS, tags[source]],
            "target_in": [tags[target], *encode(example["target"])],
            "target_out": [*encode(example["target"]), EOS],
        }
        assert {key: batch[key][row][batch[key][row] != PAD].tolist() for key in expected} == expected


def test_pairs_that_fit_without_their_tags_are_dropped(tmp_path):
    """A row has room for 7 characters, a tag and an end."""
    cfg, _, tokenizers = experiment(tmp_path, bucket_lengths=(9,), batch_multiple=1, batch_tokens=9)
    fits, long = ({"source": "e" * size, "target": "d", "direction": "en-de"} for size in (7, 8))
    batches = train_batches(cfg, Corpus(Joined([[fits, long]]), [], [], directions={"en-de": 2}), tokenizers)
    assert {int((batch["source"] != PAD).sum()) for batch in take(batches, 6)} == {9}


def test_letters_of_a_tag_stay_text_and_tags_are_never_generated(tmp_path):
    _, _, tokenizers = experiment(tmp_path)
    assert list(languages_of(tokenizers.target)) == ["de", "en", "fr", "pt_BR"]
    tags = {*languages_of(tokenizers.target).values()}
    assert tags <= {*tokenizers.target.special.suppressed}
    assert not tags & {*tokenizers.target.encode("<2de> e")}
    restored = Tokenizers.from_json(tokenizers.to_json())
    assert restored.target.special == tokenizers.target.special


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("de", "de"),
        ("deu", "de"),
        ("German", "de"),
        (" de\u00a0", "de"),
        ("pt-BR", "pt_BR"),
        ("pt", "pt_BR"),
        ("Brazilian Portuguese", "pt_BR"),
    ],
)
def test_a_language_is_named_in_many_ways(tmp_path, name, meant):
    _, _, tokenizers = experiment(tmp_path)
    assert find_language(tokenizers.target, name) == meant


@pytest.mark.parametrize(
    ("name", "sentence"), [("it", "'it'; it has de, en, fr, pt_BR"), ("pt_PT", "did you mean 'pt_BR'")]
)
def test_a_language_that_the_model_does_not_have(tmp_path, name, sentence):
    _, _, tokenizers = experiment(tmp_path)
    with pytest.raises(UserError, match=sentence):
        find_language(tokenizers.target, name)


@pytest.mark.slow
def test_a_million_draws_have_their_shares():
    """After every draw, each of 40 directions has its share of them, up to about one."""
    sizes = [max(7, 1000 // number) for number in range(1, 41)]
    shares = direction_shares(sizes, 5.0)
    blocks = order.index_blocks(sizes, tuple(shares.tolist()), 0, 50_000)
    ends, counts = np.cumsum(sizes), np.zeros(40)
    for number in range(20):
        counts += np.bincount(np.searchsorted(ends, blocks[number], side="right"), minlength=40)
        assert np.abs(counts - shares * 50_000 * (number + 1)).max() < 2
    assert counts.sum() == 10**6


def test_shares_by_temperature_by_hand():
    np.testing.assert_allclose(direction_shares([900, 100], 2.0), [0.75, 0.25])
    np.testing.assert_allclose(direction_shares([900, 100], 1.0), [0.9, 0.1])
    np.testing.assert_allclose(direction_shares([900, 100], 2.0, 1.5), [0.85, 0.15])
    np.testing.assert_allclose(direction_shares([900, 100], 9.0, 1.0), [0.9, 0.1])


@pytest.mark.parametrize("upsampling", [1.2, 2.0, 5.0])
def test_limited_shares_are_those_of_an_exhaustive_search(upsampling):
    """The limited shares are min(c * n^(1/T), limit), with the c for which they sum to 1."""
    sizes = np.array([500, 90, 60, 8, 2])
    data, scaled = sizes / sizes.sum(), sizes ** (1 / 3)
    scales = np.linspace(0, 2, 2_000_001)
    sums = sum(np.minimum(scales * each, upsampling * share) for each, share in zip(scaled, data, strict=True))
    scale = scales[np.abs(sums - 1).argmin()]
    expected = np.minimum(scale * scaled, upsampling * data)
    np.testing.assert_allclose(direction_shares(sizes, 3.0, upsampling), expected, atol=1e-5)


def test_a_mixture_with_temperature_is_restored_exactly_and_is_the_same_for_all_processes(tmp_path):
    arguments = experiment(tmp_path, both_directions=True, temperature=3.0, upsampling=4.0)
    assert_restored_exactly(arguments, batches=12, points=4)
    assert_shards_of(arguments, take(train_batches(*arguments), 12))


def test_prepared_pairs_have_the_batches_of_their_texts(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path, both_directions=True, temperature=3.0)
    prepare(cfg, tmp_path, tmp_path / "prepared")
    data = dataclasses.replace(cfg.data, source="prepared", train=str(tmp_path / "prepared"), validation=())
    stored = dataclasses.replace(cfg, data=data)
    loaded = load_corpus(stored, None)
    assert loaded.directions == corpus.directions
    assert list(loaded.validation) == list(corpus.validation)
    assert_same(take(train_batches(stored, loaded, tokenizers), 12), take(train_batches(cfg, corpus, tokenizers), 12))
    twice = dataclasses.replace(stored, data=dataclasses.replace(data, train=(str(tmp_path / "prepared"),) * 2))
    assert load_corpus(twice, None).directions == {name: 2 * size for name, size in corpus.directions.items()}
    other = dataclasses.replace(stored, data=dataclasses.replace(data, both_directions=False))
    with pytest.raises(DataError, match="was prepared with data.both_directions=True"):
        load_corpus(other, None)


def test_prepared_folders_of_single_directions_are_one_corpus_of_all(tmp_path):
    """Regression test: each folder asked for `data.directions` of its own, so that no value fitted two of them."""
    cfg, corpus, tokenizers = experiment(tmp_path, directions=("en-de", "en-fr"), both_directions=True, temperature=3.0)
    folders = [str(tmp_path / name) for name in ("de", "fr")]
    for folder, name in zip(folders, cfg.data.directions, strict=True):
        one = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, directions=(name,)))
        (tmp_path / "dev.tsv").write_text(f"en\t{name[3:]}\ta\tb\n")
        prepare(one, tmp_path, Path(folder), tokenizers=tokenizers)

    def stored(directions, train):
        changes = {"source": "prepared", "train": tuple(train), "validation": (), "directions": directions}
        return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **changes))

    both = stored(("en-de", "en-fr"), folders)
    loaded = load_corpus(both, None)
    assert loaded.directions == corpus.directions
    assert_same(take(train_batches(both, loaded, tokenizers), 12), take(train_batches(cfg, corpus, tokenizers), 12))
    for directions in (("en-de",), ("en-fr", "en-de")):
        with pytest.raises(DataError, match=r"de and .*fr were prepared with .*: write \['en-de', 'en-fr'\]"):
            load_corpus(stored(directions, folders), None)
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("en\tde\ta\tb\n")
    prepare(config(both_directions=True), tmp_path, tmp_path / "any", tokenizers=tokenizers)
    with pytest.raises(DataError, match="any was prepared without data.directions, and others with"):
        load_corpus(stored(("en-de",), [folders[0], str(tmp_path / "any")]), None)


def test_the_summary_shows_directions(tmp_path):
    cfg, corpus, tokenizers = experiment(tmp_path, temperature=1e6)
    parts = summarize(cfg, corpus, tokenizers)["train"].parts
    assert [(part["name"], part["size"]) for part in parts] == list(PAIRS.items())
    np.testing.assert_allclose([part["examples"] for part in parts], [1 / 3] * 3, rtol=1e-4)
    draws = cfg.train.steps * 8  # 8 rows of 24 in 192 tokens
    np.testing.assert_allclose([part["epochs"] * part["size"] for part in parts], [draws / 3] * 3, rtol=1e-3)
