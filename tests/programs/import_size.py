"""Measures memory and time of the import of a made-up Llama of 2 GB in eight shards.

python -m tests.programs.import_size --record tests/programs/import_size.json

Each measurement is a process of its own, whose memory is the largest resident set, of Python and JAX as well. The files
are in the page cache, so that copies and conversions are measured rather than the disk. The rate is that of the import
into parameters (`hf.load`, less the tracing of the model, which takes half a second), relative to
`safetensors.numpy.load_file` on all shards. Times are the shortest of several; those of the processor vary less if
other work shares the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests import commands
from tformer_jax.base.cpu import keep_memory, peak_bytes
from tformer_jax.base.numbers import MIB
from tformer_jax.runs import provenance

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
LAYERS = {"float32": 8, "bfloat16": 20}
"""Number of layers of a model of 2 GB, by the type of its arrays."""
SHARDS, ROUNDS = 8, 7
MEMORY, RATE = 1.15, 0.6
"""Largest memory relative to the size of the files, and smallest rate relative to that of `load_file`."""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays by their names."""
    D, F, V = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    KV = D // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        result |= {f"{stem}self_attn.{name}_proj.weight": (D, D) for name in "qo"}
        result |= {f"{stem}self_attn.{name}_proj.weight": (KV, D) for name in "kv"}
        result |= {f"{stem}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        result |= {f"{stem}mlp.down_proj.weight": (D, F)}
        result |= {f"{stem}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    return result | {"model.norm.weight": (D,), "lm_head.weight": (V, D)}


def make(folder: Path, dtype: str) -> int:
    """Writes the checkpoint with random values; returns its size in bytes."""
    import ml_dtypes
    from safetensors.numpy import save_file

    rng, kind = np.random.default_rng(0), np.dtype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": LAYERS[dtype], "dtype": dtype}))
    sizes = shapes(LAYERS[dtype])
    total, places, shard = sum(int(np.prod(shape)) for shape in sizes.values()) * kind.itemsize, {}, {}
    size, number = 0, 1
    for name, shape in sizes.items():
        shard[name] = rng.standard_normal(shape, np.float32).astype(kind)
        size += shard[name].nbytes
        if size >= number * total / SHARDS:
            file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard, number = {}, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def load_files(folder: Path) -> Any:
    """Reads all shards by safetensors."""
    from safetensors.numpy import load_file

    return [load_file(path) for path in sorted(folder.glob("*.safetensors"))]


def load_parameters(folder: Path) -> Any:
    """Imports the checkpoint as parameters."""
    import jax

    from tformer_jax.interop import hf

    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    cfg, params = hf.load(folder, param_dtype=dtype)
    return cfg, jax.block_until_ready(params)


KINDS = {"load_file": load_files, "hf.load": load_parameters}


def measure(kind: str, folder: Path) -> dict[str, float]:
    """Returns seconds and bytes of one way to read a folder, in this process."""
    import jax

    import tformer_jax.interop.hf  # noqa: F401  # whose import is not measured
    from tformer_jax.models import registry

    keep_memory()  # as every command does
    jax.numpy.zeros(1).block_until_ready()
    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    result = KINDS[kind](folder)
    actual = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu, "memory": peak_bytes()}
    if kind == "hf.load":  # the tracing of the model, which takes the same time for arrays of any size
        registry.shapes.cache_clear()
        start, cpu = time.perf_counter(), time.process_time()
        registry.shapes(registry.build(result[0]))
        actual["seconds"] -= time.perf_counter() - start
        actual["cpu_seconds"] -= time.process_time() - cpu
    return actual | {"before": before}


def measured(kind: str, folder: Path) -> dict[str, float]:
    """Returns what `measure` returns in a process of its own."""
    command = [sys.executable, "-m", "tests.programs.import_size", "--measure", kind, str(folder)]
    actual: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return actual


def compare(dtype: str, place: str | None, rounds: int) -> dict[str, Any]:
    """Returns the figures of both ways, whose processes alternate: the shortest times and the largest memory."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        size = make(Path(folder), dtype)
        measurements = [{kind: measured(kind, Path(folder)) for kind in KINDS} for _ in range(rounds)]
    best = {
        name: {kind: min(each[kind][name] for each in measurements) for kind in KINDS}
        for name in ("seconds", "cpu_seconds")
    }
    memory = {kind: max(each[kind]["memory"] for each in measurements) for kind in KINDS}
    return {
        "size_mib": round(size / MIB, 1),
        "process_before_mib": round(max(each["hf.load"]["before"] for each in measurements) / MIB, 1),
        **{name: {kind: round(value, 2) for kind, value in times.items()} for name, times in best.items()},
        "memory_over_size": {kind: round(value / size, 3) for kind, value in memory.items()},
        **{f"rate_by_{name}": round(times["load_file"] / times["hf.load"], 3) for name, times in best.items()},
    }


def main() -> None:
    """Prints and records the figures; exits with 1 if one of them is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--folder", help="folder for 2 GB of temporary files")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes of each way")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], Path(options.measure[1]))))
        return
    revision = provenance.collect()["git_revision"]
    actual = {dtype: compare(dtype, options.folder, options.rounds) for dtype in LAYERS}
    print(json.dumps(actual, indent=2))
    if options.record:
        limits = {"memory_over_size": MEMORY, "rate": RATE}
        facts = {"git_revision": revision, "limits": limits, "load_average": os.getloadavg()[0], **actual}
        commands.write_record(options.record, "tests.programs.import_size", **facts)
    fits = [
        each["memory_over_size"]["hf.load"] <= MEMORY and each["rate_by_seconds"] >= RATE for each in actual.values()
    ]
    raise SystemExit(not all(fits))


if __name__ == "__main__":
    main()
