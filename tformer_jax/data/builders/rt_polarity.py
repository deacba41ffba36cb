"""Sentence polarity v1.0: positive and negative sentences of film reviews ("Seeing Stars", 2005)."""

import tarfile
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from tformer_jax.data.builders.manual import read_pinned

URL = "https://www.cs.cornell.edu/people/pabo/movie-review-data/rt-polaritydata.tar.gz"
LABELS = ("negative", "positive")
CHECKSUMS = {
    "train": "10d34a59a4aead6e3fcc65210afd77e2d5adb8d814b0c962bfce4d3bb1f514b3",
    "dev": "ab0835ac441fc52b819d51aaadd1d22d242a1d5278da1a1a72b189581f881dfc",
}


class RtPolarity(tfds.core.GeneratorBasedBuilder):
    """`rt_polarity/original` is the published archive, in one split; `rt_polarity/split` has train and validation."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012 -- TFDS's convention
        tfds.core.BuilderConfig(name="original", description="all 10,662 sentences in one split"),
        tfds.core.BuilderConfig(name="split", description="8,509 sentences for training and 1,081 held out"),
    ]
    MANUAL_DOWNLOAD_INSTRUCTIONS = "rt_polarity/split: put train.tsv and dev.tsv there, label (0 or 1)<tab>sentence."

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Sentences of film reviews, half of them positive.",
            homepage="https://www.cs.cornell.edu/people/pabo/movie-review-data/",
            features=tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=list(LABELS))}
            ),
            supervised_keys=("text", "label"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        if self.builder_config.name == "original":
            return {"train": self._generate_examples(_read_archive(dl_manager.download(URL)))}
        folder = dl_manager.manual_dir
        return {
            split: self._generate_examples(_parse_tsv(read_pinned(folder, f"{name}.tsv", CHECKSUMS[name])))
            for split, name in (("train", "train"), ("validation", "dev"))
        }

    def _generate_examples(self, labeled: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (label, text) in enumerate(labeled):
            yield number, {"text": text, "label": label}


def _read_archive(path: Any) -> Iterator[tuple[int, str]]:
    with tarfile.open(path) as archive:
        for label, name in enumerate(("rt-polaritydata/rt-polarity.neg", "rt-polaritydata/rt-polarity.pos")):
            file = archive.extractfile(name)
            assert file is not None
            text = file.read().decode("cp1252", "replace")
            for line in text.split("\n")[:-1]:
                yield label, line.strip()


def _parse_tsv(text: str) -> Iterator[tuple[int, str]]:
    for line in text.split("\n")[:-1]:
        label, _, sentence = line.partition("\t")
        yield int(label), sentence
