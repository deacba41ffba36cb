"""Reads blocks of examples in order, on demand or ahead of time in processes, with one state for both."""

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from tformer_jax.base.workarounds import mark_absl_flags_as_parsed

if TYPE_CHECKING:
    from tformer_jax.data.stages import StagedOrder

PREFETCHED_BLOCKS = 8


class LoadedBlocks(grain.IterDataset):
    """The blocks in order, read on demand or ahead of time by `workers` processes, which preserve the order.

    With `stages`, they are the blocks of the stages; blocks read ahead beyond the end of a stage are read again.
    """

    def __init__(self, blocks: grain.MapDataset, workers: int, stages: "StagedOrder | None" = None):
        super().__init__()
        self._blocks, self._workers, self._stages = blocks, workers, stages

    def __iter__(self) -> "BlockIterator":
        return BlockIterator(self._blocks, self._workers, self._stages)


class BlockIterator(grain.DatasetIterator):
    """Iterator of `LoadedBlocks`; its state is the number of blocks returned, whatever the number of workers is."""

    def __init__(self, blocks: grain.MapDataset, workers: int, stages: "StagedOrder | None"):
        super().__init__()
        self._blocks, self._workers, self._stages = blocks, workers, stages
        self._continue_at(0)

    def _continue_at(self, position: int) -> None:
        self._position, self._loader = position, iter(_loader(self._blocks[position:], self._workers))

    def __next__(self) -> Any:
        if self._stages is not None and self._stages.advance(self._position):
            self._loader.close()
            self._continue_at(self._position)
        block = next(self._loader)
        self._position += 1
        return block

    def get_state(self) -> dict[str, Any]:
        """Returns the number of blocks returned so far, and the state of the stages, if there are any."""
        stages = {} if self._stages is None else {"stages": self._stages.get_state()}
        return {"next_index": self._position, **stages}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the blocks that followed `get_state`; also reads states that count blocks by worker."""
        self._loader.close()
        if self._stages is not None:
            self._stages.set_state(state["stages"])
        self._continue_at(sum(part["next_index"] for part in state.get("iterators_in_use_states", [state])))

    def start_prefetch(self) -> None:
        """Starts the workers."""
        self._loader.start_prefetch()

    def close(self) -> None:
        """Ends the workers."""
        super().close()
        self._loader.close()


def _loader(blocks: grain.MapDataset, workers: int) -> grain.IterDataset:
    read = blocks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if not workers:
        return read
    mark_absl_flags_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PREFETCHED_BLOCKS)
    return read.mp_prefetch(options, worker_init_fn=_start_worker).map(_copied)


def _start_worker(worker: int, workers: int) -> None:
    """Makes a loader process ignore SIGINT and SIGTERM, and end with the run.

    A run that stops still reads batches until its last step.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    if run := multiprocessing.parent_process():
        run.join()
        os._exit(0)


def _copied(block: Any) -> Any:
    """Copies the arrays of a block into private memory, so that the shared memory they came in is freed."""
    if isinstance(block, dict):
        return {key: _copied(value) for key, value in block.items()}
    return tuple(map(_copied, block)) if isinstance(block, tuple) else np.array(block)
