"""Small corpora in files, and configs that read them, for tests of file formats."""

import functools
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


def compress(content: bytes, compression: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, compression) as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


zstd, lz4 = (functools.partial(compress, compression=name) for name in ("zstd", "lz4"))
