"""Arrays in safetensors files are those that the library reads, are mapped from the file, and become copies."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.interop import files, mapping

DTYPES = ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", ml_dtypes.bfloat16)


def test_arrays_equal_those_of_the_library(tmp_path):
    rng = np.random.default_rng(0)
    written = {f"{np.dtype(dtype)}{n}": rng.integers(0, 2, (3, n)).astype(dtype) for dtype in DTYPES for n in (0, 1, 5)}
    save_file(written | {"scalar": np.array(2.5, np.float32)}, tmp_path / "model.safetensors")
    expected, actual = load_file(tmp_path / "model.safetensors"), files.read_arrays(tmp_path)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and actual[name].shape == array.shape
        np.testing.assert_array_equal(actual[name], array)


def test_parameters_do_not_change_with_the_file(tmp_path):
    """One of eight arrays, each 72 bytes after the one before, is aligned so that JAX could use the file's pages."""
    path, names = tmp_path / "model.safetensors", [f"w{n}" for n in range(8)]
    save_file({name: np.ones(18, np.float32) for name in names}, path)
    shapes = {name: jax.ShapeDtypeStruct((18,), np.float32) for name in names}
    params = mapping.to_ours([mapping.Rule(name, name) for name in names], files.read_arrays(tmp_path), shapes)
    with path.open("r+b") as file:
        file.seek(-8 * 72, 2)
        file.write(bytes(8 * 72))
    assert not np.any(files.read_arrays(tmp_path)["w0"])
    assert all(np.all(np.asarray(leaf) == 1) for leaf in params.values())


def test_a_cut_file_and_other_numbers_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    save_torch({"w": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="the array w has the dtype F8_E4M3, which is not read"):
        files.read_arrays(tmp_path)["w"]
    cut = (tmp_path / "model.safetensors").read_bytes()[:-1]
    (tmp_path / "model.safetensors").write_bytes(cut)
    with pytest.raises(UserError, match="is damaged"):
        files.read_arrays(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 4096\n"
READERS = {
    "model.safetensors": lambda path: files.read_arrays(path.parent),
    "pytorch_model.bin": lambda path: files.read_arrays(path.parent),
    "adapter_model.safetensors": lambda path: files.read_adapter(path.parent),
    "config.json": read_json,
    "tokenizer.json": lambda path: load_checkpoint_tokenizers(path.parent),
    "spiece.model": lambda path: load_checkpoint_tokenizers(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    """Regression test: they were called damaged, or objects that are never unpickled."""
    if name.endswith(".bin"):
        pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=f"{name} is a pointer of Git LFS, not the file itself: run git lfs pull"):
        READERS[name](tmp_path / name)


def test_a_part_of_the_shards_is_refused(tmp_path):
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        save_file({name: np.ones(2, np.float32)}, tmp_path / name)
    assert sorted(files.read_arrays(tmp_path)) == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match=f"{names[1]} is missing: {names[0]} is part of the same checkpoint"):
        files.read_arrays(tmp_path)
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(UserError, match="has no weight_map from arrays to files"):
        files.read_arrays(tmp_path)


def test_shards_of_a_state_dict_need_their_index(tmp_path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(UserError, match=f"{files.STATE_INDEX} is missing: it lists the files beside it"):
        files.read_arrays(tmp_path)
