"""Reads MXFP4, the format of the experts of gpt-oss ("OCP Microscaling Formats", 2023): blocks of 32 numbers of 4 bits.

An array [..., M, K] has `NAME_blocks` uint8 [..., M, K / 32, 16], two numbers a byte, the low four bits first, and
`NAME_scales` uint8 [..., M, K / 32], whose exponents of 2 have a bias of 127. The array in the model is its transpose.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from tformer_jax.interop.files import StoredArrays

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Magnitudes by the low three bits; the fourth one is the sign."""


def dequantized(arrays: StoredArrays) -> StoredArrays:
    """Replaces blocks and scales by the arrays [..., K, M] that they stand for, exactly, in bfloat16."""
    names = [name.removesuffix("_blocks") for name in arrays if name.endswith("_blocks")]
    names = [name for name in names if f"{name}_scales" in arrays]

    def reader(name: str) -> Callable[[], np.ndarray]:
        return lambda: unpack(*(np.asarray(arrays[f"{name}_{part}"]) for part in ("blocks", "scales")))

    packed = [f"{name}_{part}" for name in names for part in ("blocks", "scales")]
    return arrays.replaced(packed, {name: reader(name) for name in names})


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the array [..., K, M] of blocks [..., M, K / 32, 16] and scales [..., M, K / 32]."""
    table = np.concatenate([VALUES, -VALUES])
    numbers = table[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, -1)
    values = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127).astype(jnp.bfloat16)
    return np.swapaxes(values.reshape(*scales.shape[:-1], -1), -1, -2)
