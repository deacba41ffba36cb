"""Runs with another vocabulary: without the tokens that a corpus never uses, or with new ones."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from tformer_jax import axes
from tformer_jax.base.paths import resolved
from tformer_jax.config import Config, DataConfig, TrainConfig
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers, same_tokens
from tformer_jax.data.tokenizers.surgery import Changed, needed_tokens, trim
from tformer_jax.models import cost, registry
from tformer_jax.nn.quantized import stored_arrays
from tformer_jax.runs import hardware, run_folder, weights
from tformer_jax.runs.shared_rows import side_of, tables
from tformer_jax.runs.trained import Trained

SIDES = ("source", "target")
Sides = Mapping[str, Changed]
"""The changed tokenizers by side."""
Texts = Callable[[str], Iterable[str]]
"""Returns the texts of a side, each time anew."""
RECORD = "vocabulary.json"
COPIED = ("imported.json",)
"""Files about the origin of a run, which also hold for the run with another vocabulary."""
BATCH = 1000
"""Number of texts that are tokenized at once."""
TOKENIZER_SETTINGS = (
    *("source_tokenizer", "target_tokenizer", "vocab_size", "tokenizer_examples", "tokenizer_temperature"),
    *("split_digits", "character_coverage", "byte_fallback", "symbols", "placeholders"),
)
"""Settings of `data` about the training of tokenizers."""
START_SETTINGS = (
    *("start_from", "start_from_step", "lora_rank", "lora_alpha", "lora_kernels", "lora_base", "lora_whole"),
    *("teacher", "teacher_step", "teacher_weight", "teacher_temperature"),
)
"""Settings of `train` about the runs that a run started from or learned from."""


class Usage(NamedTuple):
    """The tokens that texts use."""

    used: Mapping[str, int]
    """Number of different tokens by side."""
    texts: int
    changed: int
    """Number of texts that the trimmed tokenizers tokenize otherwise."""


def trim_tokenizers(cfg: Config, tokenizers: Tokenizers, texts: Texts) -> tuple[Sides, Usage]:
    """Removes the tokens that no text has, of both sides if they share a vocabulary."""
    olds = {side: getattr(tokenizers, side) for side in SIDES}
    used = {side: {*_count_tokens(olds[side], texts(side))} for side in SIDES}
    needed = {side: needed_tokens(olds[side], used[side]) for side in SIDES}
    if shares_vocabulary(cfg, tokenizers):
        needed = dict.fromkeys(SIDES, needed["source"] | needed["target"])
        used = dict.fromkeys(SIDES, used["source"] | used["target"])
    sides = {side: trim(olds[side], needed[side]) for side in SIDES}
    counts = [_count_changed(olds[side], sides[side], texts(side)) for side in SIDES]
    return sides, Usage({side: len(ids) for side, ids in used.items()}, *map(sum, zip(*counts, strict=True)))


def shares_vocabulary(cfg: Config, tokenizers: Tokenizers) -> bool:
    """Returns whether the ids of both sides belong to one vocabulary."""
    return cfg.model.ties_inputs or same_tokens(tokenizers.source, tokenizers.target)


def resize(trained: Trained, sides: Sides) -> Trained:
    """Returns a model for changed tokenizers; the row of a new token is the mean of the rows that it replaces.

    Rows without a token are removed, except the rows of special tokens.
    """
    leaves = flatten_dict(trained.params, sep="/")
    sizes: dict[str, Any] = {}
    for name, (shape, axis, kind) in tables(trained.cfg.model).items():
        if kind == axes.VOCAB:
            side = side_of(name)
            rows = _with_unnamed(sides[side], getattr(trained.tokenizers, side), shape[axis])
            sizes["source_vocab_size" if side == "source" else "vocab_size"] = len(rows)
            leaves[name] = jnp.asarray(take_rows(np.asarray(leaves[name]), axis, rows))
    if trained.cfg.model.model_class.reads_source:
        sizes.setdefault("source_vocab_size", sizes["vocab_size"])
    cfg = dataclasses.replace(trained.cfg, model=dataclasses.replace(trained.cfg.model, **sizes))
    tokenizers = Tokenizers(*(sides[side].tokenizer for side in SIDES))
    params = unflatten_dict(leaves, sep="/")
    return Trained(cfg, registry.build(cfg.model), params, tokenizers, trained.labels)


def take_rows(table: np.ndarray, axis: int, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns a table in the dtype of `table`, whose rows along `axis` are means, in float32, of rows of `table`."""
    old = np.moveaxis(table, axis, 0)
    new = old[[row[0] for row in rows]]
    for number, row in enumerate(rows):
        if len(row) > 1:
            new[number] = old[list(row)].astype(np.float32).mean(axis=0).astype(table.dtype)
    return np.moveaxis(new, 0, axis)


def save(
    output: Path,
    run: Path,
    trained: Trained,
    kind: str,
    facts: Mapping[str, Any],
    record: str = RECORD,
    *,
    step: int | None = None,
) -> None:
    """Writes a run folder, which appears when it is complete; training then starts from its tokenizers.

    Args:
        run: the run that was changed.
        step: the step of the checkpoint that was loaded; None: its final weights, or the newest checkpoint.
        kind: what the weights are called.
        facts: what the file `record` holds besides the run.
    """
    cfg = dataclasses.replace(
        trained.cfg,
        name=output.name,
        data=_data_settings(trained.cfg.data, output),
        train=dataclasses.replace(trained.cfg.train, **_defaults(TrainConfig, START_SETTINGS)),
    )
    corpus = run_folder.read_json(run / run_folder.CORPUS) if (run / run_folder.CORPUS).exists() else None
    loaded = run_folder.weights_of(run, step)
    origin = {"run": str(resolved(run)), "run_id": run_folder.run_id(run), "weights": loaded}
    with run_folder.creating(output, cfg, trained.tokenizers, trained.labels, corpus) as folder:
        for name in COPIED:
            if (run / name).exists():
                (folder / name).write_bytes((run / name).read_bytes())
        run_folder.write_json(folder / "model.json", _model_facts(cfg, trained.params))
        run_folder.write_json(folder / record, {**origin, **facts})
        weights.save(folder, trained.params, kind, [], 0)


def _data_settings(data: DataConfig, output: Path) -> DataConfig:
    """Returns data settings with the tokenizers of the run in `output`."""
    defaults = _defaults(DataConfig, TOKENIZER_SETTINGS)
    return dataclasses.replace(data, tokenizer="file", tokenizer_file=str(resolved(output)), **defaults)


def _defaults(section: type, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(section(), name) for name in names}


def _model_facts(cfg: Config, params: Any) -> dict[str, Any]:
    """Returns the contents of `model.json`."""
    return {
        "parameters": cost.by_module(stored_arrays(params)),
        "attention_backends": registry.attention_backends(cfg.model, cfg.data.longest),
        "peak_flops": hardware.peak_flops(jax.local_devices()[:1]),
    }


def _with_unnamed(changed: Changed, tokenizer: Tokenizer, size: int) -> list[tuple[int, ...]]:
    """Adds the rows of special tokens that have no name in the tokenizer, for a table of `size` rows."""
    special, first = tokenizer.special, tokenizer.vocab_size
    last = max(i for i in (*special.used, *special.suppressed, special.pad or 0, first - 1) if i < size)
    return [*changed.rows, *((i,) for i in range(first, last + 1))]


def _count_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> collections.Counter[int]:
    counts: collections.Counter[int] = collections.Counter()
    for batch in _batched(texts):
        counts.update(itertools.chain.from_iterable(tokenizer.encode_batch(batch)))
    return counts


def _count_changed(old: Tokenizer, changed: Changed, texts: Iterable[str]) -> tuple[int, int]:
    """Returns the number of texts, and the number of texts whose tokens changed."""
    total = different = 0
    for batch in _batched(texts):
        pairs = zip(old.encode_batch(batch), changed.tokenizer.encode_batch(batch), strict=True)
        different += sum([changed.rows[i][0] for i in now] != before for before, now in pairs)
        total += len(batch)
    return total, different


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while batch := list(itertools.islice(rest, BATCH)):
        yield batch
