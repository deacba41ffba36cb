"""`scripts/benchmark.py data`: throughput of the data pipeline alone, and the share of padding in its batches."""

import argparse
import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from tformer_jax.base.numbers import counted
from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.corpora.corpus import Endless
from tformer_jax.data.pipeline import Batch, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.models import registry

WARM_UP_BATCHES = 8


def data_cases(cfg: Config, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the corpus of a config, from text and prepared, with a thread and with `options.workers` processes."""
    corpus = load_corpus(cfg, options.data)
    tokenizers = train_tokenizers(cfg.data, corpus.train, options.data)
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        sources = {"text": cfg.data}
        if not isinstance(corpus.train, Endless):
            prepare(cfg, options.data, Path(scratch), tokenizers=tokenizers)
            sources["prepared"] = dataclasses.replace(
                cfg.data, source="prepared", train=(scratch,), validation=(), test=(), weights=(), workers=0
            )
        for (source, data), workers in itertools.product(sources.items(), dict.fromkeys((0, options.workers))):
            if workers and source == "prepared" and data.batching != "windows":
                continue  # one thread reads them
            case = dataclasses.replace(cfg, data=dataclasses.replace(data, workers=workers))
            result = measure_pipeline(case, load_corpus(case, options.data), tokenizers, options.seconds)
            speed, padding = result["tokens_per_second"], result["padding_percent"]
            print(f"{source}, {counted(workers, 'worker')}: {speed:,.0f} tokens/s, {padding:.2f} % padding", flush=True)
            cases.append({"source": source, "workers": workers, "batching": cfg.data.batching, **result})
    return cases


def measure_pipeline(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, seconds: float) -> dict[str, float]:
    """Measures real tokens per second, and the share of padding, over `seconds` of batches."""
    batches = train_batches(cfg, corpus, tokenizers)
    for _ in itertools.islice(batches, WARM_UP_BATCHES):
        pass
    real = positions = count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        batch = next(batches)
        real_in_batch, size = count_positions(cfg, batch)
        real, positions, count = real + real_in_batch, positions + size, count + 1
    batches.close()
    return {
        "tokens_per_second": real / elapsed,
        "padding_percent": 100 * (1 - real / positions),
        "batches": count,
        "seconds": elapsed,
    }


def count_positions(cfg: Config, batch: Batch) -> tuple[int, int]:
    """Returns the number of real tokens and of all positions in the model's inputs."""
    inputs = cfg.model.model_class.inputs
    return registry.count_tokens(cfg.model, batch), sum(batch[key].size for key in inputs)
