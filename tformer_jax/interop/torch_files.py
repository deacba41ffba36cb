"""Reads files of `torch.save` by PyTorch's unpickler of tensors and plain values, which runs no code of a file."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError, first_line

OLDEST = (2, 6)
"""PyTorch's version since which `weights_only` is safe for files of others."""


def load(path: Path) -> Any:
    """Returns the content of a file, with tensors in its pages if it is a ZIP archive, as since PyTorch 1.6.

    Raises:
        UserError: PyTorch is missing or too old, or the file is damaged or holds other objects.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("reading PyTorch's files needs torch: pip install torch") from error
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST:
        raise UserError(f"reading PyTorch's files needs torch 2.6 or later, not {torch.__version__}")
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


def to_numpy(tensor: Any) -> np.ndarray:
    """Converts a tensor to float32, which holds float16 and bfloat16 exactly."""
    array: np.ndarray = tensor.detach().float().numpy()
    return array
