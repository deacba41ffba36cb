"""Compares predicted memory and traffic with those of the compiled step, on eight simulated CPU devices.

python -m tests.memory --record tests/memory.json
python -m tests.memory --only lm/fsdp seq2seq/tp
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tests import commands
from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, read_mesh
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import optimizers, state
from tformer_jax.train.scaling.compiler import CPU
from tformer_jax.train.scaling.layout import layout, mesh_sizes
from tformer_jax.train.scaling.memory import memory
from tformer_jax.train.scaling.traffic import Transfer, traffic
from tformer_jax.train.step import compiled, make_train_step

DEVICES, MIB, TOLERANCE = 8, 2**20, 0.15
SIZES = {"dim": 512, "num_heads": 8, "ffn_dim": 2048, "vocab_size": 8000, "max_length": 256, "attention_bias": ()}
LM = {**SIZES, "family": "decoder_lm", "position": "rotary", "dropout": 0.0}
MODELS = {
    "lm": LM,
    "lm, dropout": {**LM, "dropout": 0.1, "attention_dropout": 0.1},
    "lm, remat in a loop": {**LM, "remat": "nothing_saveable", "scan_layers": True},
    "lm, llama": {**LM, "ffn": "gated", "ffn_bias": False, "activation": "silu", "norm": "rmsnorm", "num_kv_heads": 2},
    "lm, adafactor": LM,
    "lm, accumulate": LM,
    "seq2seq": {**SIZES, "source_vocab_size": 8000, "tie_embeddings": "all", "dropout": 0.0},
    "classifier": {**SIZES, "family": "classifier", "num_classes": 2, "dropout": 0.0},
}
PRESETS = ("dp", "zero1", "fsdp", "tp", "fsdp+tp")
SOME = {"lm, accumulate": ("dp", "fsdp")} | dict.fromkeys(
    ("lm, dropout", "lm, llama", "lm, adafactor", "classifier"), ("dp", "fsdp", "tp")
)
"""Models that are compared on some meshes only."""
DTYPES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "u64": 8, "s64": 8, "f64": 8}
COLLECTIVE = re.compile(r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line a case, and writes all of it to `--record`."""
    options = parser().parse_args(argv)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    cases = []
    for name in options.only or [f"{model}/{mesh}" for model in MODELS for mesh in SOME.get(model, PRESETS)]:
        cases.append(compare(*name.split("/"), options.batch, options.length))
        one = cases[-1]
        print(
            f"{name:28} predicted {one['predicted'] / MIB:7.1f} MiB, measured {one['measured'] / MIB:7.1f}, "
            f"{one['error']:+.1%}; sent {sizes(one['sent_predicted'])}, measured {sizes(one['sent_measured'])}",
            flush=True,
        )
    if options.record:
        commands.write_record(options.record, "tests.memory", devices=DEVICES, cases=cases)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__)
    result.add_argument("--only", nargs="+", metavar="MODEL/MESH")
    result.add_argument("--batch", type=int, default=8, metavar="B")
    result.add_argument("--length", type=int, default=256, metavar="T")
    result.add_argument("--record", type=Path, metavar="FILE")
    return result


def config(model: str, mesh: str) -> Config:
    """A config of realistic size."""
    cfg = ModelConfig(**MODELS[model])
    data = DataConfig(source="cldr_translation") if cfg.family == "seq2seq" else DataConfig(source="cldr_language")
    if cfg.family == "decoder_lm":
        data = DataConfig(source="stdlib_text", batching="windows")
    optimizer = "adafactor" if "adafactor" in model else "adamw"
    return Config(
        model=cfg,
        data=data,
        optim=OptimConfig(optimizer=optimizer, schedule="constant", learning_rate=1e-3, weight_decay=0.1),
        train=TrainConfig(accumulate=4 if "accumulate" in model else 1),
        parallel=read_mesh(mesh),
    )


def compare(model: str, mesh: str, batch: int, length: int) -> dict[str, Any]:
    """Prediction and measurement of one case, in bytes."""
    cfg = config(model, mesh)
    batch *= cfg.train.accumulate
    found = layout(cfg, mesh_sizes(cfg.parallel, None if "=" in mesh else DEVICES), batch, length)
    program = step(cfg, batch, length)
    analysis = program.memory_analysis()
    measured = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    measured += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    predicted = memory(found, CPU)
    return {
        "model": model,
        "mesh": mesh,
        "batch": [batch, length],
        "predicted": predicted.peak,
        "measured": measured,
        "error": round(predicted.peak / measured - 1, 4),
        "parts": {**predicted.held, **predicted.backward, **predicted.update},
        "sent_predicted": by_kind(traffic(found, CPU)),
        "sent_measured": collectives(program.as_text()),
    }


def step(cfg: Config, batch: int, length: int) -> Any:
    """The compiled training step of `train/step.py`, for shapes alone."""
    mesh = make_mesh(cfg.parallel)
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    before = start(cfg, mesh)
    where = rules.batch_sharding(mesh)
    shapes = {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)
        for key, array in registry.example_batch(cfg.model, batch, length).items()
    }
    return compiled(make_train_step(model, optimizer, cfg), before, mesh).lower(before, shapes).compile()


def start(cfg: Config, mesh: Mesh) -> state.TrainState:
    """The state before the first step, as shapes."""
    model = registry.build(cfg.model)
    return state.abstract(model, optimizers.build(cfg, registry.shapes(model)), cfg, mesh)


def by_kind(found: Iterable[Transfer]) -> dict[str, int]:
    """Bytes of the arrays of each kind of collective."""
    total = Counter[str]()
    for one in found:
        total[one.kind] += one.array
    return dict(total)


def collectives(program: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective in the text of a program; those in a loop count once."""
    found = Counter[str]()
    for shapes, kind in COLLECTIVE.findall(program):
        for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = DTYPES[dtype]
            for dimension in filter(None, dimensions.split(",")):
                size *= int(dimension)
            found[kind] += size
    return dict(found)


def sizes(found: dict[str, int]) -> str:
    """For people."""
    return ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in sorted(found.items())) or "nothing"


if __name__ == "__main__":
    main()
