"""Compiles train steps for TPU slices and records the memory and communication of one device.

python -m tests.programs.topologies --record configs/results/topologies/tpu.json
python -m tests.programs.topologies --only "gpt2 v5e:4x4" --record gpt2.json

Requires libtpu (`pip install -e ".[aot]"`), and minutes per case. Other cases of an existing record are kept.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_jax.config import ParallelConfig
from tformer_jax.lab.commands.describe import preset_config
from tformer_jax.runs.hardware import CHIPS
from tformer_jax.runs.run_folder import write_json

LARGE = {"dtype": "bfloat16", "scan_layers": True, "remat": "nothing_saveable"}
EXPERTS = LARGE | {"decoder_layers": 4}
RING = LARGE | {"attention_backend": "ring", "attention_dropout": 0.0, "max_length": 16_384}


@dataclasses.dataclass(frozen=True)
class Case:
    """A published model on a mesh over a slice, with one row per batch shard."""

    preset: str
    topology: str
    parallel: dict[str, Any]
    model: dict[str, Any]
    length: int


CASES = {
    "gpt2 v5e:4x4": Case("gpt2", "v5e:4x4", {"preset": "fsdp"}, LARGE, 1024),
    "gpt2 v5e:16x16": Case("gpt2", "v5e:16x16", {"preset": "fsdp"}, LARGE, 1024),
    "llama3_8b v6e:4x4": Case("llama3_8b", "v6e:4x4", {"preset": "fsdp"}, LARGE, 4096),
    "llama3_8b v5e:16x16": Case("llama3_8b", "v5e:16x16", {"preset": "fsdp"}, LARGE, 4096),
    "llama3_8b fsdp+tp v6e:4x4": Case("llama3_8b", "v6e:4x4", {"preset": "fsdp+tp"}, LARGE, 4096),
    "llama3_8b fsdp+tp v5e:16x16": Case("llama3_8b", "v5e:16x16", {"preset": "fsdp+tp"}, LARGE, 4096),
    "t5_v1_1_base v5e:4x4": Case("t5_v1_1_base", "v5e:4x4", {"preset": "fsdp"}, LARGE, 512),
    "t5_v1_1_base v5e:16x16": Case("t5_v1_1_base", "v5e:16x16", {"preset": "fsdp"}, LARGE, 512),
    "nllb_200_600m v5e:16x16": Case("nllb_200_600m", "v5e:16x16", {"preset": "fsdp"}, LARGE, 512),
    "experts v6e:4x4": Case("mixtral_8x7b", "v6e:4x4", {"data": 1, "fsdp": 2, "expert": 8}, EXPERTS, 2048),
    "experts v5e:16x16": Case("mixtral_8x7b", "v5e:16x16", {"data": 1, "fsdp": 32, "expert": 8}, EXPERTS, 2048),
    "ring v5e:4x4": Case("gpt2", "v5e:4x4", {"data": 1, "fsdp": 4, "sequence": 4}, RING, 8192),
    "ring v5e:16x16": Case("gpt2", "v5e:16x16", {"data": 1, "fsdp": 16, "sequence": 16}, RING, 16_384),
}
"""For 16 and 256 chips each, except NLLB. `experts` has four of Mixtral's layers."""


def compiled(name: str) -> dict[str, Any]:
    """Returns the figures of one case."""
    from tformer_jax.lab.aot import programs, topology

    case, start = CASES[name], time.perf_counter()
    cfg = preset_config(case.preset)
    cfg = dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, **case.model), parallel=ParallelConfig(**case.parallel)
    )
    chip = CHIPS[case.topology.partition(":")[0]]
    actual, _ = programs.train_step(cfg, topology.slice_devices(case.topology), None, case.length)
    return {
        "case": name,
        **dataclasses.asdict(case),
        "rows": actual.rows,
        "seconds": round(time.perf_counter() - start),
        "memory": {
            "arguments": actual.arguments,
            "outputs": actual.outputs,
            "temporaries": actual.temporaries,
            "program": actual.code,
            "together": actual.hbm,
        },
        "collectives": [each._asdict() | {"sent": round(each.bytes_sent)} for each in actual.collectives],
        "flops": actual.flops,
        "least_seconds": {
            "computing": actual.seconds_computing(chip),
            "moving": actual.seconds_moving(chip),
            "sending": actual.seconds_sending(chip),
            "step": actual.seconds(chip, overlap=True),
            "step_without_overlap": actual.seconds(chip, overlap=False),
        },
        "largest_mfu": actual.utilization_bound(chip, overlap=True),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles each case in its own process, since libtpu describes only one slice per process."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.topologies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--record", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    written = json.loads(options.record.read_text())["cases"] if options.record.exists() else []
    cases = {case["case"]: case for case in written}
    for name in options.only:
        spawned = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as process:
            cases[name] = process.submit(compiled, name).result()
        print(name, json.dumps(cases[name]["memory"]), flush=True)
        versions = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "libtpu")}
        ordered = [cases[name] for name in CASES if name in cases]
        write_json(options.record, {"versions": versions, "cases": ordered})


if __name__ == "__main__":
    main()
