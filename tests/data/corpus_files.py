"""Small corpora in files, and configs that read them, for tests of file formats."""

from pathlib import Path

import pyarrow as pa

from tformer_jax.config import Config, DataConfig, ModelConfig


def config(source: str, train, family: str = "seq2seq", **changes) -> Config:
    batching = "windows" if family == "decoder_lm" else "buckets"
    data = DataConfig(source=source, train=train, batching=batching, **changes)
    return Config(model=ModelConfig(family=family), data=data)


def write(folder: Path, **files: bytes) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()
