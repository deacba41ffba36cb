"""Compiles the train step or decoding step of a config for the devices of a mesh, and reports what it needs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tformer_jax.base.errors import LESS_MEMORY, UserError, out_of_memory
from tformer_jax.config import Config
from tformer_jax.lab.aot.hlo import Collective, collectives
from tformer_jax.models import cost, registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import BATCH_AXES, make_mesh
from tformer_jax.runs.hardware import Chip
from tformer_jax.runs.teacher import abstract as abstract_teacher
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """What one device needs for one call of a compiled program. Sizes are in bytes."""

    mesh: dict[str, int]
    """Sizes of the mesh axes larger than 1."""
    rows: int
    """Rows of the global batch."""
    length: int
    """Tokens per row."""
    arguments: int
    """Size of the state and the batch."""
    outputs: int
    """Size of the results that do not reuse the memory of arguments."""
    results: int
    """Size of all results."""
    temporaries: int
    """Peak size of temporary buffers: activations, gradients, gathered parameters, fragmentation."""
    code: int
    collectives: tuple[Collective, ...]
    useful_flops: float
    """FLOPs per device of the products in the model's formula, estimated by tracing.

    Attention counts all T x S scores, masked ones included.
    """
    flops: float
    """`useful_flops` and the recomputation due to `model.remat` and `train.loss_chunk`; an estimate, too."""

    @property
    def hbm(self) -> int:
        """Device memory required, in bytes: arguments, outputs, temporaries and the program itself."""
        return self.arguments + self.outputs + self.temporaries + self.code

    def seconds_computing(self, chip: Chip) -> float:
        """Returns the time to compute at the chip's peak bfloat16 rate, in seconds."""
        return self.flops / chip.flops

    def seconds_moving(self, chip: Chip) -> float:
        """Returns the time to read arguments, write results, and write and read temporaries, once each, in seconds."""
        return (self.arguments + self.results + 2 * self.temporaries) / chip.hbm

    def seconds_sending(self, chip: Chip) -> float:
        """Returns the time to communicate with all ICI links of the chip saturated, in seconds."""
        return sum(collective.bytes_sent for collective in self.collectives) / chip.ici

    def utilization_bound(self, chip: Chip, *, overlap: bool) -> float:
        """Returns the upper bound on the model FLOPs utilization (MFU) that follows from `seconds`."""
        return self.useful_flops / chip.flops / self.seconds(chip, overlap=overlap)

    def seconds(self, chip: Chip, *, overlap: bool) -> float:
        """Returns a lower bound on the time of a call, in which computation hides the traffic of memory, in seconds.

        Args:
            overlap: whether communication is hidden, too, instead of following.
        """
        parts = max(self.seconds_computing(chip), self.seconds_moving(chip)), self.seconds_sending(chip)
        return max(parts) if overlap else sum(parts)


def train_step(cfg: Config, devices: Sequence[jax.Device], batch: int | None, length: int) -> tuple[Program, Any]:
    """Compiles the train step of `cfg` for its mesh over `devices`.

    Args:
        batch: rows of the global batch; None: one for each batch shard and each micro-batch of `cfg.train.accumulate`.
        length: tokens per row.

    Returns:
        The resources that one device needs, and the compiled program.

    Raises:
        UserError: the mesh does not fit the devices, the model or the batch, or the program does not fit in HBM.
    """
    mesh = make_mesh(cfg.parallel, devices)
    rows = checked_rows(cfg, mesh, batch, length, micro_batches=cfg.train.accumulate)
    with rules.use_mesh(mesh):
        model = registry.build(cfg.model, train=True)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    start = state.abstract(model, optimizer, cfg, mesh)
    example = registry.example_batch(cfg.model, rows, length)
    where = rules.batch_sharding(mesh)
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for name, x in example.items()}
    teacher = abstract_teacher(cfg.train, mesh)
    step = jitted(make_train_step(model, optimizer, cfg, teacher=teacher), start, mesh)
    program = _compile(step.lower(start, arrays, teacher and teacher.params))
    useful, executed = _training_flops(cfg, rows, length)
    return _figures(program, mesh, rows, length, useful, executed), program


def decode_step(cfg: Config, devices: Sequence[jax.Device], batch: int | None, length: int) -> tuple[Program, Any]:
    """Compiles the step that decodes one token per row with a cache of `length` tokens; otherwise like `train_step`.

    Raises:
        UserError: as `train_step`, or the model is not a decoder_lm.
    """
    if not cfg.model.model_class.decodes or cfg.model.model_class.reads_source:
        raise UserError(f"--decode is for models of the family 'decoder_lm', and this is a {cfg.model.family!r}")
    mesh = make_mesh(cfg.parallel, devices)
    rows = checked_rows(cfg, mesh, batch, length, micro_batches=1)
    with rules.use_mesh(mesh):
        model = registry.build(dataclasses.replace(cfg.model, scan_layers=False))  # as decoding unrolls layers
    params = registry.sharded_shapes(model, mesh)
    dtype = cfg.decode.cache_dtype
    prompts = jnp.zeros(rows, jnp.int32)
    cache = jax.eval_shape(lambda: model.apply({}, rows, length, prompts, dtype=dtype, method="init_cache"))
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32, sharding=rules.batch_sharding(mesh))

    def step(params: Any, cache: Any, tokens: jax.Array) -> Any:
        with rules.use_mesh(mesh):
            return model.apply({"params": params}, tokens, cache, method="decode_step")

    program = _compile(jax.jit(step, donate_argnums=1).lower(params, cache, tokens))
    flops = rows * cost.forward_flops(cfg.model, registry.example_batch(cfg.model, 1, length), all_scores=True) / length
    return _figures(program, mesh, rows, length, flops, flops), program


def checked_rows(cfg: Config, mesh: Mesh, batch: int | None, length: int, *, micro_batches: int) -> int:
    """Returns the rows of the global batch (default: the fewest possible), which is computed in `micro_batches`.

    Raises:
        UserError: the mesh does not divide the model, the batch or the length.
    """
    rules.check_model(cfg, mesh.shape)
    ways = {name: mesh.shape[name] for name in BATCH_AXES} | {"train.accumulate": micro_batches}
    least = math.prod(ways.values())
    if batch is not None and batch % least:
        product = " * ".join(f"{name}={size}" for name, size in ways.items() if size > 1)
        raise UserError(f"--batch {batch}: must be a multiple of {product}; write {least * (batch // least + 1)}")
    if length % mesh.shape["sequence"]:
        raise UserError(f"--length {length}: must be a multiple of the mesh's sequence={mesh.shape['sequence']}")
    return batch or least


def _compile(lowered: Any) -> Any:
    """Compiles a program; raises `UserError` if it does not fit in the memory of a device."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        raise UserError(
            f"the step does not fit in device memory ({reason}): use more devices, a smaller --batch, "
            f"train.accumulate, {LESS_MEMORY}"
        ) from error


def _figures(program: Any, mesh: Mesh, rows: int, length: int, useful: float, executed: float) -> Program:
    planned = program.memory_analysis()
    return Program(
        mesh={name: size for name, size in mesh.shape.items() if size > 1},
        rows=rows,
        length=length,
        arguments=planned.argument_size_in_bytes,
        outputs=planned.output_size_in_bytes - planned.alias_size_in_bytes,
        results=planned.output_size_in_bytes,
        temporaries=planned.temp_size_in_bytes,
        code=planned.generated_code_size_in_bytes,
        collectives=tuple(collectives(program.as_text(), mesh.size)),
        useful_flops=useful / mesh.size,
        flops=executed / mesh.size,
    )


def _training_flops(cfg: Config, rows: int, length: int) -> tuple[float, float]:
    """Returns the FLOPs of a train step by the model's formula, and the executed FLOPs, including recomputation."""
    row = registry.example_batch(cfg.model, 1, length)
    useful = cost.TRAINING_FLOPS * rows * cost.forward_flops(cfg.model, row, all_scores=True)
    head = 2 * cfg.model.dim * rows * length * cfg.model.size("vocab_size") if cfg.train.loss_chunk else 0
    return useful, useful + rows * cost.recomputed_flops(cfg.model, row) + head
