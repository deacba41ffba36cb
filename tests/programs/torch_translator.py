"""Trains PyTorch's `nn.Transformer` on the batches of a config for a given time, and translates a split with it.

python -m tests.programs.torch_translator --config configs/translate_debian.py --data DIR --seconds 5400 --output FILE

The data, its tags, the vocabulary and the sizes of the model are the config's. The rest is as PyTorch's tutorials have
it: layers of 2017 with the norm after each sublayer, Adam, a warm-up with inverse square root decay, and greedy
decoding.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.data.corpora import Example, load_corpus
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.tags import tag_ids
from tformer_jax.data.tokenizers import Tokenizers, train_tokenizers
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD, PAD_TOKEN

WARMUP = 1000
PEAK = 1e-3
"""Learning rate at the end of the warm-up."""
ROWS = 100
"""Sentences that are translated together."""


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
    return {key: torch.from_numpy(array).long() for key, array in batch.items()}


def train(cfg: Config, model: Translator, batches: Iterator[Any], seconds: float) -> int:
    """Trains for some seconds; returns the number of steps."""
    optimizer = torch.optim.Adam(model.parameters(), PEAK, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (WARMUP / (step + 1)) ** 0.5)
    )
    loss_of = nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=cfg.train.label_smoothing)
    start, steps = time.monotonic(), 0
    model.train()
    while time.monotonic() - start < seconds:
        batch = as_tensors(next(batches))
        logits = model(batch["source"], batch["target_in"])
        loss = loss_of(logits.flatten(0, 1), batch["target_out"].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        steps += 1
        if steps % 100 == 0:
            print(f"step {steps}  loss {loss.item():.3f}  {time.monotonic() - start:.0f} s", flush=True)
    return steps


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
    """Trains, translates, and writes sources, references, outputs and directions as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="training time, without reading the data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    cfg = read_config(options.config)
    torch.manual_seed(options.seed)
    corpus = load_corpus(cfg, options.data)
    tokenizers = train_tokenizers(cfg.data, corpus.train, options.data)
    model = Translator(cfg, tokenizers.target.vocab_size)
    steps = train(cfg, model, train_batches(cfg, corpus, tokenizers), options.seconds)
    examples = list(corpus.test)
    outputs = translate(cfg, model, tokenizers, examples)
    parameters = sum(each.numel() for each in model.parameters())
    rows = [dict(example) | {"output": output} for example, output in zip(examples, outputs, strict=True)]
    record = {"seed": options.seed, "seconds": options.seconds, "steps": steps, "parameters": parameters}
    options.output.write_text(json.dumps(record | {"rows": rows}, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
