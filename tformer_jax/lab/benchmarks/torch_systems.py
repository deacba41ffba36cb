"""PyTorch in `scripts/benchmark.py train`: `torch.compile`, fused AdamW, and `foreach` gradient clipping.

On a GPU, float32 products use TensorFloat-32, as JAX's do there by default, and batches are copied from pinned memory.
Products of bfloat16 operands are autocast, with which the other operations are bfloat16, too.
"""

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tformer_jax.base.cpu import peak_bytes
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, OptimConfig
from tformer_jax.lab.benchmarks import torch_models


class PyTorch:
    """Training on one device with the parameters and batches that `train_systems.Ours.save` writes."""

    def __init__(self, cfg: Config, path: Path, threads: int, compiled: bool, backend: str, products: str):
        """Loads the model on the CPU or, if JAX's `backend` is "gpu", on the GPU.

        Args:
            products: dtype to which operands of products are rounded, as `train.product_dtype` returns it.

        Raises:
            UserError: PyTorch does not support the GPU.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.parent)  # a new folder: nothing is cached
        self._device = "cuda" if backend == "gpu" else backend
        if self._device == "cuda":
            if not torch.cuda.is_available():
                raise UserError("JAX uses the GPU, but PyTorch cannot: set JAX_PLATFORMS=cpu")
            torch.set_float32_matmul_precision("high" if products == "tensorfloat32" else "highest")
        torch.set_num_threads(threads)
        torch.manual_seed(cfg.seed)
        self._clip, self._dtype = cfg.optim.clip_norm, torch.bfloat16 if products == "bfloat16" else torch.float32
        self._batches: list[dict[str, torch.Tensor]] = []
        model, params = torch_models.build(cfg), {}
        with np.load(path) as arrays:
            for name, array in arrays.items():
                kind, _, key = name.partition("/")
                if kind == "params":
                    params[key] = array
                    continue
                number, _, key = key.partition("/")
                self._batches += [{}] * (int(number) == len(self._batches))
                tensor = torch.from_numpy(array).long()
                self._batches[-1] |= {key: tensor.pin_memory() if self._device == "cuda" else tensor}
        torch_models.load_params(model, params)
        model.to(self._device)
        self._parameters = list(model.parameters())
        self._optimizer = adamw(self._parameters, cfg.optim)
        self._loss = torch.compile(model) if compiled else model
        self._done = 0

    def steps(self, count: int) -> tuple[float, list[float]]:
        """Runs `count` steps and returns the mean seconds and the loss of each."""
        losses = []
        start = time.perf_counter()
        for _ in range(count):
            losses.append(self._step(self._batches[self._done % len(self._batches)]))
            self._done += 1
        values = torch.stack(losses).tolist()
        self._synchronize()
        return (time.perf_counter() - start) / count, values

    def _step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = {key: tensor.to(self._device, non_blocking=True) for key, tensor in batch.items()}
        with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
            loss: torch.Tensor = self._loss(batch)
        loss.backward()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """Returns the peak memory, of the GPU or on a CPU of the process, and the versions of packages."""
        of_device = torch.cuda.max_memory_allocated() if self._device == "cuda" else 0
        return {
            "peak_bytes": of_device or peak_bytes(),
            "peak_of": "device" if of_device else "process",
            "versions": {"torch": metadata.version("torch")},
        }

    def product_rates(self, shapes: list[tuple[int, int, int]], groups: int, size: int) -> list[float]:
        """As `train_systems.Ours.product_rates`; operands and results have the dtype of autocast products."""
        rates = []
        for rows, inner, columns in shapes:
            left = torch.randn(rows, inner, dtype=self._dtype, device=self._device)
            right = torch.randn(inner, columns, dtype=self._dtype, device=self._device)
            torch.matmul(left, right)
            seconds = []
            for _ in range(groups):
                self._synchronize()
                start = time.perf_counter()
                for _ in range(size):
                    torch.matmul(left, right)
                self._synchronize()
                seconds.append((time.perf_counter() - start) / size)
            rates.append(2 * rows * inner * columns / min(seconds))
        return rates


def adamw(parameters: list[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """Builds AdamW with weight decay of matrices only, the default of `optim.decayed`."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    rate, betas = optim.learning_rate or 0.0, (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=optim.eps, fused=True)
