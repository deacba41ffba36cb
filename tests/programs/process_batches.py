"""One of several processes that read batches of prepared data; prints their checksums and the bytes read for them.

python -m tests.programs.process_batches FOLDER COORDINATOR COUNT INDEX [STAGE ...]
"""

import dataclasses
import itertools
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.runs.conftest import small_config
from tformer_jax.config import Config, ParallelConfig
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.rows import ORDER, WHOLE_BATCH, Shards
from tformer_jax.data.stages import stages_begun
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.parallel import multihost, placement
from tformer_jax.runs import experiment

BATCHES = 20
ROWS = 16
KINDS = ("training", "evaluation")
TRANSFORMS = ("typos", "word_swap", {"kind": "concatenation", "max_characters": 200})
"""Of the batches of stages."""


def config() -> Config:
    """Returns the config: packed sentence pairs; each of four devices has a quarter of the rows."""
    cfg = small_config()
    data = dataclasses.replace(cfg.data, batching="packed", window=256, batch_size=ROWS, tokenizer="bytes")
    model = dataclasses.replace(cfg.model, max_length=256)
    mesh = ParallelConfig(data=4, start_seconds=120, lost_seconds=20)
    return dataclasses.replace(cfg, model=model, data=data, parallel=mesh)


def write(folder: Path) -> None:
    """Prepares 6,000 pairs of about 60 bytes per side in `folder`, twice: the copy is another source of stages."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefgh "))
    lines = ["".join(draw.choice(letters, size)) for size in draw.integers(20, 100, 6000)]
    folder.mkdir()
    (folder / "pairs.tsv").write_text("".join(f"{line}.\t{line.upper()}.\n" for line in lines), encoding="utf-8")
    prepare(config(), folder, folder / "prepared", shards=4)
    shutil.copytree(folder / "prepared", folder / "others")


def bytes_read() -> int:
    """Returns the bytes that this process has read so far, by Linux's counter."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


def facts(
    cfg: Config,
    corpus: Corpus,
    tokenizers: Tokenizers,
    shards: Shards = WHOLE_BATCH,
    whole: Callable[[Any], Any] = lambda batch: batch,
) -> dict[str, Any]:
    """Returns, for the first training batches and all of validation, the bytes read and a checksum of each batch.

    Also the numbers of batches after which stages began.

    Args:
        shards: the shards of a batch, and those of this process.
        whole: returns the global batch of a batch with the rows of this process.
    """
    training = train_batches(cfg, corpus, tokenizers, shards=shards)._loader  # without prefetching
    evaluation = evaluation_batches(cfg, corpus.validation, tokenizers, shards=shards)
    actual = dict(
        zip(KINDS, (_read(itertools.islice(training, BATCHES), whole), _read(evaluation, whole)), strict=True)
    )
    return {**actual, "begun": [begun.step for begun in stages_begun(training.get_state())]}


def _read(batches: Iterable[Any], whole: Callable[[Any], Any]) -> dict[str, Any]:
    read, sums, before = 0, [], bytes_read()
    for batch in batches:
        read += bytes_read() - before
        arrays = whole(batch)
        sums.append(zlib.crc32(b"".join(arrays[name].tobytes() for name in sorted(arrays))))
        before = bytes_read()
    return {"bytes": read, "sums": sums}


def main() -> None:
    """Prints a JSON object: the index, the texts of all processes, the number of devices, and `facts`."""
    folder, coordinator, count, index, *stages = sys.argv[1:]
    run = Path(folder) / f"batches_{count}"
    cfg = config()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source="prepared", train=(f"{folder}/prepared",)))
    if stages:
        both = (f"{folder}/prepared", f"{folder}/others")
        staged = dataclasses.replace(cfg.data, train=both, stages=tuple(stages), transforms=TRANSFORMS)
        cfg = dataclasses.replace(cfg, data=staged)
    group = multihost.start(cfg.parallel, run, coordinator, int(count), int(index))
    texts = group.all_gather("\u00e9" * (group.index + 1)), group.broadcast(lambda: f"from {group.index}")
    built = experiment.build(cfg, run, group=group)

    def whole(batch: Any) -> Any:
        batch = {name: rows for name, rows in batch.items() if name != ORDER}
        placed = placement.shard_batch(built.mesh, batch, built.shards.own)
        assert all(len(rows) * group.count == len(placed[name]) for name, rows in batch.items())
        assert all(len(array.addressable_shards) == 4 // group.count for array in placed.values())
        return placement.to_host(placed)

    actual = facts(cfg, built.corpus, built.tokenizers, built.shards, whole)
    built.close()
    print(json.dumps({"index": group.index, "texts": texts, "devices": jax.device_count(), **actual}))


if __name__ == "__main__":
    main()
