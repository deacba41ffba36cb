"""What one device of a mesh has of a model and of its batch."""

import dataclasses
import math

from jax.sharding import AbstractMesh

from tformer_jax.config import MESH_AXES, Config, ConfigError, ModelConfig, ParallelConfig
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import BATCH_AXES, axis_sizes, data_parallelism

TRACED = {"cudnn": "blockwise", "pallas": "blockwise", "ring": "blockwise"}
"""Backends that need certain devices, and one that keeps the same for the backward pass on any."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A config on a mesh, with the shape of the global batch."""

    cfg: Config
    sizes: dict[str, int]
    """Of the mesh's axes."""
    batch: int
    length: int

    @property
    def devices(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.sizes.values())

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh, without any devices."""
        return AbstractMesh(tuple(self.sizes.values()), MESH_AXES)

    @property
    def model(self) -> ModelConfig:
        """The whole model, in a form that any machine can trace."""
        backend = self.cfg.model.attention_backend
        return dataclasses.replace(self.cfg.model, attention_backend=TRACED.get(backend, backend))

    @property
    def rows(self) -> int:
        """Rows of one device, of one part where the batch is computed in `train.accumulate` parts."""
        return self.batch // data_parallelism(self.mesh) // self.cfg.train.accumulate

    @property
    def share(self) -> ModelConfig:
        """The model whose sizes are those that one device computes with; its vocabularies are filled in."""
        model, tensor = self.model, self.sizes["tensor"]
        heads = model.num_heads // tensor
        return dataclasses.replace(
            model,
            num_heads=heads,
            num_kv_heads=min(_split(model.kv_heads, tensor), heads),
            head_dim=model.head_size,
            ffn_dim=model.ffn_dim // tensor,
            vocab_size=model.vocab_size and _split(model.vocab_size, tensor),
            source_vocab_size=model.source_vocab_size and _split(model.source_vocab_size, tensor),
        )


def layout(cfg: Config, sizes: dict[str, int], batch: int | None, length: int) -> Layout:
    """A checked layout; without a batch it has one row for each device and part.

    Raises:
        ConfigError: the mesh does not divide what it splits.
    """
    rules.check(cfg, sizes | {"sequence": 1})
    ways = {name: sizes[name] for name in BATCH_AXES} | {"train.accumulate": cfg.train.accumulate}
    rows = math.prod(ways.values())
    batch = batch or rows
    if batch % rows:
        product = " * ".join(f"{name}={size}" for name, size in ways.items() if size > 1)
        raise ConfigError(f"--batch {batch}: must be a multiple of {product}, write {rows * (batch // rows + 1)}")
    if length % sizes["sequence"]:
        raise ConfigError(f"--length {length}: must be a multiple of the mesh's sequence={sizes['sequence']}")
    return Layout(cfg, sizes, batch, length)


def mesh_sizes(cfg: ParallelConfig, devices: int | None) -> dict[str, int]:
    """The sizes of the mesh's axes on so many devices; without a number, as many as are written.

    Raises:
        ConfigError: the number is needed, or does not fit.
    """
    written = math.prod(cfg.sizes.values())
    if devices is None and written < 0:
        raise ConfigError(f"--mesh {cfg.preset}: add --devices N, the number of devices that it is for")
    sizes = axis_sizes(cfg, devices or written)
    if devices and math.prod(sizes.values()) != devices:
        raise ConfigError(f"--devices {devices}: the mesh has {math.prod(sizes.values())}; leave --devices out")
    return sizes


def _split(size: int, among: int) -> int:
    """What one of them has; the whole where it cannot be split evenly, as `parallel/rules.py` has it."""
    return size if size % among else size // among
