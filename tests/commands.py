"""Real training commands in separate processes, small enough to be killed and repeated many times."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from tformer_jax import config
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import provenance, run_folder
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.runs.run_folder import write_json
from tformer_jax.train import optimizers, state

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "model.dim": 16,
    "model.num_heads": 2,
    "model.ffn_dim": 16,
    "model.dropout": 0.1,
    "train.steps": 120,
    "train.log_every": 7,
    "train.eval_every": 40,
    "train.checkpoint_every": 5,
    "train.ema_decay": 0.9,
    "train.accumulate": 2,
    "eval.examples": 8,
    "eval.samples": 0,
    "data.heldout_examples": 20,
    "decode.max_new_tokens": 4,
}
LM = {
    **{name: value for name, value in SMALL.items() if name != "data.heldout_examples"},
    "model.decoder_layers": 1,
    "data.batching": "packed",
    "data.window": 64,
    "data.batch_size": 4,
    "data.vocab_size": 400,
    "eval.examples": 2,
}
PAIRS = {**SMALL, "model.encoder_layers": 1, "model.decoder_layers": 1, "data.batch_tokens": 512}
MESSAGES = {
    **{name: value for name, value in PAIRS.items() if name != "data.heldout_examples"},
    "data.directions": "('en-de','en-fr')",
    "data.zero_shot": "('de-fr',)",
    "data.temperature": 3.0,
    "data.bucket_lengths": "(16,64)",
    "data.vocab_size": 400,
}
NOISE = {"data.transforms": "({'kind':'typos','probability':0.5},{'kind':'case'},'word_swap','bpe_dropout')"}
STAGES = {
    **{name: value for name, value in MESSAGES.items() if name != "data.temperature"},
    "data.transforms": "('typos',)",
    "data.stages": "('en-de without transforms until step 20', 'en-de 3 to 1, en-fr 0 to 2 until step 45', "
    "'linearly to en-fr for 12000 tokens', 'temperature 5')",
}
TEXTS = {**SMALL, "model.encoder_layers": 1, "data.batch_tokens": 1024}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed language model": ("configs/lm_stdlib.py", LM),
    "bucketed translation": ("configs/translate_cldr.py", PAIRS | NOISE),
    "translation of many languages": ("configs/translate_gettext.py", MESSAGES),
    "translation in stages": ("configs/translate_gettext.py", STAGES),
    "classification": ("configs/classify_cldr.py", TEXTS),
}


def command(kind: str, run: Path, *flags: str, **changes: Any) -> list[str]:
    """Returns the command of `scripts/train.py` on a small config; `changes` are settings with `__` for the dot."""
    path, settings = KINDS[kind]
    settings = settings | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    return [sys.executable, "scripts/train.py", "--config", path, "--run", str(run), *overrides, *flags]


def start(
    arguments: list[str], cache: Path, variables: Mapping[str, str] = MappingProxyType({}), **options: Any
) -> subprocess.Popen:
    """Starts a command that caches compiled programs in the folder `cache`, with further environment variables."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **variables,
    }
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(arguments, env=environment, text=True, **options)


def write_record(path: Path, module: str, **facts: Any) -> None:
    """Writes the results of `python -m module`, with versions, revision and hardware; of absolute paths, the name."""
    command = shlex.join(["python", "-m", module, *map(without_folder, sys.argv[1:])])
    write_json(path, {**provenance.collect(), "command": command, **facts})


def without_folder(text: str) -> str:
    """Returns the name of an absolute path; other texts as they are."""
    return Path(text).name if Path(text).is_absolute() else text


def describe_run(run: Path) -> dict[str, Any]:
    """Returns how a finished run was trained: its command, settings that differ from the defaults, seed and sizes."""
    result, cfg = run_folder.read_result(run), config.load(run / "config.json")
    names = ("name", "command", "hardware", "seed", "steps", "tokens", "seconds", "parameters")
    changed, values = {*cfg.changed_settings()}, config.flat(cfg)
    settings = {name: without_folder(str(value)) for name, value in values.items() if name in changed}
    return {**{name: result[name] for name in names}, "config": settings}


def records(run: Path) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl without the values that depend on the clock."""
    clock = ("tokens_per_second", "flops_per_second", "data_wait_percent", "seconds", "memory_bytes")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in clock} for line in lines]


def last_state(run: Path) -> state.TrainState:
    """Restores the newest checkpoint of a run."""
    cfg = config.load(run / "config.json")
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    abstract = state.abstract(model, optimizer, cfg, make_mesh(config.ParallelConfig(data=1)))
    keeper = Checkpointer(run_folder.checkpoints(run))
    actual, _ = keeper.restore(abstract)
    keeper.close()
    return actual


def differences(run: Path, expected: Path) -> list[str]:
    """Returns the differences between two runs, compared bit for bit."""
    actual = [f"state{jax.tree_util.keystr(path)}" for path in _unequal(last_state(run), last_state(expected))]
    pairs = zip(records(run), records(expected), strict=False)
    actual += [f"metrics {mine} instead of {theirs}" for mine, theirs in pairs if mine != theirs]
    if len(records(run)) != len(records(expected)):
        actual.append(f"{len(records(run))} metric records instead of {len(records(expected))}")
    return actual


def _unequal(mine: Any, theirs: Any) -> list[Any]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(theirs), strict=True)
    return [path for (path, leaf), other in pairs if not np.array_equal(leaf, other)]
