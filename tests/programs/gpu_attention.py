"""Compares the attention backends with float32 of the highest precision, and their speed with PyTorch's.

python -m tests.programs.gpu_attention --record attention.json

Every backend that the device supports computes outputs and gradients with several masks. Times are medians of forward
and backward passes; PyTorch's are those of `scaled_dot_product_attention`. On a CPU, add `--tiny`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tests import commands
from tformer_jax.base.checks import not_installed
from tformer_jax.base.errors import first_line
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.masks import Mask

BACKENDS = ("auto", "cudnn", "tokamax", "xla", "blockwise", "reference")
TOLERANCES = {"bfloat16": 2e-2, "float32": 4e-3}
"""Largest difference relative to the largest value; float32 products are TensorFloat-32 on a GPU."""
CHECKED = 2, 256, 4, 64
"""B, T, N, H of the comparison."""
TIMED = ((16, 256, 6, 64), (16, 1024, 12, 64), (4, 4096, 12, 64), (1, 16384, 12, 64))
REPEATS = 10


def main() -> None:
    """Prints and records the comparison; exits with 1 if a backend is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    checks = compare_backends((1, 16, 2, 8) if options.tiny else CHECKED)
    shapes = ((1, 32, 2, 8),) if options.tiny else TIMED
    times = {"x".join(map(str, shape)): measure_backends(shape) for shape in shapes}
    if options.record:
        commands.write_record(options.record, "tests.programs.gpu_attention", checks=checks, milliseconds=times)
    raise SystemExit(any(check.get("wrong", False) for check in checks))


def masks(B: int, T: int) -> dict[str, Mask]:
    """Returns the masks of the comparison, by name."""
    lengths = jnp.arange(1, B + 1) * T // B
    padding = jnp.arange(T) < lengths[:, None]
    segments = jnp.broadcast_to(jnp.arange(T) * 3 // T, (B, T))
    return {
        "none": Mask(self_attention=True),
        "causal": Mask(causal=True, self_attention=True),
        "causal, padding": Mask(padding, causal=True, self_attention=True, padding_last=True),
        "padding": Mask(padding, self_attention=True, padding_last=True),
        "causal, segments": Mask(segments=(segments, segments), causal=True, self_attention=True),
        "causal, window": Mask(causal=True, window=T // 8, self_attention=True),
    }


def compare_backends(shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Compares outputs and gradients of all backends, masks and dtypes."""
    B, T, _, _ = shape
    checks = []
    for dtype, tolerance in TOLERANCES.items():
        inputs = [jax.random.normal(jax.random.key(seed), shape, dtype) for seed in range(4)]
        for name, mask in masks(B, T).items():
            with jax.default_matmul_precision("highest"):
                expected = outputs_and_gradients("reference", mask, [array.astype("float32") for array in inputs])
            for backend in BACKENDS:
                check: dict[str, Any] = {"backend": backend, "dtype": dtype, "mask": name}
                try:
                    check["difference"] = largest_difference(outputs_and_gradients(backend, mask, inputs), expected)
                    check["wrong"] = not check["difference"] <= tolerance
                except Exception as error:
                    check["refused"] = first_line(error)
                print(check, flush=True)
                checks.append(check)
    return checks


def outputs_and_gradients(backend: str, mask: Mask, inputs: list[jax.Array]) -> list[jax.Array]:
    """Returns the outputs and the gradients of queries, keys and values; rows of padding are zero."""
    *operands, weights = inputs
    visible = 1 if mask.padding_mask is None else mask.padding_mask[..., None, None].astype(weights.dtype)

    @jax.jit
    def passes(operands: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        def total(operands: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = attend(*operands, mask, backend=backend) * visible
            return (out * weights).sum(), out

        gradients, out = jax.grad(total, has_aux=True)(operands)
        return out, gradients

    out, gradients = passes(operands)
    return [out, *gradients]


def largest_difference(arrays: list[jax.Array], expected: list[jax.Array]) -> float:
    """Returns the largest difference, relative to the largest value of each array."""
    pairs = zip(arrays, expected, strict=True)
    return max(float(jnp.abs(array.astype("float32") - right).max() / jnp.abs(right).max()) for array, right in pairs)


def measure_backends(shape: tuple[int, int, int, int]) -> dict[str, float | str]:
    """Returns the milliseconds of a causal forward and backward pass of each backend and of PyTorch."""
    *operands, weights = [jax.random.normal(jax.random.key(seed), shape, "bfloat16") for seed in range(4)]
    mask = Mask(causal=True, self_attention=True)
    times: dict[str, float | str] = {}
    for backend in BACKENDS:

        def total(operands: list[jax.Array], backend: str = backend) -> jax.Array:
            return (attend(*operands, mask, backend=backend) * weights).sum(dtype="float32")

        try:
            passes = jax.jit(jax.grad(total)).lower(operands).compile()
            times[backend] = median_milliseconds(lambda passes=passes: passes(operands), jax.block_until_ready)
        except Exception as error:
            times[backend] = first_line(error)
    times |= torch_times(shape)
    print(shape, times, flush=True)
    return times


def torch_times(shape: tuple[int, int, int, int]) -> Mapping[str, float]:
    """Returns the milliseconds of PyTorch's pass, if it is installed and has the same device."""
    if not_installed(["torch"]):
        return {}
    import torch

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return {}
    B, T, N, H = shape
    device = "cuda" if on_gpu else "cpu"
    q, k, v, weights = (torch.randn(B, N, T, H, dtype=torch.bfloat16, device=device) for _ in range(4))
    for operand in (q, k, v):
        operand.requires_grad_()

    def passes() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad((out * weights).float().sum(), (q, k, v))

    return {"torch": median_milliseconds(passes, lambda _: torch.cuda.synchronize() if on_gpu else None)}


def median_milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Returns the median time of groups of calls; one call of each group waits for the device."""
    wait(run())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(4):
            last = run()
        wait(last)
        times.append((time.perf_counter() - start) / 4)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
