"""Reads the files of a checkpoint folder: JSON, and arrays in safetensors files, which hold no code."""

from pathlib import Path
from typing import Any

from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers.checkpoints import read_json

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads `config.json`.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: name a folder that Hugging Face's save_pretrained wrote")
    return read_json(path)


def read_arrays(folder: Path) -> dict[str, Any]:
    """Reads `model.safetensors`, or all shards that its index lists, or else all safetensors files.

    Raises:
        ConfigError: there are none, a shard is missing, or a file is damaged.
    """
    if (folder / INDEX).is_file():
        return _shards(folder)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no .safetensors file; {_pickles(folder)}")
    arrays: dict[str, Any] = {}
    for file in files:
        arrays |= _load(file)
    return arrays


def _shards(folder: Path) -> dict[str, Any]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map from arrays to files")
    arrays: dict[str, Any] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names a file outside of its folder: {name}")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is missing: {INDEX} lists it")
        arrays |= _load(folder / name)
    if absent := sorted(places.keys() - arrays.keys()):
        raise ConfigError(f"{folder / places[absent[0]]} has no array {absent[0]}, which {INDEX} lists")
    return arrays


def _load(file: Path) -> dict[str, Any]:
    try:
        from safetensors.flax import load_file
    except ImportError as error:
        raise ConfigError("reading checkpoints needs safetensors: pip install 'tformer_jax[interop]'") from error
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises types of its own
        raise ConfigError(f"{file} is damaged: {error}") from error


def _pickles(folder: Path) -> str:
    found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not found:
        return "checkpoints in other formats are not read"
    return f"{found[0]} is a pickle, which is never read because it may run code: save it as safetensors"
