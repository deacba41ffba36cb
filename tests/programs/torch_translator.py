"""Trains PyTorch's `nn.Transformer` on the batches of a config, and translates a split with it.

python -m tests.programs.torch_translator --config configs/translate_debian.py --data DIR --measure
python -m tests.programs.torch_translator --config configs/translate_debian.py --data DIR --steps 6000 --output FILE

The first command measures the steps of both libraries alternately, so that the second trains for as long as this
library does, whatever else runs; it resumes from its last checkpoint, next to FILE.

The data, its tags, the vocabulary and the sizes of the model are the config's. The rest is as PyTorch's tutorials have
it: layers of 2017 with the norm after each sublayer, Adam, a warm-up with inverse square root decay, and greedy
decoding.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.data.corpora import Example, load_corpus
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.tags import tag_ids
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.models import registry
from tformer_jax.parallel import placement
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import provenance
from tformer_jax.runs.experiment import with_data_sizes
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD, PAD_TOKEN
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step

WARMUP = 1000
PEAK = 1e-3
"""Learning rate at the end of the warm-up."""
ROWS = 100
"""Sentences that are translated together."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEASURED, ROUNDS = 20, 5
"""Batches, and rounds over them, of a measurement."""


class Translator(nn.Module):
    """`nn.Transformer` with one embedding of the shared vocabulary, also used by the output, and sinusoids."""

    def __init__(self, cfg: Config, vocab_size: int):
        super().__init__()
        model = cfg.model
        self.embedding = nn.Embedding(vocab_size, model.dim, padding_idx=PAD_TOKEN)
        nn.init.normal_(self.embedding.weight, std=model.dim**-0.5)
        self.transformer = nn.Transformer(
            model.dim,
            model.num_heads,
            model.size("encoder_layers"),
            model.size("decoder_layers"),
            model.size("ffn_dim"),
            model.dropout,
            batch_first=True,
        )
        self.dropout, self.scale = nn.Dropout(model.dropout), math.sqrt(model.dim)
        angles = torch.arange(model.max_length)[:, None] / 10_000 ** (torch.arange(0, model.dim, 2) / model.dim)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds int64 [B, T] -> float32 [B, T, D]."""
        return self.dropout(self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]])

    def encode(self, source: Tensor) -> Tensor:
        """Encodes int64 [B, S] -> float32 [B, S, D]."""
        return self.transformer.encoder(self.embed(source), src_key_padding_mask=source == PAD_TOKEN)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Returns logits of the next tokens: float32 [B, T, V]."""
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        states = self.transformer.decoder(
            self.embed(target), memory, causal, tgt_is_causal=True, memory_key_padding_mask=source == PAD_TOKEN
        )
        return states @ self.embedding.weight.T

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, self.encode(source), source)


def as_tensors(batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Converts a batch; padding of inputs is PyTorch's."""
    batch = dict(batch) | {key: np.where(batch[key] == PAD, PAD_TOKEN, batch[key]) for key in ("source", "target_in")}
    return {key: torch.from_numpy(array).long().to(DEVICE) for key, array in batch.items()}


class Training:
    """The optimizer and schedule of a model, and its steps."""

    def __init__(self, cfg: Config, model: Translator):
        self._model, self.done = model.train(), 0
        self._optimizer = torch.optim.Adam(model.parameters(), PEAK, betas=(0.9, 0.98), eps=1e-9)
        self._loss = nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=cfg.train.label_smoothing)

    def step(self, batch: dict[str, Tensor]) -> float:
        """Takes one step; returns the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK * min((self.done + 1) / WARMUP, (WARMUP / (self.done + 1)) ** 0.5)
        logits = self._model(batch["source"], batch["target_in"])
        loss = self._loss(logits.flatten(0, 1), batch["target_out"].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.done += 1
        return loss.item()

    def save(self, path: Path) -> None:
        """Writes a checkpoint, completely or not at all."""
        partial = path.with_suffix(".partial")
        states = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self.done}
        torch.save(states, partial)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Continues from a checkpoint."""
        states = torch.load(path, weights_only=True)
        self._model.load_state_dict(states["model"])
        self._optimizer.load_state_dict(states["optimizer"])
        self.done = states["step"]


def train(cfg: Config, model: Translator, batches: Iterator[Any], steps: int, checkpoint: Path) -> None:
    """Trains to `steps`, from the checkpoint if there is one."""
    training = Training(cfg, model)
    if checkpoint.is_file():
        training.restore(checkpoint)
    for number, batch in enumerate(itertools.islice(batches, steps)):
        if number < training.done:
            continue  # of the steps before the checkpoint
        loss = training.step(as_tensors(batch))
        if training.done % 100 == 0:
            print(f"step {training.done}  loss {loss:.3f}", flush=True)
            training.save(checkpoint)


def measure(cfg: Config, model: Translator, tokenizers: Tokenizers, batches: Sequence[Any]) -> dict[str, Any]:
    """Returns the seconds of a step of this library and of PyTorch, medians of alternating rounds over the batches."""
    cfg, mesh = with_data_sizes(cfg, tokenizers, None), make_mesh(cfg.parallel)
    own = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(own))
    current = state.create(own, optimizer, cfg, mesh)
    step, training = jitted(make_train_step(own, optimizer, cfg), current, mesh), Training(cfg, model)
    seconds: dict[str, list[float]] = {"here": [], "torch": []}
    for number in range(ROUNDS + 1):  # the first one compiles
        start = time.perf_counter()
        for batch in batches:
            current, _ = step(current, placement.shard_batch(mesh, batch))
        jax.block_until_ready(current)
        middle = time.perf_counter()
        for batch in batches:
            training.step(as_tensors(batch))
        if number:
            seconds["here"].append((middle - start) / len(batches))
            seconds["torch"].append((time.perf_counter() - middle) / len(batches))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": seconds, "medians": medians, "hardware": provenance.describe_hardware()}


@torch.no_grad()
def translate(cfg: Config, model: Translator, tokenizers: Tokenizers, examples: Sequence[Example]) -> list[str]:
    """Translates each source greedily, in batches of similar lengths."""
    model.eval()
    rows = []
    for example in examples:
        tags, forced = tag_ids(cfg.data, tokenizers, Direction.parse(example["direction"]))
        source = [*tags, *tokenizers.source.encode(example["source"])][: cfg.model.max_length - 1]
        rows.append(([*source, EOS], [BOS, *forced]))
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]))
    outputs = [""] * len(rows)
    for start in range(0, len(order), ROWS):
        chosen = order[start : start + ROWS]
        longest = max(len(rows[index][0]) for index in chosen)
        source = torch.tensor([rows[index][0] + [PAD_TOKEN] * (longest - len(rows[index][0])) for index in chosen])
        target, memory = torch.tensor([rows[index][1] for index in chosen]), model.encode(source)
        done = torch.zeros(len(chosen), dtype=torch.bool)
        while not done.all() and target.shape[1] < cfg.model.max_length:
            token = model.decode(target, memory, source)[:, -1].argmax(-1).masked_fill(done, PAD_TOKEN)
            target = torch.cat([target, token[:, None]], 1)
            done |= token == EOS
        for index, ids in zip(chosen, target.tolist(), strict=True):
            outputs[index] = tokenizers.target.decode(ids[len(rows[index][1]) :])
    return outputs


def main() -> None:
    """Measures; or trains, translates, and writes sources, references, outputs and directions as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--measure", action="store_true", help="only print the times of steps")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("torch_translator.json"))
    options = parser.parse_args()
    cfg = read_config(options.config)
    torch.manual_seed(options.seed)
    torch.set_default_device(DEVICE)
    corpus = load_corpus(cfg, options.data)
    tokenizers = train_tokenizers(cfg.data, corpus.train, options.data)
    model = Translator(cfg, tokenizers.target.vocab_size)
    batches = train_batches(cfg, corpus, tokenizers)
    if options.measure:
        print(json.dumps(measure(cfg, model, tokenizers, list(itertools.islice(batches, MEASURED)))))
        return
    train(cfg, model, batches, options.steps, options.output.with_suffix(".pt"))
    examples = list(corpus.test)
    outputs = translate(cfg, model, tokenizers, examples)
    parameters = sum(each.numel() for each in model.parameters())
    rows = [dict(example) | {"output": output} for example, output in zip(examples, outputs, strict=True)]
    record = {"seed": options.seed, "steps": options.steps, "parameters": parameters, "device": DEVICE}
    options.output.write_text(json.dumps(record | {"rows": rows}, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
