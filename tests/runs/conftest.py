"""A corpus, a config, and runs that take a few seconds."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from tformer_jax.runs import experiment, initial_state, training, weights


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """A folder with pairs.tsv."""
    folder = tmp_path_factory.mktemp("corpus")
    write_pairs(folder)
    return folder


def write_pairs(folder: Path) -> None:
    """Writes pairs.tsv: words, and the same words in capitals."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(120)]
    (folder / "pairs.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in words), encoding="utf-8")


def small_config(*, bucket_lengths: tuple[int, ...] = (12,), **train: Any) -> Config:
    """Returns the config of a seq2seq model of one small layer, with dropout; each bucket has one batch shape."""
    return Config(
        name="small",
        model=ModelConfig(
            dim=16, encoder_layers=1, decoder_layers=1, num_heads=2, ffn_dim=16, max_length=16, dropout=0.1
        ),
        data=DataConfig(
            source="tsv",
            train="pairs.tsv",
            tokenizer="characters",
            bucket_lengths=bucket_lengths,
            batch_tokens=48,
            batch_multiple=2,
        ),
        optim=OptimConfig(schedule="constant", learning_rate=1e-2, warmup_steps=2),
        train=TrainConfig(**{"steps": 8, "log_every": 1, "eval_every": 4, "checkpoint_every": 2, **train}),
        parallel=ParallelConfig(data=1),
        decode=DecodeConfig(max_new_tokens=10),
        eval=EvalConfig(batch_size=8, examples=8, samples=1),
    )


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_state, "compiling", lambda *_: contextlib.nullcontext())
        yield


@pytest.fixture(scope="module")
def compiled_by_the_first_step() -> Iterator[None]:
    """Trainers that make no step compile none."""
    with without_compiling():
        yield


@pytest.fixture(scope="session")
def initial_run(tmp_path_factory, corpus_folder) -> Path:
    """A run with a checkpoint and final weights: the initial parameters. Tests change only copies of it."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    with (
        without_compiling(),
        contextlib.closing(experiment.build(small_config(steps=1), folder, data_root=corpus_folder)) as built,
        contextlib.closing(training.Training(built)) as started,
    ):
        started.save()
        weights.save(folder, started.trainer.state.params, "last", [0], 0)
    return folder


@pytest.fixture(scope="module")
def first(initial_run, compiled_by_the_first_step) -> Path:
    """The run `initial_run`, in a module whose trainers compile nothing by themselves."""
    return initial_run
