"""PyTorch in `scripts/benchmark.py train`: `torch.compile`, fused AdamW, and `foreach` gradient clipping."""

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tformer_jax.benchmarks import torch_models
from tformer_jax.benchmarks.processes import peak_bytes
from tformer_jax.config import Config, OptimConfig


class PyTorch:
    """Training on the CPU with the parameters and batches that `train_systems.Ours.save` writes."""

    def __init__(self, cfg: Config, path: Path, threads: int, compiled: bool):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.parent)  # a new folder: nothing is cached
        torch.set_num_threads(threads)
        torch.manual_seed(cfg.seed)
        self._clip, self._dtype = cfg.optim.clip_norm, getattr(torch, cfg.model.dtype)
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
                self._batches[-1] = self._batches[-1] | {key: torch.from_numpy(array).long()}
        torch_models.load_params(model, params)
        self._parameters = list(model.parameters())
        self._optimizer = adamw(self._parameters, cfg.optim)
        self._loss = torch.compile(model) if compiled else model
        self._done = 0

    def steps(self, count: int) -> tuple[list[float], list[float]]:
        """Runs `count` steps and returns the seconds and the loss of each."""
        seconds, losses = [], []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(self._step(self._batches[self._done % len(self._batches)]).item())
            seconds.append(time.perf_counter() - start)
            self._done += 1
        return seconds, losses

    def _step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            loss: torch.Tensor = self._loss(batch)
        loss.backward()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        """Returns the peak memory and the versions of packages."""
        return {"peak_bytes": peak_bytes(), "versions": {"torch": metadata.version("torch")}}

    def product_rates(self, shapes: list[tuple[int, int, int]], repetitions: int) -> list[float]:
        """Same as `train_systems.Ours.product_rates`."""
        rates = []
        for rows, inner, columns in shapes:
            left, right = torch.ones(rows, inner, dtype=self._dtype), torch.ones(inner, columns, dtype=self._dtype)
            seconds = []
            for _ in range(repetitions + 1):
                start = time.perf_counter()
                torch.matmul(left, right)
                seconds.append(time.perf_counter() - start)
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
