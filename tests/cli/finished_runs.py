"""Finished runs without a train step, which the tests of commands load: no step is compiled."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

from tests import chats
from tests.helpers import with_own_stacks
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

SMALL = {"dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "ffn_dim": 8, "max_length": 16}


def finish(
    family: str, folder: Path, data: DataConfig, task: str | None = None, *, evaluated: bool = True, **model: Any
) -> Path:
    """Makes a run below `folder`; if it is not evaluated, it has weights, and no `result.json`."""
    cfg = Config(
        task=task,
        model=ModelConfig(family=family, dropout=0.0, **{**with_own_stacks(family, SMALL), **model}),
        data=data,
        optim=OptimConfig(optimizer="sgd", beta1=0.0, learning_rate=1e-2, warmup_steps=1),
        train=TrainConfig(steps=1),
        parallel=ParallelConfig(data=1),
        decode=DecodeConfig(max_new_tokens=6),
        eval=EvalConfig(batch_size=4, samples=1),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(initial_state, "compiling", lambda *_: contextlib.nullcontext()))
        built = stack.enter_context(contextlib.closing(experiment.build(cfg, folder / family, data_root=folder)))
        trainer = stack.enter_context(contextlib.closing(training.Training(built)))
        trainer.save()
        if evaluated:
            trainer.finish()
        else:
            weights.save(folder / family, trainer.trainer.state.params, "last", [0], 0)
    return folder / family


def run_of_conversations(folder: Path) -> Path:
    """Makes a run below `folder` that answers, with the template ChatML."""
    records = (json.dumps({"messages": messages}) for messages in chats.CHATS)
    (folder / "chats.jsonl").write_text("".join(f"{record}\n" for record in records))
    chats.write_tokenizer(folder / "checkpoint")
    files = dict.fromkeys(("train", "validation"), ("chats.jsonl",))
    tokenizer = {"tokenizer": "file", "tokenizer_file": "checkpoint"}
    data = DataConfig(source="jsonl", **files, **tokenizer, batching="packed", batch_size=2, window=120)
    llama = {"ffn": "gated", "norm": "rmsnorm", "activation": "silu", "position": "rotary", "attention_bias": ()}
    llama |= {"ffn_bias": False, "scale_embeddings": False, "tie_embeddings": "output"}
    return finish("decoder_lm", folder, data, "chat", evaluated=False, max_length=128, **llama)


class RunsOfEachFamily(dict[str, Path]):
    """Runs of the families below a folder, each made when it is first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        words = ["abc", "bca", "cabb", "ac", "bb", "cc", "aabb", "b", "ca", "acab"]
        (folder / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
        (folder / "labels.tsv").write_text("".join(f"{'xy'[n % 2]}\t{word}\n" for n, word in enumerate(words)))
        (folder / "text.txt").write_text(" ".join(words * 5))

    def __missing__(self, family: str) -> Path:
        lengths = {"tokenizer": "characters", "bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
        windows = {"tokenizer": "characters", "batching": "windows", "window": 8, "batch_size": 2}
        data = {
            "seq2seq": {"source": "tsv", "train": "pairs.tsv", **lengths},
            "classifier": {"source": "tsv", "train": "labels.tsv", **lengths},
            "decoder_lm": {"source": "text", "train": "text.txt", **windows},
        }[family]
        with contextlib.redirect_stdout(io.StringIO()):  # which a test may capture
            self[family] = finish(family, self._folder, DataConfig(**data))
        return self[family]


def run_of_many_languages(folder: Path) -> Path:
    """Makes a run below `folder` that translates en to de and fr, and de to fr, and is told both languages."""
    for name in ("en-de", "en-fr", "de-fr"):
        (folder / f"{name}.tsv").write_text("abc\tcba\nbca\tacb\ncabb\tbbac\n")
    settings = {"tokenizer": "characters", "bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
    files = dict.fromkeys(("train", "validation"), "{src}-{tgt}.tsv")
    directions = {"directions": ("en-de", "en-fr", "de-fr"), "target_tags": ("source", "target"), "source_tags": ()}
    return finish("seq2seq", folder, DataConfig(source="tsv", **files, **directions, **settings), evaluated=False)
