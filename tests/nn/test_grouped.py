"""Products of groups of rows against a float64 loop over the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, normal
from tformer_jax.nn.grouped import ROWS, grouped_product

D, F = 5, 3
COUNTS = {
    "ragged": (70, 0, 64, 1, 10),
    "one group has all": (0, 0, 150, 0, 0),
    "one row each": (1, 1, 1, 1, 1),
    "none": (0, 0, 0, 0, 0),
}


@pytest.mark.long
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(counts, dtype):
    M, rows = 150, sum(counts)  # then rows without a group
    assert max(COUNTS["ragged"]) > ROWS["cpu"]
    x, kernels = normal(M, D).astype(dtype), normal(len(counts), D, F, seed=1).astype(dtype)
    direction = normal(M, F, seed=2).astype(dtype) * (jnp.arange(M) < rows)[:, None]
    out, pull = jax.vjp(lambda x, kernels: grouped_product(x, kernels, jnp.array(counts)), x, kernels)
    d_x, d_kernels = pull(direction)
    x64, kernels64, direction64 = (np.asarray(array, np.float64) for array in (x, kernels, direction))
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    start = 0
    for e, count in enumerate(counts):
        mine = slice(start, start + count)
        products = (
            (out[mine], x64[mine] @ kernels64[e]),
            (d_x[mine], direction64[mine] @ kernels64[e].T),
            (d_kernels[e], x64[mine].T @ direction64[mine]),
        )
        for actual, expected in products:
            assert_close(actual, expected, tolerance, proves=(f"grouped matmul of experts, {dtype}", "NumPy float64"))
        start += count
    assert out.dtype == d_x.dtype == d_kernels.dtype == dtype
