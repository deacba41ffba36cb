"""Reads GGUF files of llama.cpp as checkpoint folders: weights are dequantized, and the tokenizer is in the metadata.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format; llama.cpp's converter defines the names.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hf

from tformer_jax.base.checks import import_extra
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.lfs_pointers import check_fetched
from tformer_jax.data.tokenizers.classes import QWEN2_PATTERN, surround_texts
from tformer_jax.interop.architecture import Settings, check
from tformer_jax.interop.files import StoredArrays

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
"""`model_type` by `general.architecture`."""
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
SCALING_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
"""Fields of config.json by metadata name without the architecture; `rope_scaling` holds `SCALING_FIELDS`."""
UNREAD = ("vocab_size", "rope.dimension_count", "rope.scaling.finetuned", "attention.value_length")
"""Metadata that other metadata and the arrays determine."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of modules in Hugging Face's checkpoints; those in layers are below `model.layers.{i}`."""
REQUIRED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"),
    "attention.layer_norm_rms_epsilon",
)
"""Metadata that llama.cpp does not read a model without; Gemma's windows are required, too."""
FREQUENCY_BASE = 10_000.0
"""Base of rotary frequencies without `rope.freq_base`, for all architectures."""
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the 27B models, whose attention is not scaled by the size of a head."""
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PATTERNS = {"gpt-2": None, "smollm": None, "llama-bpe": LLAMA3_PATTERN}
PATTERNS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_PATTERN)
"""Pre-tokenization patterns of byte-level BPEs by `tokenizer.ggml.pre`; None: GPT-2's."""
BEGIN_WITH_BOS = ("llama", "llama-bpe")
"""Values of `tokenizer.ggml.model` or `pre` with which llama.cpp puts BOS before texts if the metadata do not say."""
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Ids of special tokens of SentencePiece's tokenizers in llama.cpp if the metadata do not say."""
FLOATS = ("F16", "F32", "F64")
"""Types of arrays that NumPy reads, in either order of bytes."""
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Types of tokens, which are SentencePiece's."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def unpack(path: Path, folder: Path) -> StoredArrays:
    """Writes config.json and the tokenizer of a GGUF file to `folder`, and returns its arrays by Hugging Face's names.

    Each access of an array dequantizes it to float32.

    Raises:
        UserError: the library `gguf` is not installed, the file is damaged, or it has an architecture, a tokenizer or
            metadata that this package cannot represent.
    """
    library = import_extra("reading GGUF files", "gguf", "gguf")
    check_fetched(path)
    try:
        reader = library.GGUFReader(path)
        metadata = {name: _plain_value(field.contents()) for name, field in reader.fields.items()}
    except Exception as error:  # the library raises ValueError, IndexError and others for damaged files
        raise UserError(f"{path} is not a GGUF file, or is damaged ({first_line(error, 200)})") from error
    if metadata.get("tokenizer.ggml.model") == "llama":
        metadata = {f"tokenizer.ggml.{name}_token_id": i for name, i in SENTENCEPIECE_IDS.items()} | metadata
    kind = metadata.get("general.type", "model")
    check(kind == "model", f"{path} holds {kind!r}: name the GGUF file of a whole model")
    architecture = str(metadata.get("general.architecture"))
    supported = ", ".join(MODEL_TYPES)
    check(
        architecture in MODEL_TYPES, f"architecture {architecture!r} of GGUF is not supported; supported: {supported}"
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    parts = metadata.get("split.count", 1)
    check(parts <= 1, f"{path} is a part of a model in {parts} files: join them by llama-gguf-split --merge")
    check("token_embd.weight" in tensors, f"{path} has no token_embd.weight: name the GGUF file of a whole model")
    try:
        config = _read_config(architecture, metadata, tensors)
        if factors := tensors.pop("rope_freqs.weight", None):
            config["rope_scaling"] = _llama3_scaling(np.asarray(factors.data), config)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _write_tokenizer(folder, metadata)
    except UserError:
        raise
    except Exception as error:  # also what the library of tokenizers raises
        problem = f"{type(error).__name__}: {first_line(error, 200)}"
        raise UserError(f"{path} lacks metadata of a model, or is damaged ({problem})") from error
    swapped = reader.endianess == library.GGUFEndian.BIG
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for name, tensor in tensors.items():
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2:][0])
        groups = config[heads] if heads and architecture == "llama" else None
        offset = int("gemma" in architecture and name.endswith("norm.weight"))
        reading = (library, tensor, swapped, groups, offset)
        readers[_their_name(name, architecture)] = functools.partial(_read_array, *reading)
    return StoredArrays(readers)


def _plain_value(value: Any) -> Any:
    """Returns a value of the metadata; of a float32, the shortest decimal number."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_config(architecture: str, metadata: Settings, tensors: Settings) -> Settings:
    """Returns the config.json of a GGUF file.

    Raises:
        UserError: metadata of the architecture are not supported.
    """
    given = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    gemma = architecture.startswith("gemma")
    fields = FIELDS | (GEMMA_FIELDS if gemma else {})
    if architecture == "gemma3":
        fields |= {"attention.sliding_window_pattern": "sliding_window_pattern"}
    for name, value in given.items():
        supported = name in fields or name in SCALING_FIELDS or name in UNREAD or value in (0, False, "none")
        check(supported, f"the metadata {architecture}.{name}={value!r} are not supported")
    for name in (*REQUIRED, *(["attention.sliding_window"] if gemma else [])):
        check(name in given, f"the metadata {architecture}.{name} are missing")
    config = {theirs: given[name] for name, theirs in fields.items() if name in given}
    config.setdefault("rope_theta", FREQUENCY_BASE)
    heads = config["num_attention_heads"]
    size = given.get("attention.key_length", given.get("rope.dimension_count", config["hidden_size"] // heads))
    rotated, values = (given.get(name, size) for name in ("rope.dimension_count", "attention.value_length"))
    check(rotated == values == size, f"heads of sizes {size} and {values}, with {rotated} rotated features")
    config |= {"head_dim": size, "num_key_value_heads": config.get("num_key_value_heads", heads)}
    if gemma:
        largest = config["num_hidden_layers"] == LARGEST_GEMMAS[architecture]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if largest else size
    if given.get("rope.scaling.type", "none") != "none":
        config["rope_scaling"] = {theirs: given[name] for name, theirs in SCALING_FIELDS.items() if name in given}
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return config | {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _llama3_scaling(factors: np.ndarray, config: Settings) -> Settings:
    """Returns Llama 3's `rope_scaling`, given the factors by which llama.cpp divides the rotary frequencies.

    Raises:
        UserError: the factors are of another scaling.
    """
    original, factor, size = 8192, float(factors.max()), config["head_dim"]
    turns = original / (2 * np.pi) * config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    share = np.clip((turns - 1) / 3, 0, 1)
    same = factors.shape == share.shape and np.allclose(factors, 1 / ((1 - share) / factor + share), rtol=1e-4)
    check(same, "rope_freqs.weight does not have Llama 3's factors")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return scaling | {"original_max_position_embeddings": original}


def _their_name(name: str, architecture: str) -> str:
    """Returns the name of an array in Hugging Face's checkpoints; names that are not known stay as they are."""
    names = NAMES | (GEMMA_NAMES if architecture.startswith("gemma") else {})
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}"


def _read_array(library: Any, tensor: Any, swapped: bool, heads: int | None, offset: int) -> np.ndarray:
    """Dequantizes an array.

    Args:
        swapped: whether the file is big-endian.
        heads: number of heads whose rows are interleaved for llama.cpp's rotation: 0, H/2, 1, H/2 + 1, ...
        offset: what llama.cpp adds to the scale of a norm.

    Raises:
        UserError: the array has a type that the library does not dequantize, or not in this order of bytes.
    """
    if tensor.tensor_type.name in FLOATS:
        array = np.asarray(tensor.data, np.float32)
    else:
        stored = f"{tensor.name} has the type {tensor.tensor_type.name}, which is not read"
        check(not swapped, f"{stored} from big-endian files")
        try:
            array = library.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"{stored}: convert the file to F32 or Q8_0") from error
    if heads:
        array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return np.asarray(array, np.float32) - np.float32(offset)


def _write_tokenizer(folder: Path, metadata: Settings) -> None:
    """Writes `tokenizer.json` or `tokenizer.model`, and tokenizer_config.json.

    Raises:
        UserError: the tokenizer is of another kind than a byte-level BPE and SentencePiece's BPE.
    """
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    kind = str(given.get("model"))
    check(kind in ("gpt2", "llama"), f"tokenizer.ggml.model={kind!r} is not supported; supported are gpt2, llama")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: given.get(f"{name}_token_id") for role, name in names.items()}
    options = {f"{role}_token": given["tokens"][i] for role, i in ids.items() if i is not None}
    begins = kind in BEGIN_WITH_BOS or given.get("pre") in BEGIN_WITH_BOS
    given = {"add_bos_token": begins, "add_eos_token": False} | given
    if kind == "llama":
        options |= {name: given[name] for name in ("add_bos_token", "add_eos_token")}
        (folder / "tokenizer.model").write_bytes(_sentencepiece_model(given))
    else:
        _byte_level_bpe(given, ids).save(str(folder / "tokenizer.json"))
    if "tokenizer.chat_template" in metadata:
        options["chat_template"] = metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")


def _byte_level_bpe(given: Settings, ids: Settings) -> hf.Tokenizer:
    """Returns the tokenizer of metadata below `tokenizer.ggml`, given the ids of special tokens by role."""
    pre = str(given.get("pre"))
    check(pre in PATTERNS, f"tokenizer.ggml.pre={pre!r} is not supported; supported are {', '.join(PATTERNS)}")
    types = dict(zip(given["tokens"], given["token_type"], strict=True))
    vocab = {token: i for i, token in enumerate(given["tokens"]) if types[token] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in given["merges"]]
    result = hf.Tokenizer(hf.models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    pattern = PATTERNS[pre]
    splits = [hf.pre_tokenizers.Split(hf.Regex(pattern), "isolated")] if pattern else []
    digits = [hf.pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    bytes_ = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    result.pre_tokenizer = hf.pre_tokenizers.Sequence([*digits, *splits, bytes_])
    result.decoder = hf.decoders.ByteLevel()
    added = [token for token, kind in types.items() if kind in (CONTROL, USER_DEFINED)]
    result.add_tokens([hf.AddedToken(token, special=types[token] == CONTROL, normalized=False) for token in added])
    before, after = ([given["tokens"][ids[role]]] if given[f"add_{role}_token"] else [] for role in ("bos", "eos"))
    surround_texts(result, before, after)
    return result


def _sentencepiece_model(given: Settings) -> bytes:
    """Returns the SentencePiece model of metadata below `tokenizer.ggml`.

    llama.cpp's converter writes the spaces of tokens that are matched in texts, such as Gemma's runs of spaces, as they
    are in texts; SentencePiece has them as in other pieces.
    """
    protos = import_extra("this tokenizer", "sentencepiece.sentencepiece_model_pb2", "tokenizers")
    model = protos.ModelProto()
    for token, score, kind in zip(given["tokens"], given["scores"], given["token_type"], strict=True):
        piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = protos.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    for role, name in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos")):
        number = given[f"{name}_token_id"]
        setattr(model.trainer_spec, f"{role}_piece", given["tokens"][number])
        setattr(model.trainer_spec, f"{role}_id", number)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = given.get("add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = given.get("remove_extra_whitespaces", False)
    return bytes(model.SerializeToString())
