"""A small corpus of each kind, and its config, for tests of prepared data."""

import dataclasses
from pathlib import Path

from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig

WORDS = [f"word{number} zwölf {'x' * (number % 7)}" for number in range(90)]
KINDS = {
    "classifier": ("tsv", {"bucket_lengths": (20, 40), "batch_tokens": 160, "batch_multiple": 1}),
    "seq2seq": ("tsv", {"bucket_lengths": (20, 40), "batch_tokens": 160, "batch_multiple": 1}),
    "decoder_lm": ("lines", {"batching": "windows", "window": 9, "batch_size": 3}),
    "decoder_lm packed": ("lines", {"batching": "packed", "window": 20, "batch_size": 3, "long_documents": "split"}),
}

WINDOWS = {"batching": "windows", "window": 9, "batch_size": 3}
OBJECTIVES = {
    "masked_lm": ("lines", WINDOWS | {"objective": "masked_tokens"}),
    "seq2seq spans": ("lines", WINDOWS | {"objective": "span_corruption"}),
    "seq2seq denoising": ("lines", WINDOWS | {"objective": "denoising"}),
}


def write_corpus(folder: Path) -> None:
    """Writes the files that `config` reads."""
    (folder / "seq2seq.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in WORDS), encoding="utf-8")
    (folder / "classifier.tsv").write_text("".join(f"{'xyz'[len(w) % 3]}\t{w}\n" for w in WORDS), encoding="utf-8")
    (folder / "decoder_lm.txt").write_text("\n".join(WORDS), encoding="utf-8")


def config(kind: str, **changes) -> Config:
    source, data = (KINDS | OBJECTIVES)[kind]
    family = kind.split()[0]
    train = "decoder_lm.txt" if source == "lines" else f"{family}.tsv"
    return Config(
        model=ModelConfig(family=family, max_length=64),
        data=DataConfig(**{"source": source, "train": train, "tokenizer": "characters", **data, **changes}),
        eval=EvalConfig(batch_size=4),
    )


def prepared(cfg: Config, *folders) -> Config:
    names = tuple(map(str, folders))
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source="prepared", train=names))
