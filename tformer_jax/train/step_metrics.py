"""The metrics of a train step, packed into one array."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepMetrics(Mapping[str, jax.Array]):
    """Named scalars in one array, so that one transfer copies all of them to the host."""

    array: jax.Array
    """float32 [len(names)]."""
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> jax.Array:
        return self.array[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def pack(metrics: Mapping[str, jax.Array]) -> StepMetrics:
    """Packs float32 scalars into one array."""
    return StepMetrics(jnp.stack(list(metrics.values())), tuple(metrics))


def fetch(steps: Sequence[StepMetrics]) -> list[dict[str, float]]:
    """Copies the metrics of several steps to the host as floats; blocks until they are computed."""
    rows = jax.device_get([step.array for step in steps])
    return [dict(zip(step.names, row.tolist(), strict=True)) for step, row in zip(steps, rows, strict=True)]
