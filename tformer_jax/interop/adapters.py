"""Merges adapters of PEFT into a checkpoint, and writes them: LoRA on linear layers, and arrays held as a whole.

https://huggingface.co/docs/peft/developer_guides/checkpoint describes the folder: `adapter_config.json` and
`adapter_model.safetensors`.
"""

import functools
import json
import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import Architecture, Settings
from tformer_jax.interop.array_names import with_prefix
from tformer_jax.interop.files import ADAPTER, ADAPTER_ARRAYS, StoredArrays, read_adapter
from tformer_jax.interop.mapping import their_rule
from tformer_jax.models import conversions
from tformer_jax.nn.module import named_leaves

STEM = "base_model.model."
TASKS = {"seq2seq": "SEQ_2_SEQ_LM", "decoder_lm": "CAUSAL_LM"}
"""`task_type` by our family; for `SEQ_CLS`, PEFT would expect the arrays of the head in every adapter."""
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
COPIES = re.compile(r"\.(modules_to_save|original_module)\.")
"""Part of the names of biases that `bias="all"` writes beside a module held as a whole, and that PEFT does not load."""
USUAL_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is."""
UNREAD = (
    *("auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "modules_to_save"),
    *("peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type"),
)
"""Fields of adapter_config.json that are about training, or that the arrays or the architecture determine."""


def merge(base: StoredArrays, folder: Path, tied: Collection[str], architecture: Architecture) -> StoredArrays:
    """Returns the arrays of a checkpoint with an adapter: W + s B A, computed in float32 as an array is read.

    The scale s is alpha / r, or alpha / sqrt(r) with `use_rslora`. An adapter of a base model, such as an embedder's,
    has names without the prefix of the architecture.

    Args:
        tied: names of the embedding and the output head if they are equal, so that an adapter may not change them.
        architecture: of the base, which need not have the heads of classifiers.

    Raises:
        UserError: the folder is not an adapter of this checkpoint, or is of another kind.
    """
    config = _read_config(folder)
    arrays, added = _read_arrays(folder), ""
    prefixed = with_prefix(arrays, architecture)
    if prefixed is not arrays and any(f"{module}.weight" in base for module in _adapted_modules(prefixed)):
        arrays, added = prefixed, architecture.prefix
    modules = _adapted_modules(arrays)
    factors = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    merged = {
        f"{module}.weight": functools.partial(
            _add_product,
            base,
            arrays,
            module,
            alpha=_alpha(config, module.removeprefix(added)),
            use_rslora=config["use_rslora"],
            inputs_first=architecture.has_inputs_first(module),
        )
        for module in modules
    }
    own = [name for name in arrays if name not in factors and name not in merged]
    whole = {name: functools.partial(_read_whole, base, arrays, name) for name in own}
    if tables := sorted(name for name in arrays if ".lora_embedding_" in name):
        raise UserError(f"{folder} adapts the embedding {tables[0].partition('.lora_')[0]}: not supported")
    if not modules:
        raise UserError(f"{folder} has no factors of LoRA, such as q_proj.lora_A.weight: name the folder of an adapter")
    present = {name for name in whole if not _is_of_classifier(name, architecture)}
    if changed := sorted(set(tied) & (merged.keys() | whole.keys())):
        raise UserError(f"{folder} changes {changed[0]}, but the embedding is also the output head: not supported")
    for place, needed, held in (("adapter", factors, arrays), ("checkpoint", {*merged, *present}, base)):
        if absent := sorted(set(needed) - held.keys()):
            raise UserError(f"{folder}: the {place} has no array {absent[0]}: they do not fit together")
    readers = {name: functools.partial(base.__getitem__, name) for name in base}
    return StoredArrays(readers | merged | whole)


def _read_arrays(folder: Path) -> StoredArrays:
    """Returns the arrays of an adapter, with the names that they have in the model that was adapted."""
    arrays = read_adapter(folder)
    arrays = arrays.replaced(list(filter(COPIES.search, arrays)), {})
    return arrays.renamed({name: name.removeprefix(STEM).replace(".base_layer.", ".") for name in arrays})


def _adapted_modules(names: Iterable[str]) -> list[str]:
    return sorted({match[1] for name in names if (match := FACTOR.fullmatch(name))})


def _is_of_classifier(name: str, architecture: Architecture) -> bool:
    """Returns whether an array is of a classifier's head, such as DistilBERT's `pre_classifier`, as PEFT names it."""
    parts = name.split(".")[:-1]
    return any(part.endswith(("classifier", architecture.classifier.partition(".")[0])) for part in parts)


def _read_config(folder: Path) -> Settings:
    """Reads `adapter_config.json`.

    Raises:
        UserError: it is missing, or of another method than LoRA with its usual start and no further options.
    """
    config = read_json(folder / ADAPTER)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder / ADAPTER}: peft_type={config.get('peft_type')!r} is not supported, only 'LORA' is")
    read = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora")
    usual = {*read, *UNREAD, *(("init_lora_weights",) if config.get("init_lora_weights") in USUAL_STARTS else ())}
    for name, value in config.items():
        if name not in usual and value not in (None, False, "", [], {}):
            raise UserError(f"{folder / ADAPTER}: {name}={value!r} is not supported")
    config = {"alpha_pattern": {}, "use_rslora": False, **config}
    alpha: Any = config.get("lora_alpha")
    patterns: Any = config["alpha_pattern"]
    by_pattern = isinstance(patterns, dict) and all(map(_is_pattern, patterns))
    if not by_pattern or not all(isinstance(value, int | float) for value in (alpha, *patterns.values())):
        given = f"lora_alpha={alpha!r} and alpha_pattern={patterns!r}"
        raise UserError(f"{folder / ADAPTER}: {given} must be a number, and numbers by regular expressions")
    return config


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _alpha(config: Settings, module: str) -> float:
    """Returns alpha of a module, by its name in the model that was adapted."""
    patterns: dict[str, float] = config["alpha_pattern"]
    own = (alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(own, config["lora_alpha"])


def _add_product(
    base: StoredArrays, arrays: StoredArrays, module: str, *, alpha: float, use_rslora: bool, inputs_first: bool
) -> np.ndarray:
    """Returns the weight of a linear layer plus the scaled product of its factors B [out, r] and A [r, in].

    With `inputs_first`, the weight is [in, out], else [out, in].
    """
    weight, a, b = (
        np.asarray(held[f"{module}{leaf}"], np.float32)
        for held, leaf in ((base, ".weight"), (arrays, ".lora_A.weight"), (arrays, ".lora_B.weight"))
    )
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise UserError(f"{module}: factors of the adapter have the shapes {a.shape} and {b.shape}, which do not fit")
    product = b @ a * (alpha / (math.sqrt(len(a)) if use_rslora else len(a)))
    product = product.T if inputs_first else product
    if product.shape != weight.shape:
        raise UserError(f"{module}: the adapter has the shape {product.shape}, and its base {weight.shape}")
    return weight + product


def _read_whole(base: StoredArrays, arrays: StoredArrays, name: str) -> np.ndarray:
    """Returns an array that an adapter holds as a whole."""
    array: np.ndarray = arrays[name]
    if name in base and (shape := base[name].shape) != array.shape:
        raise UserError(
            f"{name}: the adapter has the shape {array.shape}, and its base {shape}: name a base that was saved after "
            "its vocabulary was changed as for the adapter"
        )
    return array


def save(folder: Path, architecture: Architecture, cfg: ModelConfig, trained: Any, *, alpha: float, base: str) -> None:
    """Writes an adapter that PEFT loads: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        trained: the parameters that are trained as they are, and below the names of other kernels their factors
            `a` [*inputs, r] and `b` [r, *outputs].
        alpha: the product of factors is multiplied by alpha / r.
        base: name or folder of the checkpoint that is adapted.

    Raises:
        UserError: PEFT has no such adapter of the architecture.
    """
    from safetensors.numpy import save_file

    if cfg.attention_projections != architecture.projections:
        given = f"model.attention_projections={cfg.attention_projections!r}"
        raise UserError(f"{given} has other kernels than {architecture.name}: train with {architecture.projections!r}")
    cfg, trained = conversions.unrolled(cfg, trained)
    rules, arrays = architecture.rules(cfg), {}
    targets: set[str] = set()
    for name, leaf in named_leaves(trained):
        factor = re.fullmatch("(.+)/([ab])", name)
        rule, theirs = their_rule(factor[1] if factor else name, rules)
        module, array = theirs.rpartition(".")[0], np.asarray(leaf)
        _check_adaptable(theirs, architecture, cfg, whole=not factor)
        if factor:
            targets.add(module)
            matrix = array.reshape(-1, array.shape[-1]) if factor[2] == "a" else array.reshape(len(array), -1)
            arrays[f"{STEM}{module}.lora_{factor[2].upper()}.weight"] = np.ascontiguousarray(matrix.T)
        else:
            arrays[STEM + theirs] = np.ascontiguousarray(rule.layout.theirs(array))
    whole = {name.removeprefix(STEM).rpartition(".")[0] for name in arrays if not FACTOR.fullmatch(name)}
    if not targets or (both := sorted(whole & targets)):
        problem = f"{both[0]} has factors and a bias that is trained" if targets else "it has no factors of kernels"
        raise UserError(f"PEFT has no adapter like this one: {problem}; train.lora_kernels and train.lora_whole say so")
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(cfg.family),
        "base_model_name_or_path": base,
        "r": next(len(array) for name, array in arrays.items() if ".lora_A." in name),
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(whole) or None,
        "fan_in_fan_out": all(map(architecture.has_inputs_first, targets)),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / ADAPTER).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(arrays, folder / ADAPTER_ARRAYS, metadata={"format": "pt"})


def _check_adaptable(theirs: str, architecture: Architecture, cfg: ModelConfig, *, whole: bool) -> None:
    """Raises `UserError` for an array that PEFT cannot adapt as a module of its own."""
    tied = (architecture.shared, architecture.head) if cfg.tie_embeddings in ("output", "all") else ()
    if whole and theirs in tied:
        problem = "the model also uses it as its output head"
    elif "{e}" in theirs:
        problem = "it is a part of a table of experts"
    elif not theirs.endswith((".weight", ".bias")):
        problem = "it is no weight or bias of a module"
    elif any(theirs.endswith(fusion.parts) for fusion in architecture.fused(cfg).values()):
        problem = "the architecture joins it with other kernels"
    else:
        return
    raise UserError(f"PEFT has no adapter of {theirs} ({problem}): leave it out of train.lora_kernels and lora_whole")
