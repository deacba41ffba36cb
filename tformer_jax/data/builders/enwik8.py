"""enwik8: the first 100,000,000 bytes of the English Wikipedia of 2006, with the usual split 90/5/5 million bytes."""

import zipfile
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

URL = "http://mattmahoney.net/dc/enwik8.zip"
STARTS = {"train": 0.0, "validation": 0.90, "test": 0.95}
PIECE = 100_000
"""Approximate number of bytes per record."""


class Enwik8(tfds.core.GeneratorBasedBuilder):
    """Consecutive pieces of `PIECE` bytes, each extended to the next character boundary (at most three bytes)."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="The Hutter Prize's file, for byte-level language models.",
            homepage="http://mattmahoney.net/dc/textdata.html",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        with zipfile.ZipFile(dl_manager.download(URL)) as archive:
            raw = archive.read("enwik8")
        edges = [_character_start(raw, round(share * len(raw))) for share in STARTS.values()] + [len(raw)]
        return {
            split: self._generate_examples(raw[start:stop])
            for split, start, stop in zip(STARTS, edges, edges[1:], strict=False)
        }

    def _generate_examples(self, raw: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
        start = 0
        while start < len(raw):
            stop = _character_start(raw, start + PIECE)
            yield start, {"text": raw[start:stop]}
            start = stop


def _character_start(raw: bytes, index: int) -> int:
    """Returns the index of the first byte, from `index` on, that starts a UTF-8 character."""
    while index < len(raw) and raw[index] & 0xC0 == 0x80:
        index += 1
    return min(index, len(raw))
