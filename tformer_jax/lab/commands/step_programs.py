"""The programs of `scripts/export_steps.py`: the forward pass, the train step and decoding of a run as StableHLO."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import export
from safetensors.numpy import save_file

from tformer_jax.inference.constraints import Constraints, forbid
from tformer_jax.inference.forced import first_tokens
from tformer_jax.inference.layout import unroll_layers
from tformer_jax.inference.model_step import step_fn
from tformer_jax.models import registry
from tformer_jax.nn.module import named_leaves
from tformer_jax.parallel.mesh import first_device_mesh
from tformer_jax.special_tokens import PAD
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import make_train_step

README = """# {name}

The forward pass{more} of a model of tformer_jax, as StableHLO for {platforms}: batches of {rows} rows of {length}
tokens, ids in int32, and {pad} for padding.

```python
import numpy as np
from jax import export
from safetensors.numpy import load_file

forward = export.deserialize(open("forward.bin", "rb").read())
params = load_file("params.safetensors")
inputs = {{{inputs}}}
logits = forward.call(params, inputs)
```
"""
TRAIN_STEP = """
```python
train_step = export.deserialize(open("train_step.bin", "rb").read())
state = load_file("state.safetensors")
batch = {{{batch}}}
state, metrics = train_step.call(state, batch)
```
"""
DECODING = """
`start.bin` reads {read}, and `step.bin` one more token per row. Both return the logits of the next token, -inf for
tokens that the run never generates, and the cache, which has room for {new} new tokens. `outputs` are the tokens of
greedy decoding without penalties and minimum lengths; each output ends at one of the tokens {eos}.{first}

```python
start, step = (export.deserialize(open(f"{{name}}.bin", "rb").read()) for name in ("start", "step"))
given = {{{given}}}
next_logits, cache = start.call(params, given)
outputs = []
for _ in range({new}):
    outputs.append(np.argmax(next_logits, axis=-1).astype(np.int32))
    next_logits, cache = step.call(params, outputs[-1], cache)
```
"""


def write_folder(folder: Path, run: Any, options: argparse.Namespace) -> None:
    """Writes the programs that the options name, their arrays and a README.md."""
    batch = registry.example_batch(run.config.model, options.rows, options.length)
    inputs = {name: batch[name] for name in run.model.inputs}
    if options.train:
        _write_train_step(folder, run, batch, options.platforms)
    if options.decode:
        model, params = unroll_layers(run.model, run.params)
        run = dataclasses.replace(run, model=model, params=params)
    _write_forward(folder, run, inputs, options.platforms)
    given = _write_decoding(folder, run, inputs, options) if options.decode else {}
    sizes = {"rows": options.rows, "length": options.length, "pad": PAD, "platforms": ", ".join(options.platforms)}
    parts = {TRAIN_STEP: ("the train step", options.train), DECODING: ("decoding", options.decode)}
    text = README + "".join(part for part, (_, wanted) in parts.items() if wanted)
    more = "".join(f" and {what}" for what, wanted in parts.values() if wanted)
    special = run.tokenizers.target.special
    sources = f"sources and the decoder's first inputs, {special.start}"
    read = sources if run.model.reads_source else "prompts, with padding before them"
    first = _describe_first_tokens(run) if options.decode else ""
    tokens = {"new": options.decode, "read": read, "eos": list(special.eos), "first": first}
    arrays = {"inputs": _zeros(inputs), "batch": _zeros(batch), "given": _zeros(given)}
    readme = text.format(name=run.config.name, more=more, **sizes, **tokens, **arrays)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _write_forward(folder: Path, run: Any, inputs: dict[str, Any], platforms: Sequence[str]) -> None:
    """Writes `forward.bin`, a function of arrays by name and of ids, and `params.safetensors`."""

    def forward(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
        tree = unflatten_dict(params, sep="/")
        return run.model.apply({"params": tree}, **run.model.arguments(inputs))

    params = dict(named_leaves(run.params))
    _write_program(folder, "forward", forward, (params, inputs), platforms)
    _write_arrays(folder / "params.safetensors", params)


def _write_train_step(folder: Path, run: Any, batch: dict[str, Any], platforms: Sequence[str]) -> None:
    """Writes `train_step.bin`, a function of the arrays of the state by name and of a batch, and `state.safetensors`.

    The state has the run's parameters, and new moments of the optimizer.
    """
    cfg, model = run.config, registry.build(run.config.model, train=True)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    mesh = first_device_mesh()
    start = state.initializer(model, optimizer, cfg, mesh)[0](run.params)
    step = make_train_step(model, optimizer, cfg, vocab_size=run.tokenizers.target.vocab_size)

    def train_step(arrays: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        new, metrics = step(_restored(arrays, start), batch)
        return dict(named_leaves(new)), metrics

    arrays = dict(named_leaves(start))
    _write_program(folder, "train_step", train_step, (arrays, batch), platforms)
    _write_arrays(folder / "state.safetensors", arrays)


def _restored(arrays: dict[str, Any], tree: Any) -> Any:
    """Inverts `named_leaves`, for a tree like another one."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name, _ in named_leaves(tree)])


def _describe_first_tokens(run: Any) -> str:
    """Returns a sentence about the tokens with which all outputs of the run start; "" if the model chooses them."""
    ids = first_tokens(run.config.decode, run.tokenizers.target, continues=run.model.continues).ids
    tags = run.config.data.target_tags
    parts = [f"the tokens {list(ids)}"] * bool(ids) + [f"the tag of the {side} language" for side in tags]
    if not parts:
        return ""
    return f" Outputs of the run start with {', then '.join(parts)}: take these in place of the first `argmax`."


def _write_decoding(folder: Path, run: Any, inputs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Writes `start.bin` and `step.bin`; returns example inputs of the first one.

    Both return float32 logits [B, V] and the cache, arrays by name, which the step takes after tokens, int32 [B].
    """
    model, decode = run.model, run.config.decode
    constraints = Constraints.from_config(decode, run.tokenizers.target)
    params = dict(named_leaves(run.params))

    def advance(params: dict[str, Any], tokens: jax.Array, cache: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits, cache = step_fn(model, unflatten_dict(params, sep="/"))(tokens, cache)
        return forbid(logits[:, 0], constraints), dict(named_leaves(cache))

    def make_cache(params: dict[str, Any], inputs: dict[str, jax.Array]) -> Any:
        variables, tokens = {"params": unflatten_dict(params, sep="/")}, inputs["tokens"]
        first: tuple[Any, ...] = (len(tokens),)
        last: tuple[Any, ...] = ((tokens != PAD).sum(axis=1),)
        if model.reads_source:
            mask = inputs["source"] != PAD
            first, last = (model.apply(variables, inputs["source"], mask, method="encode"), mask), ()
        length = tokens.shape[1] + options.decode
        return model.apply(variables, *first, length, *last, dtype=decode.cache_dtype, method="init_cache")

    def start(params: dict[str, Any], inputs: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
        return advance(params, inputs["tokens"], make_cache(params, inputs))

    def step(params: dict[str, Any], tokens: jax.Array, arrays: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        return advance(params, tokens[:, None], _restored(arrays, cache))

    given = {name: ids for name, ids in inputs.items() if name != "target_in"}
    if model.reads_source:
        given["tokens"] = jnp.zeros((options.rows, 1), jnp.int32)
    cache = jax.eval_shape(make_cache, params, given)
    tokens = jax.ShapeDtypeStruct((options.rows,), jnp.int32)
    _write_program(folder, "start", start, (params, given), options.platforms)
    _write_program(folder, "step", step, (params, tokens, dict(named_leaves(cache))), options.platforms)
    return given


def _write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    save_file({name: np.asarray(leaf, order="C") for name, leaf in jax.device_get(arrays).items()}, path)


def _write_program(
    folder: Path, name: str, function: Callable[..., Any], arguments: Any, platforms: Sequence[str]
) -> None:
    """Writes a function of arguments with these shapes and dtypes."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    exported = export.export(jax.jit(function), platforms=list(platforms))(*shapes)
    (folder / f"{name}.bin").write_bytes(exported.serialize())


def _zeros(batch: dict[str, Any]) -> str:
    """Returns the items of a dict of zeros in Python."""
    return ", ".join(f'"{name}": np.zeros({tuple(ids.shape)}, np.{ids.dtype})' for name, ids in batch.items())
