"""Checks combinations of features: properties of every model, on random configs.

XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false" \\
    python -m tests.programs.crossings --record tests/programs/crossings.json
"""

import argparse
import dataclasses
import functools
import gc
import hashlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests import commands, draws
from tests.draws import GARBAGE, LENGTHS, SHAPES, T
from tests.helpers import build, with_settings
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig
from tformer_jax.config.task import tasks_of_family
from tformer_jax.interop import hf, settings_comparison
from tformer_jax.models import conversions, registry
from tformer_jax.nn import decoder_cache
from tformer_jax.special_tokens import PAD
from tformer_jax.train import optimizers

PLAIN = {
    "scan_layers": False,
    "remat": "none",
    "attention_backend": "reference",
    "attention_projections": "separate",
}
TOLERANCES = {"float32": 3e-5, "int8": 0.08, "bfloat16": 0.08, "gradients": 1e-4, "exact": 0.0}
"""Relative to the largest expected value, or to 1; `int8` and `bfloat16` limit the difference of `typical`."""
OPTIMIZERS = ("adamw", "adafactor", "lion", "lamb", "sgd", "muon", "schedule_free_adamw")
CHUNKS = (5, 1, 1, 1)
Finding = tuple[str, str, float]
"""A property, its tolerance, and the difference found."""


class Case:
    """A config, its model with random parameters, and inputs."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.cfg, self.refused = draws.config(rng)
        self.inputs, self.rng = draws.Inputs.draw(rng), rng
        self.plain, self.params = build(with_settings(self.cfg, **PLAIN), seed=seed, scale=0.3)
        self.model = registry.build(self.cfg)

    @functools.cached_property
    def converted(self) -> Any:
        """The parameters in the layout of the drawn config."""
        return self.forth(self.params)

    def forth(self, params: Any) -> Any:
        """Converts parameters or gradients from the plain config's layout to the drawn config's."""
        fused = conversions.convert_projections(params, self.plain.cfg, self.cfg.attention_projections)
        return conversions.convert_layers(
            fused, with_settings(self.cfg, scan_layers=False), scan_layers=self.cfg.scan_layers
        )

    def back(self, params: Any) -> Any:
        """Converts parameters or gradients from the drawn config's layout to the plain config's."""
        loop = conversions.convert_layers(params, self.cfg, scan_layers=False)
        return conversions.convert_projections(loop, with_settings(self.cfg, scan_layers=False), "separate")

    @functools.cached_property
    def run(self) -> Callable[..., jax.Array]:
        """The drawn model's logits in training mode, without dropout."""
        apply = jax.jit(lambda params, inputs: self.model.apply({"params": params}, **inputs, train=True))
        return functools.partial(apply, self.converted)

    def arguments(self, rows: np.ndarray, sources: np.ndarray, prefix: int | None = None) -> dict[str, Any]:
        """Returns the model's arguments for rows without padding, int32 [B, L]."""
        if self.cfg.family == "seq2seq":
            return {"source": sources, "target": rows}
        if self.cfg.prefix_lm:
            return {"tokens": rows, "prefix": np.full(len(rows), self.inputs.prefix if prefix is None else prefix)}
        return {"tokens": rows}

    def padded(self, fill: int) -> tuple[dict[str, Any], np.ndarray]:
        """Returns arguments with padding after, before and between tokens and in a whole row, and the real tokens."""
        rows, real = draws.spread(self.inputs.rows, fill=fill)
        sources, sources_real = draws.spread(self.inputs.sources, SHAPES[1:] + SHAPES[:1], fill=fill)
        empty = np.full((1, T), fill, np.int32)
        inputs = self.arguments(np.concatenate([rows, empty]), np.concatenate([sources, empty]))
        real, sources_real = (np.concatenate([each, np.zeros((1, T), bool)]) for each in (real, sources_real))
        if self.cfg.family == "seq2seq":
            return inputs | {"source_padding_mask": sources_real, "target_padding_mask": real}, real
        return inputs | {"padding_mask": real}, real


def difference(actual: Any, expected: Any) -> float:
    """Returns the largest difference, relative to the largest expected value or to 1; infinite for NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.abs(actual - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1))


def typical(case: Case, actual: Any, expected: Any) -> float:
    """Returns the mean difference over the standard deviation.

    With experts, that of the median token: rounding may change which expert a token chooses.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    by_token = np.abs(actual - expected).mean(axis=-1)
    mean = np.median(by_token) if case.cfg.ffn == "moe" else by_token.mean()
    return float(mean / max(expected.std(), 1e-3))


def rows(case: Case) -> Iterator[Finding]:
    """Logits do not depend on later tokens, padding, other rows, or the position in a packed row."""
    inputs, family = case.inputs, case.cfg.family
    alone = {L: case.run(case.arguments(inputs.rows[:, :L], inputs.sources)) for L in LENGTHS}
    yield "finite", "exact", max(0.0 if np.isfinite(logits).all() else float("inf") for logits in alone.values())
    single = case.run(case.arguments(inputs.rows[:1], inputs.sources[:1]))
    yield "other rows", "float32", difference(single, alone[5][:1])
    if family != "classifier":
        first = inputs.prefix if case.cfg.prefix_lm else 1
        seen = [difference(alone[L], alone[5][:, :L]) for L in LENGTHS if L >= first]
        yield "later tokens", "float32", max(seen)
    for fill, name in ((PAD, "padding"), (GARBAGE, "what padding holds")):
        arguments, real = case.padded(fill)
        logits = np.asarray(case.run(arguments))
        actual = logits[:3] if family == "classifier" else logits[real].reshape(3, 5, -1)
        yield name, "float32", difference(actual, alone[5])
        yield "an empty row", "exact", 0.0 if np.isfinite(logits).all() else float("inf")
    if family == "classifier":
        return
    documents = [inputs.rows[row, :L] for row, L in ((0, 3), (1, 1), (2, 5))]
    segments = np.repeat([1, 2, 3], [3, 1, 5])[None].astype(np.int32)
    packed = case.arguments(np.concatenate(documents)[None], inputs.sources[:3].reshape(1, -1), prefix=0)
    if family == "seq2seq":
        packed |= {"target_segments": segments, "source_segments": np.repeat([1, 2, 3], 5)[None].astype(np.int32)}
    else:
        packed |= {"segments": segments}
    logits = case.run(packed)[0]
    for row, (L, start) in enumerate(((3, 0), (1, 3), (5, 4))):
        expected = case.run(case.arguments(inputs.rows[:, :L], inputs.sources, prefix=0))[row]
        yield "packing", "float32", difference(logits[start : start + L], expected)


def cached(case: Case) -> Iterator[Finding]:
    """Prefill and decoding steps, with padding anywhere, equal the full pass."""
    if case.cfg.family == "classifier":
        return
    cfg, params = conversions.unrolled(case.cfg, case.converted)
    model, inputs = registry.build(cfg), case.inputs
    prefix = min(inputs.prefix, 2)
    full = jax.jit(lambda params, arguments: model.apply({"params": params}, **arguments))
    expected = full(params, case.arguments(inputs.rows, inputs.sources, prefix=prefix))
    tokens, real = draws.spread(inputs.rows)

    @jax.jit
    def step(params, cache, tokens, mask):
        return model.apply({"params": params}, tokens, cache, padding_mask=mask, method="decode_step")

    kinds = _caches(case, cfg, params, prefix)
    names = ["dense", *case.rng.permutation([name for name in kinds if name != "dense"])[:1]]
    for name in names:
        cache, chunks = kinds[name](), []
        for end, size in zip(np.cumsum(CHUNKS), CHUNKS, strict=True):
            part = slice(end - size, end)
            logits, cache = step(params, cache, tokens[:, part], real[:, part])
            chunks.append(logits)
        actual = np.concatenate(chunks, axis=1)[real].reshape(3, 5, -1)
        if name == "int8":
            yield "cache: int8", "int8", typical(case, actual, expected)
        else:
            yield f"cache: {name}", "float32", difference(actual, expected)


def _caches(case: Case, cfg: ModelConfig, params: Any, prefix: int) -> dict[str, Callable[[], Any]]:
    """Returns empty caches for three rows of eight tokens."""
    model = registry.build(cfg)
    if cfg.family == "seq2seq":
        sources, real = draws.spread(case.inputs.sources, SHAPES[1:] + SHAPES[:1])
        memory = model.apply({"params": params}, sources, real, method="encode")

        def crossed(**options: Any) -> Any:
            return model.apply({"params": params}, memory, real, length=T, **options, method="init_cache")

        return {
            "dense": crossed,
            "rows": lambda: _with_row_slots(cfg, crossed()),
            "int8": functools.partial(crossed, dtype="int8"),
        }
    seen = jnp.full((3,), prefix, jnp.int32) if cfg.prefix_lm else None
    empty = functools.partial(decoder_cache.empty_cache, cfg, 3, T, prefix=seen)
    kinds = {
        "dense": empty,
        "rows": lambda: _with_row_slots(cfg, empty()),
        "int8": functools.partial(empty, dtype="int8"),
    }

    def paged() -> Any:
        cache = decoder_cache.paged_cache(cfg, 3, pages=13, page_size=2, pages_per_row=4)
        table = jnp.asarray(1 + np.random.default_rng(0).permutation(12).reshape(3, 4))
        slots = {kind: dataclasses.replace(each, table=table) for kind, each in cache.slots.items()}
        return dataclasses.replace(cache, slots=slots, prefix=seen)

    return kinds | {"paged": paged}


def _with_row_slots(cfg: ModelConfig, cache: Any) -> Any:
    """Returns a cache in the engine's layout, in which rows fill their slots independently."""
    rows = decoder_cache.row_cache(cfg, 3, T)
    layers = tuple(
        dataclasses.replace(layer, self_attention=row.self_attention)
        for layer, row in zip(cache.layers, rows.layers, strict=True)
    )
    return dataclasses.replace(cache, layers=layers, slots=rows.slots)


def variants(case: Case) -> Iterator[Finding]:
    """Scan, checkpointing, fused projections and backends change neither values, gradients nor training.

    What the models compute at padding is not compared.
    """
    batch = registry.example_batch(case.cfg, 3, T)
    right, real = draws.spread(case.inputs.rows, SHAPES[:1] * 3)
    batch = {name: right if array.ndim == 2 else array for name, array in batch.items()}
    if case.cfg.prefix_lm:
        batch["prefix"] = np.full(3, case.inputs.prefix, np.int32)

    def gradients(model: Any, params: Any) -> Any:
        def total(params: Any) -> Any:
            outputs = registry.forward(model, params, batch, train=True)
            values = outputs.values * real[..., None] if outputs.values.ndim == 3 else outputs.values
            return (values**2).mean() + outputs.auxiliary_loss, values

        return jax.jit(jax.grad(total, has_aux=True))(params)

    expected, logits = gradients(case.plain, case.params)
    actual, drawn_logits = gradients(case.model, case.converted)
    yield "variants: values", "float32", difference(drawn_logits, logits)
    yield "variants: gradients", "gradients", _trees(case.back(actual), expected)
    name = case.rng.choice(OPTIMIZERS)
    trained = _trained(name, case.plain, case.params, expected)
    drawn = case.back(_trained(name, case.model, case.converted, case.forth(expected)))
    moved, drawn_moved = (jax.tree.map(np.subtract, after, case.params) for after in (trained, drawn))
    yield f"variants: {name}", "gradients", _trees(drawn_moved, moved)


def _trained(name: str, model: Any, params: Any, gradients: Any) -> Any:
    """Returns the parameters after three steps with the same gradients."""
    schedule = {} if name != "schedule_free_adamw" else {"schedule": "constant", "learning_rate": 0.01}
    family, lengths = model.cfg.family, {"bucket_lengths": (T,), "window": T}
    data = DataConfig(
        source=tasks_of_family(family)[0].sources[0],
        batching=tasks_of_family(family)[0].batchings[0],
        shared_vocab=True,
        **lengths,
    )
    optim = OptimConfig(optimizer=str(name), warmup_steps=1, **schedule)
    cfg = Config(model=model.cfg, data=data, optim=optim)
    optimizer = optimizers.build(cfg, registry.shapes(model))

    @jax.jit
    def steps(params: Any) -> Any:
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return steps(params)


def _trees(actual: Any, expected: Any) -> float:
    """Returns the largest difference of any leaf, relative to the largest value of all leaves."""
    scale = max(float(np.abs(leaf).max(initial=0)) for leaf in jax.tree.leaves(expected)) or 1.0
    pairs = jax.tree.map(lambda a, b: difference(np.asarray(a) / scale, np.asarray(b) / scale), actual, expected)
    return max(jax.tree.leaves(pairs))


def precision(case: Case) -> Iterator[Finding]:
    """Computation in bfloat16 is close to float32."""
    rounded = registry.build(with_settings(case.plain.cfg, dtype="bfloat16"))
    arguments = case.arguments(case.inputs.rows, case.inputs.sources)
    logits, expected = (
        jax.jit(lambda params, model=model: model.apply({"params": params}, **arguments))(case.params)
        for model in (rounded, case.plain)
    )
    yield "bfloat16", "bfloat16", typical(case, logits, expected)


def files(case: Case) -> Iterator[Finding]:
    """What `hf.save` writes loads as the same model, or saving is refused."""
    arguments = case.arguments(case.inputs.rows, case.inputs.sources)
    cfg, params = conversions.unrolled(case.cfg, case.converted)
    for model_type in hf.ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                hf.save(Path(folder), model_type, cfg, params)
            except UserError:
                continue
            back, read = hf.load(Path(folder))
            stored = with_settings(back, attention_projections=cfg.attention_projections)  # architectures may fuse them
            yield f"files: {model_type}, settings", "exact", float(len(settings_comparison.differences(cfg, stored)))
            logits, expected = (
                registry.build(each).apply({"params": of_params}, **arguments)
                for each, of_params in ((back, read), (cfg, params))
            )
            yield f"files: {model_type}, logits", "float32", difference(logits, expected)


CHECKS = {check.__name__: check for check in (rows, cached, variants, precision, files)}


def examine(seed: int, checks: list[str] | None = None) -> tuple[Case, list[Finding]]:
    """Runs the checks on one drawn case."""
    case = Case(seed)
    return case, [finding for name in checks or CHECKS for finding in CHECKS[name](case)]


def faults(case: Case, findings: list[Finding]) -> list[dict[str, Any]]:
    """Returns the differences that exceed their tolerances."""
    settings = {name: str(value) for name, value in dataclasses.asdict(case.cfg).items()}
    usual = {name: str(value) for name, value in dataclasses.asdict(draws.tiny(case.cfg.family)).items()}
    drawn = {name: value for name, value in settings.items() if value != usual[name]}
    return [
        {"property": name, "difference": seen, "config": {"family": case.cfg.family, **drawn}}
        for name, tolerance, seen in findings
        if not seen <= TOLERANCES[tolerance]
    ]


def main() -> None:
    """Prints each fault, and records the largest difference of each property."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a record of the same draws and checks is continued")
    options = parser.parse_args()
    gc.set_threshold(200_000, 50, 100)  # traces make many objects that stay
    actual = _begun(options.record, options.seed)
    for seed in range(options.seed + actual["configs"], options.seed + options.configs):
        _add(actual, seed)
        if options.record:
            commands.write_record(options.record, "tests.programs.crossings", **actual)
        jax.clear_caches()
    print(f"{actual['configs']} configs ({actual['refused_draws']} draws refused), {len(actual['faults'])} faults")


def _begun(record: Path | None, seed: int) -> dict[str, Any]:
    """Returns what a record of the same seed and programs holds, or an empty one."""
    sources = b"".join(Path(module.__file__).read_bytes() for module in (sys.modules[__name__], draws))
    empty = {"seed": seed, "programs": hashlib.sha256(sources).hexdigest(), "configs": 0, "refused_draws": 0}
    empty |= {"properties": {}, "faults": []}
    remaining = json.loads(record.read_text("utf-8")) if record and record.exists() else {}
    same = all(remaining.get(name) == empty[name] for name in ("seed", "programs"))
    return {name: remaining[name] for name in empty} if same else empty


def _add(actual: dict[str, Any], seed: int) -> None:
    """Checks one config and adds the results."""
    actual["configs"] += 1
    try:
        case, findings = examine(seed)
        new = faults(case, findings)
    except Exception:
        new = [{"error": traceback.format_exc().splitlines()[-1]}]
    else:
        actual["refused_draws"] += case.refused
        for name, tolerance, value in findings:
            entry = actual["properties"].setdefault(
                name, {"times": 0, "tolerance": TOLERANCES[tolerance], "largest": 0.0}
            )
            entry |= {"times": entry["times"] + 1, "largest": max(entry["largest"], value)}
    for fault in new:
        actual["faults"].append({"seed": seed, **fault})
        print(actual["faults"][-1], flush=True)


if __name__ == "__main__":
    main()
