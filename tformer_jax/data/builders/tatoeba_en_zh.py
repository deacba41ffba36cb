"""English and Chinese sentence pairs of tatoeba.org, through manythings.org."""

from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from tformer_jax.data.builders.manual import read_pinned

CHECKSUMS = {
    "train": "eaba401c1f52d2f7e6eff38937f31a03e6caf90b789f4541a4b16c7f9a96fc2f",
    "dev": "2fbac8994506526afaf3e1d10c0c5b2ad3995752fc421141b8e8e0dd37b52d23",
}


class TatoebaEnZh(tfds.core.GeneratorBasedBuilder):
    """Sentence pairs; no English sentence is in both splits."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Put train.tsv (21,518 lines) and dev.tsv (1,272 lines) of English<tab>Chinese there. The source, "
        "manythings.org/anki/cmn-eng.zip, grows with time; the checksums are those of this project's splits."
    )

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Sentence pairs of tatoeba.org (CC-BY 2.0 FR), simplified and traditional Chinese mixed.",
            homepage="https://www.manythings.org/anki/",
            features=tfds.features.FeaturesDict({"en": tfds.features.Text(), "zh": tfds.features.Text()}),
            supervised_keys=("en", "zh"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        folder = dl_manager.manual_dir
        return {
            split: self._generate_examples(read_pinned(folder, f"{name}.tsv", CHECKSUMS[name]))
            for split, name in (("train", "train"), ("validation", "dev"))
        }

    def _generate_examples(self, text: str) -> Iterator[tuple[int, dict[str, str]]]:
        for number, line in enumerate(text.split("\n")[:-1]):
            yield number, dict(zip(("en", "zh"), line.split("\t"), strict=True))
