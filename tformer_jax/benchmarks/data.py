"""`scripts/benchmark.py data`: how fast the data pipeline alone gives batches, and how much of them is padding."""

import argparse
import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.corpora.cldr import is_endless
from tformer_jax.data.pipeline import Batch, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers, train_tokenizers
from tformer_jax.models.registry import FAMILIES
from tformer_jax.special_tokens import PAD

WARM_UP_BATCHES = 8


def data_cases(cfg: Config, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The corpus of a config from its text and prepared, by a thread and by `options.workers` processes."""
    corpus = load_corpus(cfg, options.data)
    tokenizers = train_tokenizers(cfg.data, corpus.train, options.data)
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        sources = {"text": cfg.data}
        if not is_endless(corpus.train):
            prepare(cfg, options.data, Path(scratch), tokenizers=tokenizers)
            sources["prepared"] = dataclasses.replace(
                cfg.data, source="prepared", train=(scratch,), validation=(), test=(), weights=()
            )
        for (source, data), workers in itertools.product(sources.items(), dict.fromkeys((0, options.workers))):
            case = dataclasses.replace(cfg, data=dataclasses.replace(data, workers=workers))
            found = measure(case, load_corpus(case, options.data), tokenizers, options.seconds)
            speed, padding = found["tokens_per_second"], found["padding_percent"]
            print(f"{source}, {workers} workers: {speed:,.0f} tokens/s, {padding:.2f} % padding", flush=True)
            cases.append({"source": source, "workers": workers, "batching": cfg.data.batching, **found})
    return cases


def measure(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, seconds: float) -> dict[str, float]:
    """Real tokens a second and the share of padding in all places of the batches of some seconds."""
    batches = train_batches(cfg, corpus, tokenizers)
    for _ in itertools.islice(batches, WARM_UP_BATCHES):
        pass
    real = places = count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        batch = next(batches)
        found, size = count_places(cfg, batch)
        real, places, count = real + found, places + size, count + 1
    batches.close()
    return {
        "tokens_per_second": real / elapsed,
        "padding_percent": 100 * (1 - real / places),
        "batches": count,
        "seconds": elapsed,
    }


def count_places(cfg: Config, batch: Batch) -> tuple[int, int]:
    """Real tokens and places for tokens in what the model reads of a batch."""
    inputs = [batch[key] for key in FAMILIES[cfg.model.family].inputs]
    return sum(int(np.count_nonzero(array != PAD)) for array in inputs), sum(array.size for array in inputs)
