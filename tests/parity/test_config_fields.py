"""Each field of a config.json is read as transformers reads it, changes nothing there, or is refused."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.parity import test_huggingface as parity
from tests.parity.test_published_configs import CLASSES
from tformer_jax.base.errors import UserError
from tformer_jax.interop import hf
from tformer_jax.interop.published_fields import ALIASES, DEFAULTS, UNREAD, UNREAD_BY
from tformer_jax.models import registry

MODELS = {
    kind: next(name for name in parity.MODELS if name.split()[0] in (kind, kind.removesuffix("_text")))
    for kind in CLASSES
}
"""Names of models of `test_huggingface`, by `model_type`."""
AUTO = {
    **dict.fromkeys(hf.CLASSIFIERS, transformers.AutoModelForSequenceClassification),
    **dict.fromkeys(("t5", "bart", "marian"), transformers.AutoModelForSeq2SeqLM),
}
NOT_VARIED = (
    *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config", "auto_map"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "return_dict", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict_in_generate", "cache_implementation"),
    *("summary_activation", "classifier_dropout"),
)
"""Fields that say how to load or what to return."""
VALUES = {
    "hidden_act": ["gelu"],
    "hidden_activation": ["silu"],
    "activation_function": ["relu"],
    "dense_act_fn": ["gelu", "gelu_new"],
    "feed_forward_proj": ["gated-gelu", "gated-silu", "silu"],
    "rope_scaling": [{"type": "linear", "factor": 2.0}],
    "rope_parameters": [{"rope_theta": 7.0, "rope_type": "default"}],
    "num_local_experts": [3],
    "num_experts": [3],
}
"""Values of fields that no value of the same type replaces."""


def others(name: str, value: Any) -> list[Any]:
    """Returns other values of a field."""
    if name in VALUES:
        return VALUES[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(value - 1, 0)]
    return [value / 2 + 0.1] if isinstance(value, float) else [3, 0.5] if value is None else []


def variations(kind: str, config: dict[str, Any]):
    """Yields config.json with one field changed."""
    given = json.loads(CLASSES[kind](**parity.MODELS[MODELS[kind]][1]).to_json_string(use_diff=False)) | config
    names = {*given, *UNREAD, *UNREAD_BY.get(kind, ()), *ALIASES.get(kind, ()), *DEFAULTS[kind], *VALUES}
    for name in sorted(names.difference(NOT_VARIED)):
        depth = given.get("num_hidden_layers", 2)
        kinds = [["full_attention"] * depth, ["sliding_attention"] * depth, ["sliding_attention", "full_attention"]]
        for value in kinds if name == "layer_types" else others(name, given.get(name)):
            yield name, value, config | {name: value}


def their_logits(kind: str, folder) -> np.ndarray | None:
    """Returns their logits; None: they refuse the config, whose types they check more strictly than we do."""
    auto = AUTO.get(kind, transformers.AutoModelForCausalLM)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception:
        return None
    model, report = auto.from_pretrained(folder, config=config, attn_implementation="eager", output_loading_info=True)
    if any(report.values()):
        raise ValueError(report)
    with torch.no_grad():
        model.config.is_encoder_decoder = kind in ("t5", "bart", "marian")  # by which we choose the arguments
        return parity.run_theirs(model.eval()).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_a_changed_field_changes_our_model_as_theirs_or_is_refused(kind, tmp_path):
    parity.their_model(MODELS[kind]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    original = json.loads(path.read_text())
    base, params = hf.load(tmp_path)
    unchanged = logits(base, params)
    problems, refused, equal = [], 0, 0
    for name, value, config in variations(kind, original):
        path.write_text(json.dumps(config))
        try:
            cfg, changed = hf.load(tmp_path)
            ours = unchanged if cfg == base else logits(cfg, changed)
        except UserError:
            refused += 1
            continue
        try:
            theirs = their_logits(kind, tmp_path)
        except Exception as error:
            problems.append(f"{name}={value!r} is read, but not by transformers: {error!r:.100}")
            continue
        if theirs is not None:
            equal += 1
            if not np.allclose(parity.shown(ours), parity.shown(theirs), atol=1e-4):
                problems.append(f"{name}={value!r} gives other logits")
    assert problems == []
    assert min(refused, equal) > 20


def logits(cfg, params):
    return np.asarray(parity.run_ours(registry.build(cfg), params))


@pytest.mark.parametrize("kind", CLASSES)
def test_each_field_of_their_class_is_read_or_declared(kind):
    """Fields that are neither are refused by name if they have a value."""
    given = json.loads(CLASSES[kind](**parity.MODELS[MODELS[kind]][1]).to_json_string(use_diff=False))
    fields = hf.Fields(given)
    hf.ARCHITECTURES[kind].settings(fields)
    fields.check_all_read()
    left = given.keys() - fields._read - fields._unread
    assert [name for name in left if given[name] not in (None, False, 0, "")] == []
