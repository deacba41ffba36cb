"""`scripts/export_steps.py`: writes the forward pass and the train step of a run as StableHLO, for programs without us.

https://docs.jax.dev/en/latest/export/export.html describes the files, which any process with JAX can call.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.packages import require
from tformer_jax.cli.common import check_writable_folder, integer, load_run, run_parser

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
README = """# {name}

The forward pass{train} of a model of tformer_jax, as StableHLO for {platforms}: batches of {rows} rows of {length}
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


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the programs, their arrays and a README.md to a new folder."""
    options = parser().parse_args(argv)
    folder: Path = options.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: name a new folder")
    check_writable_folder(folder, "FOLDER")
    require("scripts/export_steps.py", ("flatbuffers", "safetensors"), "stablehlo")
    run = load_run(options)
    longest = run.config.model.max_length
    if options.length > longest:
        raise UserError(f"--length {options.length}: the model reads {longest} tokens; write at most that")
    from tformer_jax.models import registry
    from tformer_jax.special_tokens import PAD

    batch = registry.example_batch(run.config.model, options.rows, options.length)
    inputs = {name: batch[name] for name in run.model.inputs}
    folder.mkdir(exist_ok=True)
    _write_forward(folder, run, inputs, options.platforms)
    if options.train:
        _write_train_step(folder, run, batch, options.platforms)
    sizes = {"rows": options.rows, "length": options.length, "pad": PAD, "platforms": ", ".join(options.platforms)}
    text = README + (TRAIN_STEP if options.train else "")
    train = " and the train step" if options.train else ""
    given = {"inputs": _zeros(inputs), "batch": _zeros(batch)}
    readme = text.format(name=run.config.name, train=train, **sizes, **given)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "export_steps",
        "Writes the forward pass of a run (parameters and ids -> logits) as StableHLO, which any process with JAX can "
        "call without this package, with its parameters.",
    )
    result.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write, new or empty")
    for flag, default, meaning in (("--rows", 8, "rows of a batch"), ("--length", 64, "tokens of a row, with padding")):
        result.add_argument(
            flag, type=integer(1), default=default, metavar="N", help=f"{meaning} (default: %(default)s)"
        )
    result.add_argument("--train", action="store_true", help="write the train step and its initial state, too")
    result.add_argument(
        "--platforms",
        nargs="+",
        choices=PLATFORMS,
        default=["cpu"],
        metavar="NAME",
        help=f"devices that the programs are for: {', '.join(PLATFORMS)} (default: cpu)",
    )
    return result


def _write_forward(folder: Path, run: Any, inputs: dict[str, Any], platforms: Sequence[str]) -> None:
    """Writes `forward.bin`, a function of arrays by name and of ids, and `params.safetensors`."""
    from flax.traverse_util import unflatten_dict

    from tformer_jax.nn.module import named_leaves

    def forward(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
        tree = unflatten_dict(params, sep="/")
        return run.model.apply({"params": tree}, **run.model.arguments(inputs))

    _write(folder, "forward", "params", forward, dict(named_leaves(run.params)), inputs, platforms)


def _write_train_step(folder: Path, run: Any, batch: dict[str, Any], platforms: Sequence[str]) -> None:
    """Writes `train_step.bin`, a function of the arrays of the state by name and of a batch, and `state.safetensors`.

    The state has the run's parameters, and new moments of the optimizer.
    """
    import jax

    from tformer_jax.config import ParallelConfig
    from tformer_jax.models import registry
    from tformer_jax.parallel.mesh import make_mesh
    from tformer_jax.train import optimizers, state
    from tformer_jax.train.step import make_train_step

    cfg, model = run.config, registry.build(run.config.model, train=True)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    mesh = make_mesh(ParallelConfig(data=1), jax.local_devices()[:1])
    start = state.initializer(model, optimizer, cfg, mesh)[0](run.params)
    step = make_train_step(model, optimizer, cfg)
    paths, structure = jax.tree_util.tree_flatten_with_path(start)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]

    def train_step(arrays: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        new, metrics = step(jax.tree.unflatten(structure, [arrays[name] for name in names]), batch)
        return dict(zip(names, jax.tree.leaves(new), strict=True)), metrics

    arrays = dict(zip(names, (leaf for _, leaf in paths), strict=True))
    _write(folder, "train_step", "state", train_step, arrays, batch, platforms)


def _write(
    folder: Path,
    name: str,
    arrays_name: str,
    function: Callable[..., Any],
    arrays: dict[str, Any],
    batch: dict[str, Any],
    platforms: Sequence[str],
) -> None:
    """Writes a function of arrays by name and of a batch, and the arrays."""
    import jax
    import numpy as np
    from jax import export
    from safetensors.numpy import save_file

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (arrays, batch))
    exported = export.export(jax.jit(function), platforms=list(platforms))(*shapes)
    (folder / f"{name}.bin").write_bytes(exported.serialize())
    contiguous = {name: np.asarray(leaf, order="C") for name, leaf in jax.device_get(arrays).items()}
    save_file(contiguous, folder / f"{arrays_name}.safetensors")


def _zeros(batch: dict[str, Any]) -> str:
    """Returns the items of a dict of zeros in Python."""
    return ", ".join(f'"{name}": np.zeros({tuple(ids.shape)}, np.{ids.dtype})' for name, ids in batch.items())
