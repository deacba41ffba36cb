"""Multi30k, task 1: image captions in English, German and French ("Multi30K", 2016)."""

import gzip
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

HOME = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
LANGUAGES = ("en", "de", "fr")
FILES = {"train": "train", "validation": "val", "test": "test_2016_flickr"}


class Multi30k(tfds.core.GeneratorBasedBuilder):
    """Captions in three languages; a translation pair is two fields of a record."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Captions of Flickr30K images in three languages, for research and education.",
            homepage="https://github.com/multi30k/dataset",
            features=tfds.features.FeaturesDict({language: tfds.features.Text() for language in LANGUAGES}),
            supervised_keys=("en", "de"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        urls = {
            split: {language: f"{HOME}/{name}.{language}.gz" for language in LANGUAGES} for split, name in FILES.items()
        }
        return {split: self._generate_examples(paths) for split, paths in dl_manager.download(urls).items()}

    def _generate_examples(self, paths: dict[str, Any]) -> Iterator[tuple[int, dict[str, str]]]:
        texts = [gzip.decompress(paths[language].read_bytes()).decode().split("\n")[:-1] for language in LANGUAGES]
        for number, sentences in enumerate(zip(*texts, strict=True)):
            yield number, dict(zip(LANGUAGES, sentences, strict=True))
