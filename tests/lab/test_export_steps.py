"""Exported steps compute what the run does, in a process without this package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import own_runs
from tformer_jax.base.errors import UserError
from tformer_jax.lab.commands import export_steps
from tformer_jax.models import registry
from tformer_jax.nn.module import named_leaves
from tformer_jax.train import optimizers
from tformer_jax.train.state import TrainState
from tformer_jax.train.step import make_train_step

flatbuffers = pytest.importorskip("flatbuffers")
ROWS, LENGTH = 2, 8
SAVE = """
import sys
from safetensors.numpy import save_file
assert "tformer_jax" not in sys.modules
results = {"logits": np.asarray(logits), **{f"metrics/{name}": np.asarray(x) for name, x in metrics.items()}}
save_file(results | {name: np.asarray(x) for name, x in state.items()}, "results.safetensors")
"""


@pytest.mark.parametrize("name", rest_slow(["llama", "marian", "mixtral"], 1))
def test_another_process_computes_the_same(name, tmp_path):
    folder = tmp_path / "out"
    run = tj.load(own_runs.make(tmp_path / "run", name))
    trains = name != "llama"  # whose train step takes long to compile
    flags = ("--rows", str(ROWS), "--length", str(LENGTH), *(["--train"] if trains else []))
    export_steps.main(["--run", str(run.path), str(folder), *flags])
    rng = np.random.default_rng(0)
    batch = {
        key: rng.integers(3, 60, ids.shape).astype(np.int32)
        for key, ids in registry.example_batch(run.config.model, ROWS, LENGTH).items()
    }
    batch[run.model.inputs[0]][1, 5:] = -1
    save_file(batch, folder / "batch.safetensors")
    program = "\n".join(re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL))
    program = re.sub(r"(?m)^batch = .*$", 'batch = load_file("batch.safetensors")', program)
    keys, read = sorted(run.model.inputs), 'load_file("batch.safetensors")[key]'
    program = re.sub(r"(?m)^inputs = .*$", f"inputs = {{key: {read} for key in {keys}}}", program)
    environment = {**os.environ, "PYTHONPATH": str(Path(flatbuffers.__file__).parents[1])}
    program += SAVE if trains else "state, metrics = {}, {}\n" + SAVE
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, env=environment)
    found = load_file(folder / "results.safetensors")
    arrays = {key: jnp.asarray(ids) for key, ids in batch.items()}
    logits = run.model.apply({"params": run.params}, **run.model.arguments({key: arrays[key] for key in keys}))
    assert_close(found["logits"], logits, 1e-5)
    if not trains:
        return
    model = registry.build(run.config.model, train=True)
    optimizer = optimizers.build(run.config, registry.shapes(model))
    zero = jnp.zeros((), jnp.int32)
    start = TrainState(step=zero, skipped=zero, params=run.params, opt_state=optimizer.init(run.params), ema=None)
    new, metrics = jax.jit(make_train_step(model, optimizer, run.config))(start, arrays)
    assert_close(found["metrics/loss"], metrics["loss"], 1e-5)
    assert found["step"] == 1
    for path, leaf in named_leaves(new.params):
        assert_close(found[f"params/{path}"], leaf, 1e-4)


def test_a_length_beyond_the_model_is_refused(tmp_path):
    run = own_runs.make(tmp_path / "run", "llama")
    with pytest.raises(UserError, match="--length 64: the model reads 32 tokens; write at most that"):
        export_steps.main(["--run", str(run), str(tmp_path / "out")])
