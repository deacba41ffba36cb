"""Loads and saves folders in Hugging Face's format: `config.json` and `model.safetensors` (or its shards).

Without safetensors files, `pytorch_model.bin` is read, as `torch_files` says.
"""

import contextlib
import dataclasses
import json
import operator
import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.interop import adapters, files, mapping, mxfp4, settings_comparison, sinusoids
from tformer_jax.interop.architecture import UNREADABLE, Architecture, check, class_names, require
from tformer_jax.interop.array_names import is_base_model, rename_copies, standard_names
from tformer_jax.interop.bert import CLASSIFIERS, MASKED_LMS
from tformer_jax.interop.decoders import DECODERS
from tformer_jax.interop.deepseek import DEEPSEEK
from tformer_jax.interop.encoder_decoders import ENCODER_DECODERS
from tformer_jax.interop.fields import STACKS, Fields
from tformer_jax.interop.gemma import GEMMA, T5GEMMA
from tformer_jax.interop.heads import NoHeadError, random_head
from tformer_jax.interop.mixtures import MIXTURES
from tformer_jax.interop.published_fields import DEFAULTS, UNSUPPORTED
from tformer_jax.interop.qwen3_next import QWEN3_NEXT
from tformer_jax.models import conversions, registry
from tformer_jax.models.family import Family
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, SpecialTokens

_DECODERS = DECODERS | GEMMA | MIXTURES | DEEPSEEK | QWEN3_NEXT
ARCHITECTURES: dict[str, Architecture] = _DECODERS | ENCODER_DECODERS | T5GEMMA | CLASSIFIERS
"""Architectures by `model_type` of config.json."""
OTHER_FAMILIES: dict[str, dict[str, Architecture]] = {"masked_lm": MASKED_LMS}
"""Architectures of a model type's further families, likewise."""
PRETRAINED = {
    "BertForPreTraining",
    "AlbertForPreTraining",
    *(architecture.name for architecture in MASKED_LMS.values()),
}
"""`architectures` of config.json whose checkpoints are read as masked language models by default."""


def labels(config: dict[str, Any]) -> list[str]:
    """Returns the class names of a classifier's config.json in the order of its logits.

    Raises:
        UserError: `id2label` is damaged.
    """
    try:
        names = class_names(config)
        return [str(names[key]) for key in sorted(names, key=int)]
    except (TypeError, ValueError) as error:
        raise UserError(f"{UNREADABLE}id2label must have names by number, such as {{'0': 'negative'}}") from error


def token_ids(special: SpecialTokens, cfg: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json for the special tokens of a model; an end outside of its vocabulary is null."""
    ends = [end for end in special.eos if end < cfg.size("vocab_size")]
    end = ends if len(ends) > 1 else next(iter(ends), None)
    ids = {"pad_token_id": special.pad, "bos_token_id": special.bos, "eos_token_id": end}
    if cfg.model_class.reads_source:
        ids["decoder_start_token_id"] = special.start
        ids |= {"forced_bos_token_id": special.forced[0]} if special.forced else {}
    return ids


def load(
    folder: Path,
    *,
    arrays: files.StoredArrays | None = None,
    adapter: Path | None = None,
    mesh: Mesh | None = None,
    headless: bool = False,
    **settings: Any,
) -> tuple[ModelConfig, Any]:
    """Loads the config and parameters of a checkpoint; `settings` override the config (dtype, attention_backend, ...).

    A checkpoint of an encoder is a masked language model if its config.json says so, else a classifier; `family` in
    `settings` selects one. A classifier's checkpoint without a classification head gets a random one if `num_classes`
    is in `settings`. Arrays are read, converted and placed one by one.

    Args:
        arrays: the arrays, by their names in Hugging Face's checkpoints; None: read from the folder.
        adapter: folder of an adapter of PEFT, which is merged into the parameters.
        mesh: mesh that holds the parameters; None: the default device.
        headless: load a language model that was saved without its output head; its embeddings then serve as the head.

    Raises:
        NoHeadError: the checkpoint has no head, and neither `headless` nor `num_classes` says what to do.
        UserError: the folder is not a checkpoint, its architecture is unknown, or its arrays do not match its config.
    """
    hf = files.read_config(folder)
    if "model_type" not in hf:
        raise UserError(f"{folder / 'config.json'} has no model_type: {folder} is not a Hugging Face checkpoint")
    architecture = architecture_of(str(hf["model_type"]), settings.get("family") or _pretrained_family(hf))
    tied = (DEFAULTS[hf["model_type"]] | hf).get("tie_word_embeddings", True) is True
    stored = files.read_arrays(folder) if arrays is None else arrays
    stored = mxfp4.dequantized(stored)
    arrays = rename_copies(standard_names(stored, architecture), architecture, tied)
    if adapter is not None:
        head = architecture.head
        shared = (architecture.shared, head) if tied or head not in arrays else ()
        classifier = f"{architecture.classifier}.weight"
        lacking = classifier not in arrays
        arrays = adapters.merge(arrays, adapter, shared, architecture)
        if lacking and classifier in arrays:
            hf |= {"architectures": [architecture.name], "num_labels": len(arrays[classifier])}
    base = is_base_model(stored, architecture)
    read = _read_settings(hf, arrays, architecture, headless=headless, base=base)
    _check_length(read, settings.get("max_length"))
    if _family(read).classifies and f"{architecture.classifier}.weight" not in arrays:
        arrays.update(random_head(read | settings, architecture, arrays, classes="num_classes" in settings))
    cfg = ModelConfig(**read | settings)
    arrays = mapping.split_fused(arrays, architecture.fused(cfg))
    model = registry.build(cfg)
    shapes = nn.unbox(registry.shapes(model)) if mesh is None else registry.sharded_shapes(model, mesh)
    return cfg, mapping.to_ours(architecture.rules(cfg), arrays, shapes, ignored=architecture.ignored)


def arrays_writer() -> Callable[..., None]:
    """Returns the function that writes arrays.

    Raises:
        UserError: safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError('writing checkpoints needs safetensors: pip install -e ".[interop]"') from error
    writer: Callable[..., None] = save_file
    return writer


def save(
    folder: Path,
    model_type: str,
    cfg: ModelConfig,
    params: Any,
    *,
    heads: Mapping[str, Any] = MappingProxyType({}),
    **theirs: Any,
) -> None:
    """Saves a checkpoint that transformers loads as `model_type`; creates the folder if it is missing.

    `theirs` adds or overrides settings of config.json, such as `token_ids` for other special tokens; `heads` adds those
    that the model does not determine.

    Raises:
        UserError: the architecture cannot express `cfg` or `params` exactly, or safetensors is not installed.
    """
    save_file = arrays_writer()
    architecture = architecture_of(model_type, cfg.family)
    if other := [kind for kind in cfg.attentions if kind not in architecture.attentions]:
        raise _unfit_error(model_type, f"the architecture has no attention of the kind {other[0]!r}")
    cfg, params = _convert_layout(architecture, cfg, params)
    try:
        arrays, fields = mapping.to_theirs(architecture.rules(cfg), params), architecture.config(cfg)
        arrays |= sinusoids.write(cfg, architecture)
    except UserError as error:
        raise _unfit_error(model_type, str(error)) from error
    hf: dict[str, Any] = {"model_type": model_type, "architectures": [architecture.name], "dtype": cfg.param_dtype}
    hf = {**heads, **hf, **token_ids(DEFAULT_SPECIAL_TOKENS, cfg), **fields, **theirs}
    for stack in STACKS.get(model_type, ()):
        ids = (f"{name}_token_id" for name in ("pad", "bos", "eos"))
        hf[stack] |= {name: hf[name] for name in ids if hf[name] is not None}
    _check_exact(cfg, hf, arrays, architecture)
    arrays = mapping.join_fused(arrays, architecture.fused(cfg))
    arrays = {name: _stored(array, name, cfg, architecture) for name, array in arrays.items()}
    if hf.get("tie_word_embeddings") is False:  # transformers then reads the copies, too
        copies = {copy: arrays[name] for copy, name in architecture.copies.items() if name in arrays}
        arrays = copies | arrays
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def _stored(array: np.ndarray, name: str, cfg: ModelConfig, architecture: Architecture) -> np.ndarray:
    """Returns an array in `cfg.param_dtype`, unless this would round it or the architecture stores it in float32."""
    if array.dtype == cfg.param_dtype:
        return array
    narrow = array.astype(cfg.param_dtype)
    exact = np.array_equal(narrow.astype(array.dtype), array)
    return narrow if exact and not any(re.fullmatch(kind, name) for kind in architecture.float32) else array


DERIVED = {"kv_heads": "num_kv_heads", "head_size": "head_dim", "rotary_size": "rotary.fraction"}
"""Settings that determine a derived setting, by the name of the derived setting."""


TIED_INPUTS = {"output": "all", "none": "inputs"}
"""`tie_embeddings` with one table for sources and targets, as each encoder-decoder has it, by the value without it."""


def needed_changes(cfg: ModelConfig, model_type: str) -> list[str] | None:
    """Returns the settings to change, as `model.name=value`, so that a `model_type` can represent the model.

    None: it has another family, or its settings do not follow from `cfg`.
    """
    architecture = architecture_of(model_type, cfg.family)
    try:
        ids = {"model_type": model_type} | token_ids(DEFAULT_SPECIAL_TOKENS, cfg)
        settings = architecture.settings(Fields(DEFAULTS[model_type] | ids | architecture.config(cfg)))
        tied = TIED_INPUTS if cfg.model_class.reads_source else {}
        tying = tied.get(cfg.tie_embeddings, cfg.tie_embeddings)
        settings |= {"tie_embeddings": tying, "output_bias": cfg.output_bias}
        settings |= sinusoids.read(sinusoids.write(cfg, architecture), settings)
        if model_type in ("t5", "umt5"):  # whose tied embedding is scaled as the output head
            settings["scale_output"] = tying == "all"
        back = ModelConfig(**settings)
    except (UserError, TypeError, ValueError, KeyError):
        return None
    if back.model_class is not cfg.model_class:
        return None
    return [f"model.{name}={value!r}" for name, value in _changed_settings(cfg, back).items()]


def _changed_settings(cfg: ModelConfig, back: ModelConfig) -> dict[str, Any]:
    """Returns the settings of `back` that `cfg` lacks, without layouts, which are converted."""
    different = settings_comparison.differences(back, cfg)
    settings = {setting.partition("=")[0].removeprefix("model.") for setting in different}
    changes = {}
    for name in sorted(DERIVED.get(name, name) for name in settings - {"attention_projections"}):
        with contextlib.suppress(AttributeError):  # what follows from other settings
            value, mine = (operator.attrgetter(name)(config) for config in (back, cfg))
            if value != mine and not isinstance(getattr(ModelConfig, name, None), property):
                changes[name] = value
    return changes


def _convert_layout(architecture: Architecture, cfg: ModelConfig, params: Any) -> tuple[ModelConfig, Any]:
    """Returns the same model with unrolled layers, and with projections separate or fused as the architecture's."""
    cfg, params = conversions.unrolled(cfg, params)
    if architecture.projections == "fused_qkv":
        return conversions.fused(cfg, params)
    params = conversions.convert_projections(params, cfg, architecture.projections)
    return dataclasses.replace(cfg, attention_projections=architecture.projections), params


def architecture_of(model_type: str, family: str | None = None) -> Architecture:
    """Returns the architecture of a `model_type` for our model family; None: of any family but "masked_lm".

    Raises:
        UserError: there is none.
    """
    if model_type in UNSUPPORTED:
        module, nearest = UNSUPPORTED[model_type]
        raise UserError(
            f"model_type {model_type!r} is not supported: it has {module}; {nearest!r} is the nearest that is"
        )
    if model_type not in ARCHITECTURES:
        raise UserError(f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    others = OTHER_FAMILIES.get(family or "")
    if others is None:
        return ARCHITECTURES[model_type]
    if model_type not in others:
        raise UserError(f"model_type {model_type!r} is no {family}; {', '.join(others)} can be")
    return others[model_type]


def _family(settings: Mapping[str, Any]) -> type[Family]:
    """Returns the class of models of our settings."""
    return kinds.load(kinds.FAMILIES, settings["family"])


def _pretrained_family(hf: dict[str, Any]) -> str | None:
    """Returns "masked_lm" for the config.json of a masked language model, else None."""
    return "masked_lm" if PRETRAINED & set(hf.get("architectures") or ()) else None


def _check_length(read: dict[str, Any], given: int | None) -> None:
    """Raises `UserError` if a maximum length is given for a model whose positions determine it."""
    if given is not None and read["position"] not in ("relative", "rotary"):
        raise UserError(f"max_length={given}: its positions end at {read['max_length']}; leave the maximum length out")


def _read_settings(
    hf: dict[str, Any],
    arrays: MutableMapping[str, Any],
    architecture: Architecture,
    *,
    headless: bool = False,
    base: bool = False,
) -> dict[str, Any]:
    """Returns our settings from their config.json and arrays; removes copies of the embedding from `arrays`."""
    fields = Fields(hf)
    try:
        read = architecture.settings(fields)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"config.json has no {error}, which one of its fields needs") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json has a field of the wrong type or value: {error}") from error
    fields.check_all_read()
    untied = not _family(read).classifies and (DEFAULTS[hf["model_type"]] | hf).get("tie_word_embeddings") is False
    if untied and architecture.head not in arrays and not headless:
        _check_whole(hf, _family(read), base=base)
        if not architecture.ties_missing_head:
            raise UserError(f"{UNREADABLE}tie_word_embeddings=False, but it has no {architecture.head}")
    read["tie_embeddings"] = _remove_tied(_family(read), arrays, architecture)
    read["output_bias"] = architecture.head_bias in arrays
    read |= sinusoids.read(arrays, read)
    if _family(read).classifies:
        read.setdefault("pooler", "bert.pooler.dense.weight" in arrays)
        if f"{architecture.classifier}.weight" in arrays:
            _check_head(hf, architecture, read["num_classes"])
    return read


def _check_whole(hf: dict[str, Any], family: type[Family], *, base: bool) -> None:
    """Raises `NoHeadError` for a language model whose arrays or config.json come from a class without a head."""
    named = hf.get("architectures") or []
    if family.continues and named and (base or all(name.endswith("Model") for name in named)):
        raise NoHeadError(f"this checkpoint of {named[0]} has no output head; set headless=True to embed texts with it")


def _check_head(hf: dict[str, Any], architecture: Architecture, classes: int) -> None:
    """Raises `UserError` unless the classification head gives probabilities of two or more labels of a text."""
    named = hf.get("architectures") or [architecture.name]
    problem = f"its head is of {named[0]}, but only heads of {architecture.name} are supported"
    check(architecture.name in named, problem)
    check(classes > 1, "its head has one label, a score rather than a class")
    require(hf, problem_type="single_label_classification")


def _check_exact(cfg: ModelConfig, hf: dict[str, Any], arrays: dict[str, Any], architecture: Architecture) -> None:
    """Raises `UserError` unless loading the written checkpoint would give the same model."""
    try:
        back = ModelConfig(**_read_settings(hf, dict(arrays), architecture))
    except UserError as error:
        raise _unfit_error(hf["model_type"], str(error).removeprefix(UNREADABLE)) from error
    if different := settings_comparison.differences(cfg, back):
        raise _unfit_error(hf["model_type"], f"its config.json cannot express {', '.join(different)}")


def _unfit_error(model_type: str, problem: str) -> UserError:
    return UserError(f"model_type {model_type!r} cannot represent this model: {problem}")


def _remove_tied(family: type[Family], arrays: MutableMapping[str, Any], architecture: Architecture) -> str:
    """Returns `tie_embeddings`, and removes copies of the embedding from `arrays`."""
    for name, original in architecture.copies.items():
        if name in arrays:
            if not _arrays_equal(arrays, name, original):
                raise UserError(f"{UNREADABLE}{name} differs from {original}")
            del arrays[name]
    if family.classifies:
        return "none"
    own_head = architecture.head in arrays
    if own_head and _arrays_equal(arrays, architecture.head, architecture.shared):
        del arrays[architecture.head]
        own_head = False
    if family.reads_source and not architecture.two_embeddings:
        return "inputs" if own_head else "all"
    return "none" if own_head else "output"


def _arrays_equal(arrays: Mapping[str, Any], name: str, other: str) -> bool:
    """Returns whether two arrays are equal; compares the first rows first, to read little of arrays that differ."""
    if other not in arrays:
        return False
    first, second = arrays[name], arrays[other]
    return first.shape == second.shape and np.array_equal(first[:1], second[:1]) and np.array_equal(first, second)
