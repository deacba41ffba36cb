"""Reads transformer models of Marian-NMT as checkpoint folders: `.npz` files with their settings, as OPUS-MT has them.

Beside the file are `source.spm`, `target.spm` and one vocabulary `*.vocab.yml`, and perhaps `decoder.yml`.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.checks import import_extra
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.interop import sinusoids
from tformer_jax.interop.architecture import Settings, check
from tformer_jax.interop.files import StoredArrays

CONFIG = "special:model.yml"
"""Name of the array with the settings, as bytes of YAML."""
LENGTH_FACTOR = "max-length-factor", 3
"""Name and default of the setting that ends outputs at a multiple of the source's length, which is not read."""
SEARCH = ("num_beams", "length_penalty", "max_length", "bad_words_ids")
"""Settings of config.json that generation_config.json has, too."""
MAX_LENGTH = 512
"""Longest source and target in tokens, as in OPUS-MT's checkpoints of transformers; sinusoids have no maximum."""
FIELDS = {
    "dim-emb": "d_model",
    "enc-depth": "encoder_layers",
    "dec-depth": "decoder_layers",
    "transformer-dim-ffn": "encoder_ffn_dim",
    "transformer-heads": "encoder_attention_heads",
    "transformer-ffn-activation": "activation_function",
}
ACTIVATIONS = {"gelu": "quick_gelu"}
"""Hugging Face's names of activations, where they differ: Marian's "gelu" is x * sigmoid(1.702 x)."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-preprocess": ("",),
    "transformer-postprocess": ("dan",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-postprocess-top": ("",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-ffn-depth": ("2",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-no-projection": ("false",),
    "transformer-train-position-embeddings": ("false",),
    "transformer-disable-position-embeddings": ("false",),
    "transformer-attention-mask": ("default",),
    "transformer-pool": ("false",),
    "transformer-tied-layers": ([],),
    "right-left": ("false",),
    "ulr": ("false",),
    "lemma-dim-emb": ("0",),
    "factors-dim-emb": ("0",),
}
"""Settings that change what a model computes, and their supported values."""
NAMES = {
    "Wemb": "model.shared.weight",
    "decoder_ff_logit_out_b": "final_logits_bias",
    "ffn_W1": "fc1.weight",
    "ffn_b1": "fc1.bias",
    "ffn_W2": "fc2.weight",
    "ffn_b2": "fc2.bias",
    "ffn_ffn_ln_scale": "final_layer_norm.weight",
    "ffn_ffn_ln_bias": "final_layer_norm.bias",
}
for _place, _module in (("self", "self_attn"), ("context", "encoder_attn")):
    for _role, _projection in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        NAMES |= {f"{_place}_W{_role}": f"{_module}.{_projection}.weight"}
        NAMES |= {f"{_place}_b{_role}": f"{_module}.{_projection}.bias"}
    NAMES |= {f"{_place}_Wo_ln_scale": f"{_module}_layer_norm.weight"}
    NAMES |= {f"{_place}_Wo_ln_bias": f"{_module}_layer_norm.bias"}
"""Hugging Face's names; those in layers are below `model.encoder.layers.{i}` and `model.decoder.layers.{i}`."""


def unpack(path: Path, folder: Path) -> StoredArrays:
    """Writes the settings and tokenizers of a Marian model to `folder`; returns its arrays by Hugging Face's names.

    A row of zeros is appended to the embedding, for the padding that starts the decoder. The arrays include the tables
    of Marian's positions, which differ from those that transformers computes.

    Raises:
        UserError: PyYAML is not installed, a file is missing or damaged, or the model is not supported.
    """
    yaml = import_extra("reading Marian's files", "yaml", "interop")
    try:
        arrays = np.load(path, allow_pickle=False)
        given = yaml.load(arrays[CONFIG].tobytes().rstrip(b"\0").decode(), yaml.BaseLoader)
    except Exception as error:  # zipfile, NumPy and PyYAML raise types of their own
        raise UserError(f"{path} is not a model of Marian-NMT, or is damaged ({first_line(error, 200)})") from error
    for name, values in SUPPORTED.items():
        value = given.get(name, values[0])
        check(value in values, f"{name}={value!r} of {CONFIG} is not supported, only {values[0]!r} is")
    check("Wemb" in arrays, "its embeddings are not tied: only models with one embedding Wemb are supported")
    vocabulary, decoder = _find_file(path.parent, "*vocab.yml"), path.parent / "decoder.yml"
    names = _read_yaml(vocabulary)
    check({*names.values()} == {*map(str, range(len(names)))}, f"the ids of {vocabulary.name} are not 0, 1, 2, ...")
    vocab = {name: int(i) for name, i in names.items()}
    pad = len(vocab)
    rows = len(arrays["Wemb"])
    check(rows == pad, f"its embedding has {rows} rows, but {vocabulary.name} {pad} tokens")
    check("<pad>" not in vocab, f"{vocabulary.name} has the token <pad>, which Marian-NMT does not have")
    search = _read_yaml(decoder) if decoder.is_file() else {}
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<pad>": pad}), encoding="utf-8")
    config = _read_config(given, vocab, search)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    decoding = {name: config[name] for name in SEARCH if name in config}
    decoding |= {LENGTH_FACTOR[0]: _number(search, *LENGTH_FACTOR)}
    (folder / "generation_config.json").write_text(json.dumps(decoding), encoding="utf-8")
    for side in ("source", "target"):
        shutil.copy(_find_file(path.parent, f"{side}.spm"), folder)
    readers: dict[str, Callable[[], np.ndarray]] = {
        _their_name(name): functools.partial(_read_array, arrays, name)
        for name in arrays
        if not name.startswith("special:")
    }
    positions = sinusoids.table(MAX_LENGTH, int(given["dim-emb"]), sinusoids.MARIAN_NMT["position"])
    return StoredArrays(readers | dict.fromkeys(sinusoids.NAMES, lambda: positions))


def _number(search: Settings, name: str, default: float) -> float:
    """Returns a setting of decoder.yml; raises `UserError` if it is no number."""
    value = search.get(name, default)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"decoder.yml: {name} is {value!r}: it must be a number") from None


def _read_yaml(path: Path) -> Settings:
    """Returns the texts by name of a file in YAML; raises `UserError` if it has something else."""
    yaml = import_extra("reading Marian's files", "yaml", "interop")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({first_line(error, 200)})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} has no lines of names and values, such as `</s>: 0`")
    return values


def _find_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise UserError(f"{folder} has {len(files)} files {pattern}, but a model of Marian needs one beside it")
    return files[0]


def _read_config(given: Settings, vocab: dict[str, int], search: Settings) -> Settings:
    """Returns the config.json of a model, given its settings, its tokens and the settings of its decoder."""
    try:
        config: Settings = {theirs: given[name] for name, theirs in FIELDS.items()}
        ids = {"eos_token_id": vocab["</s>"], "bos_token_id": vocab["</s>"], "unk_token_id": vocab["<unk>"]}
    except KeyError as error:
        raise UserError(f"the model of Marian has no {error} in {CONFIG} or in its vocabulary") from error
    config |= {name: int(value) for name, value in config.items() if name != "activation_function"}
    config["activation_function"] = ACTIVATIONS.get(config["activation_function"], config["activation_function"])
    if "beam-size" in search:
        config |= {"num_beams": int(_number(search, "beam-size", 0)), "length_penalty": _number(search, "normalize", 0)}
    penalty = _number(search, "word-penalty", 0)
    check(penalty == 0, f"word-penalty={penalty} of decoder.yml is not supported; remove it there to decode without it")
    pad, size = len(vocab), len(vocab) + 1
    never = [pad] if search.get("allow-unk") == "true" else [pad, ids["unk_token_id"]]
    return config | {
        "model_type": "marian",
        "vocab_size": size,
        "decoder_vocab_size": size,
        "decoder_ffn_dim": int(given.get("transformer-decoder-dim-ffn", 0)) or config["encoder_ffn_dim"],
        "decoder_attention_heads": config["encoder_attention_heads"],
        "max_position_embeddings": MAX_LENGTH,
        "max_length": MAX_LENGTH,
        "scale_embedding": True,
        "is_encoder_decoder": True,
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "bad_words_ids": [[i] for i in never],
        **ids,
    }


def _their_name(name: str) -> str:
    """Returns the name of an array in Hugging Face's checkpoints; names that are not known stay as they are."""
    match = re.fullmatch(r"((?:en|de)coder)_l(\d+)_(\w+)", name)
    stem, leaf = (f"model.{match[1]}.layers.{int(match[2]) - 1}.", match[3]) if match else ("", name)
    return stem + NAMES[leaf] if leaf in NAMES else name


def _read_array(arrays: Any, name: str) -> np.ndarray:
    """Reads an array: kernels [in, out] as [out, in], biases and norms [1, D] as [D], with a token of zeros."""
    array = arrays[name]
    if name == "Wemb":
        return np.pad(array, ((0, 1), (0, 0)))
    if name == "decoder_ff_logit_out_b":
        return np.pad(array, ((0, 0), (0, 1)))
    return array[0] if len(array) == 1 else array.T
