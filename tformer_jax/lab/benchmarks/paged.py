"""`scripts/benchmark.py paged`: decoding steps over a paged cache and a dense one with the same tokens."""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.base.numbers import MIB
from tformer_jax.config import ModelConfig
from tformer_jax.inference.engine import PAGE_SIZE
from tformer_jax.inference.model_step import step_fn
from tformer_jax.lab.benchmarks.turns import alternate_runs, time_second_call
from tformer_jax.models import registry
from tformer_jax.nn.decoder_cache import DecoderCache, paged_cache, row_cache
from tformer_jax.nn.kv_cache import KeyValues
from tformer_jax.nn.row_slots import PagedSlots
from tformer_jax.special_tokens import SPECIAL_TOKENS

FLAGS = {
    "rows": (64, "rows"),
    "length": (1024, "tokens in the longest row, and slots per row of the dense cache"),
    "layers": (4, "layers"),
    "dim": (512, "model width; heads have 64 features"),
    "steps": (8, "steps per measurement"),
    "rounds": (7, "measurements per cache; the median is reported"),
}
"""Command-line flags: their defaults and meanings."""
HEAD_DIM = 64
SPREAD = 128
"""The longest row has this many times the tokens of the shortest."""
SHARE = 4
"""The dense cache has this many times the slots of the pool."""
TOLERANCE = 1e-3
"""Largest difference of the logits, as a fraction of the largest logit."""

Run = Callable[[], jax.Array]


def measure_paged(options: argparse.Namespace) -> dict[str, Any]:
    """Measures both caches alternately, prints a line for each, and returns the record for `--record`.

    Raises:
        UserError: `--dim` or `--steps` is out of range, or the rows do not fit into the pool.
        RunError: the logits differ.
    """
    if options.dim % HEAD_DIM:
        raise UserError(f"--dim {options.dim}: must be a multiple of {HEAD_DIM}")
    if options.steps >= options.length:
        raise UserError(f"--steps {options.steps}: must be less than --length {options.length}")
    lengths = row_lengths(options.rows, options.length - options.steps)
    cfg = make_config(options)
    model: Any = registry.build(cfg)
    params = jax.jit(lambda key: nn.unbox(registry.init(model, key)))(jax.random.key(0))
    caches = {"paged": fill_page_table(cfg, lengths, options), "dense": row_cache(cfg, options.rows, options.length)}
    size = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers)) for name, cache in caches.items()}
    runs = {
        name: decode_steps(model, params, fill_cache(cache, lengths), options.steps) for name, cache in caches.items()
    }
    paged, dense = (np.asarray(run()) for run in runs.values())
    difference = float(np.abs(paged - dense).max() / np.abs(dense).max())
    if not difference < TOLERANCE:
        raise RunError(f"the logits over a paged and a dense cache differ by {difference:.1e} of the largest one")
    totals = alternate_runs({name: time_second_call(run) for name, run in runs.items()}, options.rounds)
    seconds = {name: [time / options.steps for time in times] for name, times in totals.items()}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.1f} ms per step, {size[name] / MIB:,.0f} MiB of keys and values", flush=True)
    return {
        "sizes": {name: vars(options)[name] for name in FLAGS},
        "row_lengths": lengths.tolist(),
        "bytes": size,
        "largest_relative_difference": difference,
        "seconds_per_step": seconds,
        "times_as_fast": medians["dense"] / medians["paged"],
    }


def row_lengths(rows: int, longest: int) -> np.ndarray:
    """Returns the number of tokens in each row, int [rows], evenly spaced on a logarithmic scale and shuffled."""
    lengths = np.geomspace(max(longest / SPREAD, 1), longest, rows).astype(int)
    return np.random.default_rng(0).permutation(lengths)


def make_config(options: argparse.Namespace) -> ModelConfig:
    """Returns the config of a language model with the given sizes."""
    return ModelConfig(
        family="decoder_lm",
        vocab_size=8000,
        max_length=options.length,
        dim=options.dim,
        num_heads=options.dim // HEAD_DIM,
        ffn_dim=4 * options.dim,
        decoder_layers=options.layers,
        position="rotary",
        dropout=0.0,
    )


def fill_page_table(cfg: ModelConfig, lengths: np.ndarray, options: argparse.Namespace) -> DecoderCache:
    """Returns an empty paged cache with space for `options.steps` more tokens per row.

    Raises:
        UserError: the pool has too few pages.
    """
    counts = -(-(lengths + options.steps) // PAGE_SIZE)
    pages = options.rows * options.length // PAGE_SIZE // SHARE
    if counts.sum() > pages:
        raise UserError(
            f"the rows need {counts.sum()} pages of {PAGE_SIZE} tokens, but 1/{SHARE} of the dense cache has {pages}: "
            "increase --rows or --length"
        )
    shuffled = np.random.default_rng(1).permutation(np.arange(1, pages + 1))
    table = np.zeros((options.rows, -(-options.length // PAGE_SIZE)), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = shuffled[: counts.sum()]
    cache = paged_cache(cfg, options.rows, pages=pages + 1, page_size=PAGE_SIZE, pages_per_row=table.shape[1])
    tables: Any = {
        kind: dataclasses.replace(slots, table=jnp.asarray(table))
        for kind, slots in cache.slots.items()
        if isinstance(slots, PagedSlots)
    }
    return dataclasses.replace(cache, slots=tables)


@jax.jit
def fill_cache(cache: DecoderCache, lengths: jax.Array) -> DecoderCache:
    """Returns the cache with random keys and values of `lengths` tokens, the same ones for each kind of cache."""
    rows, longest = len(lengths), next(iter(cache.slots.values())).tokens.positions.shape[1]
    cache, _, _ = cache.allocate(jnp.arange(longest) < lengths[:, None])
    (slots,) = cache.slots.values()
    layers = []
    for number, layer in enumerate(cache.layers):
        _, K, _, H = jax.tree.leaves(layer.self_attention)[0].shape
        keys = jax.random.split(jax.random.key(number))
        new = KeyValues(*(jax.random.normal(key, (rows, K, longest, H)) for key in keys))
        assert isinstance(layer.self_attention, KeyValues)
        layers.append(dataclasses.replace(layer, self_attention=layer.self_attention.extend(new, slots)[0]))
    return dataclasses.replace(cache, layers=tuple(layers), slots={"full": slots.end_call()})


def decode_steps(model: Any, params: Any, cache: DecoderCache, steps: int) -> Run:
    """Returns a function that decodes `steps` tokens per row, forgets them, and returns the last logits."""
    rows = len(cache.lengths)

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(params: Any, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        tokens = jnp.full((rows, 1), len(SPECIAL_TOKENS))

        def step(_: jax.Array, carry: tuple[jax.Array, DecoderCache]) -> tuple[jax.Array, DecoderCache]:
            return step_fn(model, params)(tokens, carry[1])

        no_logits = jnp.zeros((rows, 1, model.cfg.vocab_size))
        logits, cache = jax.lax.fori_loop(0, steps, step, (no_logits, cache))
        return logits, cache.remove_newest(jnp.full((rows,), steps))

    state = [cache]

    def run() -> jax.Array:
        logits, state[0] = decode(params, state[0])
        return jax.block_until_ready(logits)

    return run
