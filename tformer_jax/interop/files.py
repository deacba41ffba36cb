"""Reads the files of a checkpoint folder: JSON, and arrays in safetensors files or PyTorch's state dicts."""

import collections
import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tformer_jax.base.checks import import_extra
from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.base.lfs_pointers import check_fetched

SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
ADAPTER_ARRAYS = "adapter_model.safetensors"
"""Name of the file of an adapter, which may be beside the arrays of its base."""
ADAPTER_STATE = "adapter_model.bin"
STATE = "pytorch_model.bin"
STATE_INDEX = "pytorch_model.bin.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads `config.json`.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = folder / "config.json"
    if (folder / ADAPTER).is_file() and not path.is_file():
        raise UserError(f"{folder} is an adapter of PEFT: name the checkpoint of its base, and add --adapter {folder}")
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: name a folder that Hugging Face's save_pretrained wrote")
    return _text_config(read_json(path))


TEXT_MODELS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
"""`model_type` of the language model in models of texts and images, by their own one."""


def _text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the language model of a model of texts and images; of other models, all fields."""
    kind, text = str(hf.get("model_type")), hf.get("text_config")
    if kind not in TEXT_MODELS or not isinstance(text, dict):
        return hf
    shared = {name: hf[name] for name in hf if name in ("dtype", "torch_dtype") or name.endswith("os_token_id")}
    return shared | {"model_type": TEXT_MODELS[kind]} | text


def image_arrays(folder: Path) -> list[str]:
    """Returns the names of the arrays of images, which are not read."""
    return [name for name in read_arrays(folder) if re.match(IMAGES, name)]


IMAGES = r"(model\.)?(vision_tower|multi_modal_projector|visual)\..*"
"""Pattern of names of arrays of images beside a language model."""


def unread_weights(folder: Path, adapter: Path | None = None) -> list[str]:
    """Returns the names of the files with arrays beside `model.safetensors` that are not read.

    Args:
        adapter: folder of an adapter that is read.
    """
    if not (folder / SINGLE).is_file():
        return []
    read = {SINGLE} if adapter is None or not adapter.samefile(folder) else {SINGLE, ADAPTER_ARRAYS}
    return sorted(path.name for path in folder.glob("*.safetensors*") if path.name not in read)


Opener = Callable[[Path], dict[str, Callable[[], Any]]]
"""Returns functions that read the arrays of a file, by their names."""


class StoredArrays(collections.UserDict[str, Any]):
    """Arrays by name; each access reads the array from its file again, so that memory holds only what the caller keeps.

    Args:
        readers: functions that read the arrays.
    """

    def __init__(self, readers: dict[str, Callable[[], Any]]):
        super().__init__()
        self.data = readers

    def __getitem__(self, name: str) -> Any:
        return self.data[name]()

    def __setitem__(self, name: str, array: Any) -> None:
        self.data[name] = lambda: array

    def matrix_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a matrix.

        Raises:
            UserError: there is no such array, or it is not a matrix.
        """
        if name not in self:
            raise UserError(f"the checkpoint has no {name!r}")
        shape: tuple[int, ...] = self[name].shape
        if len(shape) != 2:
            raise UserError(f"{name} of the checkpoint has the shape {shape}, but must be a matrix")
        return shape

    def count_layers(self, pattern: str) -> int:
        """Returns the number of layers, given a pattern of names whose group is the number of a layer."""
        return 1 + max((int(match[1]) for name in self if (match := re.match(pattern, name))), default=-1)

    def renamed(self, names: dict[str, str]) -> "StoredArrays":
        """Renames the arrays; `names` maps the present names to new ones."""
        return StoredArrays({names[name]: reader for name, reader in self.data.items()})

    def replaced(self, names: Collection[str], readers: dict[str, Callable[[], Any]]) -> "StoredArrays":
        """Removes the arrays `names` and adds arrays that the functions `readers` read."""
        return StoredArrays({name: reader for name, reader in self.data.items() if name not in names} | readers)


def read_arrays(folder: Path) -> StoredArrays:
    """Opens the weights of a folder.

    They are `model.safetensors`, or else the shards of its index, `pytorch_model.bin`, the shards of its index, or all
    safetensors files of other names but an adapter's. Like transformers, ignores an index beside `model.safetensors`,
    because it may be left from an earlier checkpoint.

    Raises:
        UserError: the folder has no weights, a shard is missing, or a file is damaged.
    """
    if (folder / SINGLE).is_file():
        return StoredArrays(_open_all([folder / SINGLE], _open))
    if (folder / INDEX).is_file():
        return _read_shards(folder, INDEX, _open)
    if (folder / STATE).is_file():
        return StoredArrays(_open_state(folder / STATE))
    if (folder / STATE_INDEX).is_file():
        return _read_shards(folder, STATE_INDEX, _open_state)
    if files := sorted(path for path in folder.glob("*.safetensors") if path.name != ADAPTER_ARRAYS):
        _check_all_shards(files)
        return StoredArrays(_open_all(files, _open))
    hint = "checkpoints in other formats are not read"
    if next(folder.glob("pytorch_model-*-of-*.bin"), None):
        raise UserError(f"{folder / STATE_INDEX} is missing: it lists the files beside it")
    if names := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        hint = f"{names[0]} is a pickle, which may run code and is not read: save it as safetensors"
    raise UserError(f"{folder} has no .safetensors file of a model; {hint}")


def read_adapter(folder: Path) -> StoredArrays:
    """Opens the arrays of an adapter, which are `adapter_model.safetensors`, or else `adapter_model.bin`.

    Raises:
        UserError: the folder has neither file, or the file is damaged.
    """
    if (folder / ADAPTER_ARRAYS).is_file():
        return StoredArrays(_open(folder / ADAPTER_ARRAYS))
    if (folder / ADAPTER_STATE).is_file():
        return StoredArrays(_open_state(folder / ADAPTER_STATE))
    raise UserError(f"{folder} has no {ADAPTER_ARRAYS}: name a folder that PEFT's save_pretrained wrote")


def _read_shards(folder: Path, index: str, opener: Opener) -> StoredArrays:
    places = read_json(folder / index).get("weight_map")
    if not places or not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{folder / index} has no weight_map from arrays to files")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{folder / index} names a file outside of its folder: {name}")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: {index} lists it")
    readers = _open_all([folder / name for name in names], opener)
    if absent := sorted(places.keys() - readers.keys()):
        raise UserError(f"{folder / places[absent[0]]} has no array {absent[0]}, which {index} lists")
    return StoredArrays(readers)


def _check_all_shards(files: Sequence[Path]) -> None:
    """Raises `UserError` if the names of files without an index say that there are more, as `part-00001-of-00002`."""
    for file in files:
        if match := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\..*)", file.name):
            start, number, middle, last, end = match.groups()
            names = (f"{start}{i:0{len(number)}}{middle}{last}{end}" for i in range(1, int(last) + 1))
            if missing := [name for name in names if not (file.parent / name).is_file()]:
                raise UserError(f"{file.parent / missing[0]} is missing: {file.name} is part of the same checkpoint")


def _open_all(files: Sequence[Path], opener: Opener) -> dict[str, Callable[[], Any]]:
    """Returns functions that read the arrays of all files; no two of them may have the same array."""
    readers: dict[str, Callable[[], Any]] = {}
    for file in files:
        opened = opener(file)
        if repeated := sorted(readers.keys() & opened.keys()):
            raise UserError(f"{file} and another file both contain the array {repeated[0]}")
        readers |= opened
    return readers


def _open(file: Path) -> dict[str, Callable[[], Any]]:
    """Returns functions that map the arrays of a file, whose header and size are checked."""
    safe_open = import_extra("reading checkpoints", "safetensors", "interop").safe_open
    check_fetched(file)
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except Exception as error:  # safetensors raises types of its own
        raise UserError(f"{file} is damaged: {error}") from error
    header.pop("__metadata__", None)
    return {name: functools.partial(_map_array, file, 8 + size, name, fields) for name, fields in header.items()}


def _open_state(file: Path) -> dict[str, Callable[[], Any]]:
    """Returns functions that read the arrays of a state dict."""
    from tformer_jax.interop import torch_files

    tensors = torch_files.tensors_of(torch_files.load(file))
    if not tensors:
        raise UserError(f"{file} is no state dict: save model.state_dict()")
    return {name: functools.partial(torch_files.to_numpy, tensor, name) for name, tensor in tensors.items()}


def _map_array(file: Path, start: int, name: str, fields: dict[str, Any]) -> np.ndarray:
    """Returns an array in the pages of its file, which are read when they are used, and are no copy.

    They count as memory of the process until the array is deleted.

    Args:
        start: where the file's arrays begin.
        fields: the header's fields of the array.

    Raises:
        UserError: NumPy has no such dtype, as for float8.
    """
    dtype, shape = DTYPES.get(fields["dtype"]), tuple(fields["shape"])
    if dtype is None:
        problem = f"has the dtype {fields['dtype']}, which is not read: save the checkpoint in float32 or bfloat16"
        raise UserError(f"{file}: the array {name} {problem}")
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", start + fields["data_offsets"][0], shape)


DTYPES = {"BOOL": "bool", "BF16": ml_dtypes.bfloat16}
DTYPES |= {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
"""Types of numbers by their names in safetensors files, which store them little-endian."""
