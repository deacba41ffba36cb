"""`scripts/describe.py`: shows what a model costs before anything runs."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.cli.common import add_number, format_size, new_parser
from tformer_jax.cli.config_file import read_config
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.config import MESH_PRESETS, Config, DataConfig, read_mesh
from tformer_jax.config.sizes import assumption, with_sizes
from tformer_jax.config.task import tasks_of_family

if TYPE_CHECKING:
    from tformer_jax.models.cost import Cost

DEFAULT_LENGTH = 1024


def main(argv: Sequence[str] | None = None) -> None:
    """Prints parameters by module, FLOPs per token and the size of the KV cache, or the program for a TPU slice."""
    options, overrides = parser().parse_known_args(argv)
    if options.preset:
        if overrides:
            raise UserError(f"unexpected argument {overrides[0]!r}; settings need --config")
        config = preset_config(options.preset)
    else:
        config = read_config(options.config, overrides)
        if assumed := assumption(config):
            print(assumed)
        config = dataclasses.replace(config, model=with_sizes(config))
    longest = config.model.max_length
    if options.length is not None and options.length > longest:
        raise UserError(f"--length {options.length}: must be at most model.max_length={longest}")
    length = options.length or min(DEFAULT_LENGTH, longest)
    if options.mesh:
        config = dataclasses.replace(config, parallel=read_mesh(options.mesh))
    if options.topology:
        from tformer_jax.lab.commands.topology import print_program

        print_program(config, options, length)
        return
    if options.mesh or options.decode:
        raise UserError(f"{'--mesh' if options.mesh else '--decode'}: add --topology, such as --topology v5e:4x4")
    from tformer_jax.models import cost

    batch = options.batch or 1
    model_cost = cost.estimate(config.model, batch, length, cache_dtype=config.decode.cache_dtype)
    print_cost(config.name, model_cost, batch, length)


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate."""
    result = new_parser("describe", "Shows what a model costs. Nothing is trained.")
    which = result.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", metavar="FILE[:VARIANT]", help="for example configs/translate_cldr.py")
    which.add_argument("--preset", metavar="NAME", help="for example gpt2, llama3_8b, t5_base")
    add_number(result, "--batch", "global batch size (default: 1, or 1 per device with --topology)", unit="B")
    add_number(
        result,
        "--length",
        f"sequence length, at most max_length (default: {DEFAULT_LENGTH}, or max_length if that is less)",
        unit="T",
    )
    result.add_argument(
        "--topology",
        metavar="KIND:AxB",
        help="compile the train step for a TPU slice, such as v5e:16x16, and show the memory, the collectives and "
        "the bound on utilization of one device (needs libtpu)",
    )
    result.add_argument("--decode", action="store_true", help="with --topology: compile a decoding step instead")
    result.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="with --topology: a mesh such as data=4,fsdp=8,tensor=2, or a preset: "
        f"{', '.join(MESH_PRESETS)} (default: the config's)",
    )
    return result


def preset_config(name: str) -> Config:
    """Returns a config with the model of a preset, and data settings that fit it."""
    model = presets.build(name)
    task = tasks_of_family(model.family)[0]
    source, objective, batching = task.sources[0], task.objectives[0], task.batchings[0]
    data = DataConfig(source=source, objective=objective, batching=batching, window=1, bucket_lengths=(1,))
    return Config(name=name, model=model, data=data)


def print_cost(name: str, model_cost: "Cost", batch: int, length: int) -> None:
    """Prints a table of the parameters by module, and a table of everything else."""
    console = table_console()
    shares = [(module, f"{size:,}", f"{size / model_cost.total:.1%}") for module, size in model_cost.parameters.items()]
    title = escape(f"{name}: {model_cost.total:,} parameters")
    console.print(make_table(("module", "parameters", "share"), shares, title=title))
    rows = counted(batch, "row")
    per_token = model_cost.forward_flops / model_cost.tokens
    costs = {
        "parameters without embeddings": f"{model_cost.total - model_cost.embeddings:,}",
        "FLOPs per token, forward": f"{per_token:.4g}",
        "FLOPs per token, training (3 x forward)": f"{3 * per_token:.4g}",
        "parameters": format_size(model_cost.parameter_bytes),
        "KV cache of decoding": format_size(model_cost.cache_bytes),
    }
    console.print(make_table(("", "value"), costs.items(), title=f"batch of {rows} of {counted(length, 'token')}"))
