"""Reads files of `torch.save` by PyTorch's unpickler of tensors and plain values, which runs no code of a file."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.lfs_pointers import check_fetched

OLDEST = (2, 6)
"""PyTorch's version since which `weights_only` is safe for files of others."""


def load(path: Path) -> Any:
    """Returns the content of a file, with tensors in its pages if it is a ZIP archive, as since PyTorch 1.6.

    Raises:
        UserError: PyTorch is missing or too old, or the file is damaged, not fetched, or holds other objects.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("reading PyTorch's files needs torch: pip install torch") from error
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST:
        raise UserError(f"reading PyTorch's files needs torch 2.6 or later, not {torch.__version__}")
    check_fetched(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds other objects than tensors, which are never unpickled: save model.state_dict() instead"
        ) from error
    except Exception as error:  # PyTorch raises RuntimeError, EOFError and others for damaged files
        reason = first_line(error, 200)
        raise UserError(f"{path} is not a file of torch.save, or is damaged ({reason})") from error


def tensors_of(state: Any) -> dict[str, Any]:
    """Returns a state dict; {} if it has other values than tensors, or is no dictionary."""
    import torch

    tensors = isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())
    return state if tensors else {}


def to_numpy(tensor: Any, name: str) -> np.ndarray:
    """Converts a tensor; float16 and bfloat16 become float32, which holds them exactly, and other dtypes remain.

    Raises:
        UserError: NumPy has no such array, as for sparse or quantized tensors and float8.
    """
    import torch

    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    try:
        array: np.ndarray = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:  # the type depends on the kind of tensor
        kind = f"{tensor.layout}, {tensor.dtype} on {tensor.device}".replace("torch.", "")
        raise UserError(f"{name} is a tensor ({kind}) that NumPy does not have: save it as dense float32") from error
    return array
