"""Exported steps compute what the run does, in a process without this package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import own_runs
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.lab.commands import export_steps
from tformer_jax.models import registry
from tformer_jax.nn.module import named_leaves
from tformer_jax.train import optimizers
from tformer_jax.train.state import TrainState
from tformer_jax.train.step import make_train_step

flatbuffers = pytest.importorskip("flatbuffers")
ROWS, LENGTH = 2, 8
NEW = 6
SAVE = """
import sys
from safetensors.numpy import save_file
assert "tformer_jax" not in sys.modules
results = {"logits": np.asarray(logits), **{f"metrics/{name}": np.asarray(x) for name, x in metrics.items()}}
results["outputs"] = np.stack(outputs, axis=1)
save_file(results | {name: np.asarray(x) for name, x in state.items()}, "results.safetensors")
"""


@pytest.mark.parametrize("name", rest_slow(["llama", "marian", "mixtral"], 1))
def test_another_process_computes_the_same(name, tmp_path):
    folder = tmp_path / "out"
    run = tj.load(own_runs.make(tmp_path / "run", name))
    trains = name != "llama"  # whose train step takes long to compile
    flags = ("--rows", str(ROWS), "--length", str(LENGTH), "--decode", str(NEW), *(["--train"] if trains else []))
    export_steps.main(["--run", str(run.path), str(folder), *flags])
    rng = np.random.default_rng(0)
    batch = {
        key: rng.integers(3, 60, ids.shape).astype(np.int32)
        for key, ids in registry.example_batch(run.config.model, ROWS, LENGTH).items()
    }
    batch[run.model.inputs[0]][1, 5:] = -1
    given, expected = greedy_outputs(run)
    save_file(batch, folder / "batch.safetensors")
    save_file(given, folder / "given.safetensors")
    program = "\n".join(re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL))
    program = re.sub(r"(?m)^(batch|given) = .*$", r'\1 = load_file("\1.safetensors")', program)
    keys, read = sorted(run.model.inputs), 'load_file("batch.safetensors")[key]'
    program = re.sub(r"(?m)^inputs = .*$", f"inputs = {{key: {read} for key in {keys}}}", program)
    environment = {**os.environ, "PYTHONPATH": str(Path(flatbuffers.__file__).parents[1])}
    program += SAVE if trains else "state, metrics = {}, {}\n" + SAVE
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, env=environment)
    actual = load_file(folder / "results.safetensors")
    assert [outputs_text(run, row) for row in actual["outputs"]] == expected
    arrays = {key: jnp.asarray(ids) for key, ids in batch.items()}
    logits = run.model.apply({"params": run.params}, **run.model.arguments({key: arrays[key] for key in keys}))
    assert_close(actual["logits"], logits, 1e-5)
    if not trains:
        return
    model = registry.build(run.config.model, train=True)
    optimizer = optimizers.build(run.config, registry.shapes(model))
    zero = jnp.zeros((), jnp.int32)
    start = TrainState(step=zero, skipped=zero, params=run.params, opt_state=optimizer.init(run.params), ema=None)
    new, metrics = jax.jit(make_train_step(model, optimizer, run.config))(start, arrays)
    assert_close(actual["metrics/loss"], metrics["loss"], 1e-5)
    assert actual["step"] == 1
    for path, leaf in named_leaves(new.params):
        assert_close(actual[f"params/{path}"], leaf, 1e-4)


def test_a_teacher_is_not_written(tmp_path):
    run = own_runs.make(tmp_path / "run", "llama")
    config = json.loads((run / "config.json").read_text())
    config["train"]["teacher"] = "runs/other"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the step of .* also takes the parameters of train.teacher='runs/other'"):
        export_steps.main(["--run", str(run), str(tmp_path / "out"), "--train", "--length", "8"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_scanned_layers_are_unrolled_for_decoding(tmp_path):
    """Regression test: it was an error, which left half a folder."""
    run = tj.load(own_runs.make(tmp_path / "run", "llama", scan_layers=True, decoder_layers=2))
    flags = ("--rows", str(ROWS), "--length", str(LENGTH), "--decode", str(NEW))
    export_steps.main(["--run", str(run.path), str(tmp_path / "out"), *flags])
    given, expected = greedy_outputs(run)
    start, step = (jax.export.deserialize((tmp_path / f"out/{name}.bin").read_bytes()) for name in ("start", "step"))
    params = load_file(tmp_path / "out/params.safetensors")
    logits, cache = start.call(params, given)
    outputs = []
    for _ in range(NEW):
        outputs.append(np.argmax(logits, axis=-1).astype(np.int32))
        logits, cache = step.call(params, outputs[-1], cache)
    assert [outputs_text(run, row) for row in np.stack(outputs, axis=1)] == expected


def greedy_outputs(run: tj.Run) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the inputs of `start.bin` for texts of two lengths, and the run's outputs."""
    tokenizer, texts = run.tokenizers.source, ("the cat", "a dog")
    pair, special = run.model.reads_source, tokenizer.special
    wrap = special.wrap_side if pair else special.wrap_text
    rows = np.full((ROWS, LENGTH), -1, np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = wrap(tokenizer.encode(text))
        row[slice(len(ids)) if pair else slice(LENGTH - len(ids), None)] = ids
    settings = {"strategy": "greedy", "max_new_tokens": NEW}
    if pair:
        return {"source": rows, "tokens": np.full((ROWS, 1), special.start, np.int32)}, run.translate(texts, **settings)
    return {"tokens": rows}, run.generate(texts, **settings)


def outputs_text(run: tj.Run, ids: np.ndarray) -> str:
    """Returns the text of an output up to its end."""
    ends = [place for place, token in enumerate(ids) if token in run.tokenizers.target.special.eos]
    return run.tokenizers.target.decode(ids[: ends[0] if ends else None].tolist())


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        (
            "llama",
            ("--length", "30", "--decode", "3"),
            "--decode 3: after 30 tokens, the model writes 2; write at most",
        ),
        ("bert", ("--length", "8", "--decode", "3"), "--decode is for translators and language models"),
    ],
)
def test_decoding_that_the_model_cannot_do_is_refused(name, flags, problem, tmp_path):
    run = own_runs.make(tmp_path / "run", name)
    with pytest.raises(UserError, match=problem):
        export_steps.main(["--run", str(run), str(tmp_path / "out"), *flags])


def test_a_length_beyond_the_model_is_refused(tmp_path):
    run = own_runs.make(tmp_path / "run", "llama")
    with pytest.raises(UserError, match="--length 64: the model reads 32 tokens; write at most that"):
        export_steps.main(["--run", str(run), str(tmp_path / "out")])


@pytest.mark.long
def test_the_first_tokens_of_all_outputs_are_named(tmp_path):
    """Regression test: the program wrote what the model prefers in their place."""
    run = own_runs.make(tmp_path / "run", "llama", decode=DecodeConfig(prefix="the cat"))
    ids = tj.load(run).tokenizers.target.encode("the cat")
    export_steps.main(["--run", str(run), str(tmp_path / "out"), "--length", "8", "--rows", "1", "--decode", "3"])
    named = re.search(
        r"Outputs of the run start with the tokens (\[.*?\]): take", (tmp_path / "out/README.md").read_text()
    )
    assert json.loads(named[1]) == list(ids)
