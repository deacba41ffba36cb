"""TFDS datasets, offline: existing ones on mock data, one prepared by TFDS, and the builders of this project."""

import gzip
import http.server
import shutil
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource
from tensorflow_datasets.core.data_sources.base import BaseDataSource

from tests.data.corpus_files import config as files_config
from tests.data.corpus_files import write
from tests.data.test_pipeline import assert_restored_exactly
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, FilterConfig, ModelConfig
from tformer_jax.data.builders import enwik8, multi30k, rt_polarity, tatoeba_en_zh
from tformer_jax.data.corpora import DataError, load_corpus, stream_corpus
from tformer_jax.data.corpora import tfds as source
from tformer_jax.data.prepare import origin
from tformer_jax.data.tokenizers.training import train_tokenizers

PAIRS = [("one", "eins"), ("two", "zwei"), ("three ü", "drei"), ("four", "vier")] * 10


class TinyPairs(tfds.core.GeneratorBasedBuilder):
    """A dataset that TFDS prepares in the test."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        texts = {"en": tfds.features.Text(), "de": tfds.features.Text()}
        label = {"label": tfds.features.ClassLabel(names=["even", "odd"])}
        others = {"words": tfds.features.Sequence(tfds.features.Text()), "number": tfds.features.Scalar(np.int64)}
        features = tfds.features.FeaturesDict(texts | label | others)
        return self.dataset_info_from_configs(features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number, (en, de) in enumerate(PAIRS):
            yield number, {"en": en, "de": de, "label": number % 2, "words": en.split(), "number": number}


class SortedPairs(TinyPairs):
    """The same pairs, with the even ones first."""

    def _generate_examples(self):
        records = sorted((record for _, record in super()._generate_examples()), key=lambda record: record["label"])
        return enumerate(records)


def config(dataset: str, family: str = "seq2seq", train="train", **changes) -> Config:
    data = {"batching": "windows"} if family == "decoder_lm" else {}
    data = {"source": "tfds", "dataset": dataset, "train": train, "tokenizer": "bytes"} | data | changes
    return Config(model=ModelConfig(family=family), data=DataConfig(**data))


@pytest.mark.parametrize(
    ("dataset", "family", "keys"),
    [
        ("wmt14_translate/de-en", "seq2seq", {"source", "target"}),
        ("wmt16_translate/de-en", "seq2seq", {"source", "target"}),
        ("lm1b", "decoder_lm", {"text"}),
        ("tiny_shakespeare", "decoder_lm", {"text"}),
        ("wikipedia/20230601.en", "decoder_lm", {"text"}),
        ("imdb_reviews", "classifier", {"text", "label"}),
        ("glue/sst2", "classifier", {"text", "label"}),
    ],
)
def test_named_datasets_on_mock_data(dataset, family, keys, tmp_path, monkeypatch):
    one_by_one = lambda records, indices: [records[index] for index in indices]  # noqa: E731
    monkeypatch.setattr(BaseDataSource, "__getitems__", one_by_one)  # the mock's lacks an argument
    with tfds.testing.mock_data(num_examples=10):
        corpus = load_corpus(config(dataset, family), tmp_path)
    assert len(corpus.train) + len(corpus.validation) == 10
    for example in (*corpus.train[:3], *corpus.validation[:]):
        assert set(example) == keys
        assert all(isinstance(value, str) and value for value in example.values())
        assert "label" not in keys or example["label"] in corpus.labels


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    for name in ("tiny_pairs", "nested_pairs"):
        source.download(config(name), folder)
    return folder


def test_what_tfds_prepared_is_read_as_it_stands(data_dir):
    corpus = load_corpus(config("tiny_pairs", train="train[:75%]", validation="train[75%:]"), data_dir)
    assert [(e["source"], e["target"]) for e in (*corpus.train[:], *corpus.validation[:])] == PAIRS
    assert len(corpus.train) == 30
    classified = load_corpus(config("tiny_pairs", "classifier", fields=("en", "label")), data_dir)
    assert classified.train[3] == {"text": "four", "label": "odd"}
    assert classified.labels == ("even", "odd")


class UncleanPairs(TinyPairs):
    """Pairs that filters drop, among others."""

    PAIRS = (
        *(("a", "a"), ("one", "eins"), ("\u200b", "b"), ("one", "eins")),
        *(("long long long", "x"), ("c", " "), ("two", "zwei")),
    )

    def _generate_examples(self):
        for number, (en, de) in enumerate(self.PAIRS * 2):
            yield number, {"en": en, "de": de, "label": number % 2, "words": [], "number": number}


def test_filters_drop_what_they_drop_of_files_and_count_it(tmp_path, monkeypatch):
    """The oracle is the TSV file with the same pairs."""
    monkeypatch.setenv("TFORMER_CACHE_DIR", str(tmp_path / "cache"))
    source.download(config("unclean_pairs"), tmp_path)
    write(tmp_path, **{"pairs.tsv": "".join(f"{en}\t{de}\n" for en, de in UncleanPairs.PAIRS * 2).encode()})
    drops = FilterConfig(duplicates=True, identical_sides=True, max_length_ratio=5)
    for filters in (FilterConfig(), FilterConfig(blank_sides=False), drops):
        files = load_corpus(files_config("tsv", "pairs.tsv", filters=filters, validation_fraction=0.3), tmp_path)
        for _ in range(2):  # the second time from the cache
            corpus = load_corpus(config("unclean_pairs", filters=filters, validation_fraction=0.3), tmp_path)
            assert (corpus.train[:], corpus.validation[:]) == (files.train, files.validation)
            assert dict(corpus.left_out["train"]) == files.left_out["train"]
    assert corpus.left_out["train"] == {"blank texts": 4, "identical sides": 2, "length ratio": 2, "duplicates": 4}
    splits = stream_corpus(config("unclean_pairs", filters=drops, validation="train[:4]"), tmp_path)
    assert (len(splits.validation), splits.left_out["validation"]) == (3, {"blank texts": 1})
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 4
    with pytest.raises(DataError, match="split validation has no valid example; dropped: 1 blank texts"):
        load_corpus(config("unclean_pairs", validation="train[2:3]"), tmp_path)


def test_several_splits_follow_each_other(data_dir):
    corpus = load_corpus(config("tiny_pairs", train=("train[:3]", "train[5:7]"), validation="train[7:8]"), data_dir)
    assert [(e["source"], e["target"]) for e in corpus.train[:]] == [*PAIRS[:3], *PAIRS[5:7]]


def test_a_mixture_keeps_its_parts(data_dir):
    cfg = config("tiny_pairs", train=("train[:3]", "train[5:7]"), weights=(1, 3), validation="train[7:9]")
    corpus = load_corpus(cfg, data_dir)
    assert corpus.train.sizes == [3, 2]
    assert [(e["source"], e["target"]) for e in corpus.train[:]] == [*PAIRS[:3], *PAIRS[5:7]]


def test_a_part_that_is_not_worth_holding_out(data_dir):
    cfg = config("sorted_pairs", "classifier", fields=("en", "label"), validation_fraction=0.5)
    source.download(cfg, data_dir)
    with pytest.raises(DataError, match="the last 20 examples of data.train, .*, all have the label 'odd': shuffle"):
        load_corpus(cfg, data_dir)
    with pytest.raises(DataError, match=r"train\[:1\] is too short to hold out data.validation_fraction=0.1 of it"):
        load_corpus(config("tiny_pairs", train="train[:1]"), data_dir)


@pytest.mark.long
def test_restored_exactly(data_dir):
    cfg = config("tiny_pairs", bucket_lengths=(12,), batch_tokens=48, batch_multiple=4)
    corpus = load_corpus(cfg, data_dir)
    tokenizers = train_tokenizers(cfg.data, corpus.train)
    assert_restored_exactly((cfg, corpus, tokenizers), batches=20, points=20)


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        (config("no_such_dataset"), "data.dataset='no_such_dataset': .*not found"),
        (config("tiny_pairs", train="test"), "tiny_pairs has no split 'test'; it has train"),
        (config("tiny_pairs", source_language="fr"), "tiny_pairs has no field 'fr', only .*: set data.fields"),
        (config("tiny_pairs", "decoder_lm"), "has no field 'text'"),
        (config("tiny_pairs", "classifier", fields=("en", "words")), "field 'words' of tiny_pairs is no label: set"),
        (config("tiny_pairs", train="train[9:5]"), r"split 'train\[9:5\]' of tiny_pairs has no example: name a larger"),
        (config("tiny_pairs", train="train[50:]"), r"it has train \(Requested slice \[50:40\] incompatible"),
        (config("tiny_pairs/other"), "data.dataset='tiny_pairs/other': .*not found.*; .*tiny_pairs has 1.0.0"),
        (config("tiny_pairs", fields=("en", "pair.fr")), "tiny_pairs has no field 'pair.fr', only"),
        (config("tiny_pairs", fields=("words", "de")), "field 'words' is list, not text: set data.fields"),
        (config("tiny_pairs", "decoder_lm", fields=("number",)), "field 'number' is int, not text: set data.fields"),
        (
            config("tiny_pairs", train="train[:0]"),
            r"split 'train\[:0\]' of tiny_pairs has no example: name a larger",
        ),
        (config("tiny_pairs", validation="train[40:]"), r"split 'train\[40:\]' of tiny_pairs has no example"),
        (config("imdb_reviews", "classifier"), "is not prepared as array_record in .*prepare_data.py --download"),
    ],
)
def test_mistakes(cfg, sentence, data_dir):
    with pytest.raises(DataError, match=sentence) as caught:
        load_corpus(cfg, data_dir).train[:1]
    assert "\n" not in str(caught.value)


class NestedPairs(tfds.core.GeneratorBasedBuilder):
    """Pairs within a feature, with labels of two types."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        pair = {name: tfds.features.Text() for name in ("en", "de")}
        labels = {"named": tfds.features.ClassLabel(names=["even ", "very  odd"]), "number": np.int64}
        features = tfds.features.FeaturesDict({"pair": pair, **labels})
        return self.dataset_info_from_configs(features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number, (en, de) in enumerate(PAIRS):
            yield number, {"pair": {"en": en, "de": de}, "named": number % 2, "number": number % 3}


def test_fields_within_others_and_labels_of_all_types(data_dir):
    corpus = load_corpus(config("nested_pairs", fields=("pair.en", "pair.de")), data_dir)
    assert [(e["source"], e["target"]) for e in (*corpus.train[:], *corpus.validation[:])] == PAIRS
    expected = {"named": ("even", "very odd"), "number": ("0", "1", "2")}
    for field, labels in expected.items():
        corpus = load_corpus(config("nested_pairs", "classifier", fields=("pair.en", field)), data_dir)
        assert corpus.labels == labels
        examples = [*corpus.train[:], *corpus.validation[:]]
        assert [e["label"] for e in examples] == [labels[number % len(labels)] for number in range(len(PAIRS))]


def test_prepared_data_knows_the_files_of_its_dataset(data_dir):
    """Regression test: prepare_data.py --resume took changed records for the prepared ones."""
    cfg = config("nested_pairs", fields=("pair.en", "pair.de"), validation="train[:5]")
    files = origin(cfg, data_dir, None, 1)["files"]
    folder = data_dir / "nested_pairs/1.0.0"
    assert {*files} == {
        f"nested_pairs/1.0.0/{path.name}" for path in folder.iterdir() if "array_record" in path.name
    } | {"nested_pairs/1.0.0/dataset_info.json"}


class HeldOutCodes(tfds.core.GeneratorBasedBuilder):
    """Pairs of English and German, whose held-out ones have the codes of ISO 639-3."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        texts = {name: tfds.features.Text() for name in ("source", "target", "from", "to")}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(texts), disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples("en", "de"), "test": self._generate_examples("eng", "deu")}

    def _generate_examples(self, source_language, target_language):
        languages = {"from": source_language, "to": target_language}
        for number, (source_text, target_text) in enumerate(PAIRS[:4]):
            yield number, {"source": source_text, "target": target_text, **languages}


def test_other_codes_of_held_out_pairs_are_refused(tmp_path):
    columns = {"fields": ("source", "target"), "language_fields": ("from", "to")}
    source.download(config("held_out_codes", validation="train", **columns), tmp_path)
    load_corpus(config("held_out_codes", validation="train", **columns), tmp_path)
    for split in ({"validation": "test"}, {"validation": "train", "test": "test"}):
        with pytest.raises(
            DataError, match=r"data\.(validation|test) has the language 'eng', which is 'en' in another"
        ):
            load_corpus(config("held_out_codes", **columns, **split), tmp_path)


def test_fields_of_several_directions_are_refused():
    """Regression test: each direction got the same source and target."""
    with pytest.raises(UserError, match="data.fields=.*: names one pair of fields for several directions"):
        config("tiny_pairs", validation="test", fields=("en", "de"), directions=("en-de", "de-en"))


class Files:
    """A fake download manager that returns a file in a folder for each URL."""

    def __init__(self, folder: Path):
        self.folder = self.manual_dir = folder

    def download(self, urls):
        if isinstance(urls, dict):
            return {key: self.download(url) for key, url in urls.items()}
        return self.folder / urls.rsplit("/", 1)[-1]


def generated(builder, folder: Path) -> dict:
    """Returns the records that a builder generates for each split."""
    return {name: [record for _, record in split] for name, split in builder._split_generators(Files(folder)).items()}


def test_enwik8_is_split_at_characters(tmp_path):
    text = "äöü€ " * 4000
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", text)
    actual = generated(enwik8.Enwik8(data_dir=tmp_path), tmp_path)
    pieces = {name: b"".join(record["text"] for record in split).decode() for name, split in actual.items()}
    assert "".join(pieces.values()) == text
    size = len(text.encode())
    assert [round(len(piece.encode()) / size, 3) for piece in pieces.values()] == [0.9, 0.05, 0.05]


def test_multi30k_pairs_lines_by_number(tmp_path):
    for name in multi30k.FILES.values():
        for language in multi30k.LANGUAGES:
            (tmp_path / f"{name}.{language}.gz").write_bytes(gzip.compress(f"{name} {language}\nzweite\n".encode()))
    actual = generated(multi30k.Multi30k(data_dir=tmp_path), tmp_path)
    assert actual["validation"] == [
        {"en": "val en", "de": "val de", "fr": "val fr"},
        {"en": "zweite", "de": "zweite", "fr": "zweite"},
    ]


@pytest.mark.parametrize(
    "builder", [enwik8.Enwik8, multi30k.Multi30k, rt_polarity.RtPolarity, tatoeba_en_zh.TatoebaEnZh]
)
def test_records_are_prepared_in_the_order_of_the_corpus(builder, tmp_path):
    assert builder(data_dir=tmp_path).info.disable_shuffling


def test_text_that_is_not_utf8_is_named():
    records = source.TfdsRecords([{"en": b"a"}, {"en": b"caf\xe9"}], {"text": "en"}, None)
    assert records[0] == {"text": "a"}
    with pytest.raises(DataError, match="example 1 is not valid UTF-8"):
        records[1]


def test_a_damaged_file_is_named(tmp_path):
    """Regression test: an error of array_record ended the run."""
    (tmp_path / "records").write_bytes(b"cut")
    records = source.TfdsRecords(ArrayRecordDataSource([f"{tmp_path}/records[0:2]"]), {"text": "text"}, None)
    for index in (0, slice(2)):
        with pytest.raises(DataError, match="a file of the dataset is damaged .*: build the dataset again"):
            records[index]


@pytest.mark.parametrize("content", [b'{"name": "nested', b"\xff"])
def test_a_damaged_description_is_named(content, data_dir, tmp_path):
    """Regression test: an error of protobuf ended the command."""
    shutil.copytree(data_dir / "nested_pairs", tmp_path / "nested_pairs")
    (tmp_path / "nested_pairs/1.0.0/dataset_info.json").write_bytes(content)
    with pytest.raises(DataError, match="'nested_pairs': its dataset_info.json is damaged .*: build the dataset again"):
        load_corpus(config("nested_pairs", fields=("pair.en", "pair.de"), validation="train[:5]"), tmp_path)


def test_a_failed_download_is_named(tmp_path, monkeypatch):
    class Missing(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Missing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(multi30k, "HOME", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(DataError, match="cannot be prepared: Failed to get url .*HTTP code: 404"):
            source.download(config("multi30k"), tmp_path)
        server.shutdown()


def test_a_file_with_another_checksum_is_refused(tmp_path):
    (tmp_path / "manual").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "manual" / name).write_text("1\tnot the published file\n")
    cfg = config("rt_polarity/split", "classifier")
    with pytest.raises(DataError, match=r"rt_polarity/split cannot be prepared: .*train.tsv has the SHA-256 \w+, not"):
        source.download(cfg, tmp_path / "data", tmp_path / "manual")


def test_the_published_archive_of_rt_polarity(tmp_path):
    import io
    import tarfile

    with tarfile.open(tmp_path / "rt-polaritydata.tar.gz", "w:gz") as archive:
        for name, text in (("neg", "dull \u2026 caf\xe9 \n"), ("pos", "lovely \n")):
            raw = text.encode("cp1252")
            member = tarfile.TarInfo(f"rt-polaritydata/rt-polarity.{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    actual = generated(rt_polarity.RtPolarity(config="original", data_dir=tmp_path), tmp_path)
    assert actual["train"] == [
        {"text": "dull … café", "label": 0},
        {"text": "lovely", "label": 1},
    ]


def test_a_pair_may_contain_a_separator_that_ends_no_line():
    builder = tatoeba_en_zh.TatoebaEnZh.__new__(tatoeba_en_zh.TatoebaEnZh)
    pairs = [pair for _, pair in builder._generate_examples("a\u2028b\tc\x85\nd\te\n")]
    assert pairs == [{"en": "a\u2028b", "zh": "c\x85"}, {"en": "d", "zh": "e"}]
