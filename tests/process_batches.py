"""One of several processes that make the first batches of prepared data; prints them and the bytes read for them.

python -m tests.process_batches FOLDER COORDINATOR COUNT INDEX
"""

import dataclasses
import json
import sys
import zlib
from pathlib import Path

import jax
import numpy as np

from tests.train.conftest import small_config
from tformer_jax.config import Config, ParallelConfig
from tformer_jax.data.prepare import prepare
from tformer_jax.parallel import multihost, placement
from tformer_jax.train import experiment

BATCHES = 20
ROWS = 16


def config() -> Config:
    """Returns the config: packed sentence pairs; each of four devices has a quarter of the rows."""
    cfg = small_config()
    data = dataclasses.replace(cfg.data, batching="packed", window=256, batch_size=ROWS, tokenizer="bytes")
    model = dataclasses.replace(cfg.model, max_length=256)
    mesh = ParallelConfig(data=4, start_seconds=120, lost_seconds=20)
    return dataclasses.replace(cfg, model=model, data=data, parallel=mesh)


def write(folder: Path) -> None:
    """Prepares 6,000 pairs of about 60 bytes per side in `folder`."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefgh "))
    lines = ["".join(draw.choice(letters, size)) for size in draw.integers(20, 100, 6000)]
    folder.mkdir()
    (folder / "pairs.tsv").write_text("".join(f"{line}.\t{line.upper()}.\n" for line in lines), encoding="utf-8")
    prepare(config(), folder, folder / "prepared", shards=4)


def bytes_read() -> int:
    """Returns the bytes that this process has read so far, by Linux's counter."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


def main() -> None:
    """Prints a JSON object: the index, the texts of all processes, the bytes read, and a checksum of each batch."""
    folder, coordinator, count, index = sys.argv[1:]
    run = Path(folder) / f"batches_{count}"
    cfg = config()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source="prepared", train=(f"{folder}/prepared",)))
    group = multihost.start(cfg.parallel, run, coordinator, int(count), int(index))
    texts = group.all_gather("\u00e9" * (group.index + 1)), group.broadcast(lambda: f"from {group.index}")
    built = experiment.build(cfg, run, group=group)
    batches = built.batches._batches  # without prefetching
    read, sums = 0, []
    for _ in range(BATCHES):
        before = bytes_read()
        batch = next(batches)
        read += bytes_read() - before
        placed = placement.shard_batch(built.mesh, batch, built.shards.own)
        assert all(len(rows) == ROWS // group.count for rows in batch.values())
        assert all(len(array.addressable_shards) == 4 // group.count for array in placed.values())
        whole = placement.to_host(placed)
        sums.append(zlib.crc32(b"".join(whole[name].tobytes() for name in sorted(whole))))
    built.close()
    print(
        json.dumps({"index": group.index, "texts": texts, "devices": jax.device_count(), "bytes": read, "sums": sums})
    )


if __name__ == "__main__":
    main()
