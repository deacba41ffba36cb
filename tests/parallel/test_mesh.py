"""The arrangement of devices on TPU tori, several slices and GPU nodes, all simulated."""

import dataclasses
import itertools

import numpy as np
import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.config import ParallelConfig
from tformer_jax.parallel.mesh import arrange, make_mesh, outer_sizes


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a device that `mesh_utils` reads."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def torus(kind: str, x: int, y: int, slices: int = 1) -> list[Device]:
    """Returns the devices of several slices, each with `y` rows of `x` chips."""
    places = itertools.product(range(slices), range(y), range(x))
    return [
        Device(number, "tpu", kind, slice_index=where if slices > 1 else None, coords=(column, row, 0))
        for number, (where, row, column) in enumerate(places)
    ]


def gpus(nodes: int, each: int, **slices: int) -> list[Device]:
    return [
        Device(number, "gpu", "NVIDIA H100", number // each, slices and number // each if slices else None)
        for number in range(nodes * each)
    ]


def distance(device: Device, other: Device) -> int:
    return sum(abs(a - b) for a, b in zip(device.coords, other.coords, strict=True))


@pytest.mark.parametrize("sizes", [{"preset": "fsdp+tp"}, {"data": 2, "fsdp": -1}, {"data": 2, "fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize(("kind", "x", "y"), [("TPU v5 lite", 4, 4), ("TPU v6 lite", 4, 4), ("TPU v6 lite", 8, 8)])
def test_mesh_axes_span_sides_of_a_torus(kind, x, y, sizes):
    devices = torus(kind, x, y)
    if sizes.get("fsdp") == 4 and x == 8:
        sizes = sizes | {"fsdp": 16}
    mesh = make_mesh(ParallelConfig(**sizes), devices)
    assert set(mesh.devices.flat) == set(devices)
    if mesh.shape["tensor"] == 2:
        pairs = mesh.devices.reshape(-1, 2)
        assert all(distance(*pair) == 1 for pair in pairs)


def test_a_mesh_that_does_not_fit_a_torus_is_refused():
    with pytest.raises(UserError, match=r"parallel.data=5 does not fit the interconnect of these 16 TPU v5 lite dev"):
        make_mesh(ParallelConfig(data=5), torus("TPU v5 lite", 4, 4))


@pytest.mark.parametrize(
    ("sizes", "granules", "expected"),
    [
        ((4, 8, 1, 1, 2), 4, (4, 1, 1, 1, 1)),
        ((2, 16, 1, 1, 2), 4, (2, 2, 1, 1, 1)),
        ((1, 8, 1, 1, 2), 2, (1, 2, 1, 1, 1)),
        ((1, 1, 1, 1, 8), 2, (1, 1, 1, 1, 2)),
        ((6, 2, 1, 1, 2), 4, (2, 2, 1, 1, 1)),
    ],
)
def test_the_first_axes_use_the_slow_network(sizes, granules, expected):
    assert outer_sizes(sizes, granules) == expected


def test_slices_are_split_along_data_only():
    devices = torus("TPU v5 lite", 4, 4, slices=2)
    order = np.random.default_rng(0).permutation(len(devices))
    placed = arrange((2, 8, 1, 1, 2), [devices[i] for i in order])
    for number, slice_ in enumerate(placed):
        assert {device.slice_index for device in slice_.flat} == {number}


@pytest.mark.parametrize("slices", [{}, {"slice_index": 1}], ids=["by process", "by slice"])
def test_the_last_axes_stay_within_a_node(slices):
    devices = gpus(4, 8, **slices)
    order = np.random.default_rng(0).permutation(len(devices))
    placed = arrange((2, 4, 1, 1, 4), [devices[i] for i in order])
    nodes = np.vectorize(lambda device: device.process_index)(placed)
    assert (nodes == nodes[..., :1]).all(), "tensor parallelism stays within a node"
    assert [sorted(set(part.flat)) for part in nodes] == [[0, 1], [2, 3]]


def test_nodes_of_different_sizes_are_taken_in_order():
    devices = [*gpus(1, 8), *(dataclasses.replace(device, id=8 + device.id, process_index=1) for device in gpus(1, 4))]
    assert list(arrange((3, 4), devices).flat) == devices
