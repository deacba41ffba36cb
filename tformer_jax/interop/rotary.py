"""Rotary settings of Hugging Face's decoder-only language models."""

import math

from tformer_jax.config import RotaryConfig
from tformer_jax.interop.architecture import Settings, check, require

KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
"""Fields of `rope_scaling` and `rope_parameters` that transformers reads, in general, for llama3 and for YaRN."""


def rotary_settings(hf: Settings, *, partial: bool, window_base: float | None = None) -> Settings:
    """Returns our rotary settings, from transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    Unless `partial`, the architecture rotates whole heads and does not read `partial_rotary_factor`. With
    `window_base`, it has one rotation for `full_attention` and one for `sliding_attention`, of that base by default.
    """
    rope = rope_fields(hf)
    _check_known(rope)
    full: Settings = rope
    local: Settings = {}
    if window_base is not None:
        _check_kinds(hf)
        full = rope.get("full_attention", rope)
        local = {"rope_theta": window_base, **(rope.get("sliding_attention") or {})}
    else:
        named = {"full_attention", "sliding_attention"} & {*rope}
        check(not named, "rope_parameters by kind of layer are not supported for this architecture")
    for part in (hf, full, local):
        require(part, **({} if partial else {"partial_rotary_factor": 1.0}))
    require(local, rope_type="default")
    fraction = float(full.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1)
    result: Settings = {"base": float(full.get("rope_theta") or hf["rope_theta"]), "fraction": fraction}
    if (base := local.get("rope_theta")) is not None:
        result["window_base"] = float(base)
    kind = full.get("rope_type", full.get("type", "default"))
    supported = ("default", "linear", "llama3", "yarn")
    check(kind in supported, f"rotary scaling {kind!r} is not supported; supported are {', '.join(supported)}")
    magnitude = full.get("attention_factor") if kind == "yarn" else None
    if kind == "default" or (full.get("factor") == 1 and magnitude in (None, 1)):
        return result
    result |= {"scaling": kind, "factor": float(full["factor"])}
    if kind == "llama3":
        turns = full["low_freq_factor"], full["high_freq_factor"]
        check(turns == (1.0, 4.0), f"low_freq_factor and high_freq_factor are {turns}, only (1, 4) are supported")
    if kind == "yarn":
        result |= _yarn_settings(full)
    if kind != "linear":
        original = full.get("original_max_position_embeddings")
        result["original_length"] = hf["max_position_embeddings"] if original is None else original
    return result


def max_length(hf: Settings, rotary: Settings) -> int:
    """Returns the maximum number of tokens: `max_position_embeddings`, unless YaRN extends just that length."""
    length: int = hf["max_position_embeddings"]
    extended = rotary.get("scaling") == "yarn" and rotary["original_length"] == length
    return round(rotary["factor"] * length) if extended else length


def rope_fields(hf: Settings) -> Settings:
    """Returns `rope_parameters`, or else `rope_theta` and `rope_scaling` in that form.

    Raises:
        UserError: both are there and differ; transformers reads the second one, or both, by architecture.
    """
    theta, parameters, scaling = hf["rope_theta"], hf.get("rope_parameters"), hf.get("rope_scaling")
    if not parameters or not scaling:
        return parameters or {"rope_theta": theta, **(scaling or {})}

    def whole(rope: Settings) -> Settings:
        given = {name: value for name, value in rope.items() if name != "type" and value is not None}
        return {"rope_theta": theta, "rope_type": rope.get("type", "default"), **given}

    same = whole(scaling) == whole(parameters.get("full_attention", parameters))
    check(same, f"rope_scaling={scaling!r} differs from rope_parameters={parameters!r}: delete one of them")
    return parameters


def _check_kinds(hf: Settings) -> None:
    """Raises `UserError` for fields that transformers reads otherwise if kinds of layers have their own rotations."""
    kinds, scaling = hf.get("rope_parameters"), hf.get("rope_scaling") or {}
    by_kind = not kinds or bool({"full_attention", "sliding_attention"} & {*kinds})
    check(by_kind, "rope_parameters must be given for full_attention and sliding_attention")
    applied = kinds or "rope_type" in scaling or scaling.get("type") in (None, "default")
    check(applied, f"rope_scaling={scaling!r} has a type, which transformers ignores here: name it rope_type")


def _check_known(rope: Settings) -> None:
    """Raises `UserError` for a field that transformers does not read, such as a misspelt one."""
    for name, value in rope.items():
        if isinstance(value, dict):
            _check_known(value)
        elif value is not None and name not in KNOWN:
            check(False, f"the rotary setting {name}={value!r} is not supported: delete it to ignore it")


def _yarn_settings(rope: Settings) -> Settings:
    """Returns our settings of YaRN; DeepSeek's `mscale` and `mscale_all_dim` are factors of the logarithm."""
    names = {"beta_fast": 32, "beta_slow": 1}
    result: Settings = {name: float(rope.get(name) or default) for name, default in names.items()}
    result["rounded"] = rope.get("truncate") is not False
    if (factor := rope.get("attention_factor")) is not None:
        return result | {"attention_factor": float(factor)}
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = (0.1 * rope[name] * math.log(rope["factor"]) + 1 for name in ("mscale", "mscale_all_dim"))
        return result | {"attention_factor": over / under}
    return result


def rope_parameters(rotary: RotaryConfig) -> Settings:
    """Returns their `rope_parameters`."""
    scaling: Settings = {"rope_type": "default" if rotary.scaling == "none" else rotary.scaling}
    if rotary.scaling != "none":
        scaling["factor"] = rotary.factor
    if rotary.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rotary.original_length
    if rotary.scaling == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rotary.scaling == "yarn":
        scaling |= {name: getattr(rotary, name) for name in ("beta_fast", "beta_slow", "attention_factor")}
        scaling["truncate"] = rotary.rounded
    if rotary.fraction != 1:
        scaling["partial_rotary_factor"] = rotary.fraction
    return {"rope_theta": rotary.base, **scaling}


def rotary_fields(rotary: RotaryConfig, *, partial: bool = False) -> Settings:
    """Returns the fields of config.json: `rope_parameters` for transformers 5, the others for earlier versions.

    If `partial`, the architecture has a default fraction of its own, so that the fraction is always written.
    """
    fraction = {"partial_rotary_factor": rotary.fraction} if partial else {}
    parameters = rope_parameters(rotary) | fraction
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": rotary.base,
        "rope_scaling": None if rotary.scaling == "none" else scaling,
        **fraction,
    }


def rotary_fields_by_kind(rotary: RotaryConfig) -> Settings:
    """Returns the fields of architectures with another rotation for layers with windows."""
    base = rotary.window_base or rotary.base
    local = {"rope_theta": base, "rope_type": "default"}
    kinds = {"full_attention": rope_parameters(rotary), "sliding_attention": local}
    return rotary_fields(rotary) | {"rope_parameters": kinds}
