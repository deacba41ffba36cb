"""Adapters of PEFT, merged on import, give the logits of PEFT."""

import json

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.cli import import_hf
from tformer_jax.interop import hf

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""PEFT 0.21 reads it of models of transformers 5."""
TOKENS = np.arange(12).reshape(2, 6) + 3
LORA = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
CASES = {
    "llama": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 9},
        "modules_to_save": ["lm_head"],
    },
    "gpt2": {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True},
}


def save_adapter(model, folder, **options) -> torch.nn.Module:
    """Saves a random adapter of a model, and returns the model with it."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA | options))
    for name, parameter in adapted.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("kind", rest_slow([*CASES], 1))
def test_logits_are_those_of_peft(kind, imported, tmp_path):
    folder, _, model = imported(kind)
    model = type(model).from_pretrained(folder)
    before = model(torch.tensor(TOKENS)).logits.detach().numpy()
    adapted = save_adapter(model, tmp_path / "adapter", **CASES[kind])
    import_hf.main([str(folder), "--run", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")])
    run = tj.load(tmp_path / "run")
    expected = adapted(torch.tensor(TOKENS)).logits.detach().numpy()
    assert np.abs(expected - before).max() > 0.1
    assert_close(run.model.apply({"params": run.params}, jnp.asarray(TOKENS)), expected, 1e-4)
    origin = json.loads((tmp_path / "run" / "imported.json").read_text())
    assert origin["adapter"] == str(tmp_path / "adapter") and "adapter_model.safetensors" in origin["sha256"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported, only 'LORA' is"),
    ],
)
def test_other_adapters_are_refused(options, message, imported, tmp_path):
    folder, _, _ = imported("llama")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2} | options))
    with pytest.raises(UserError, match=message):
        hf.load(folder, adapter=tmp_path)
    with pytest.raises(UserError, match="is an adapter of PEFT: name the checkpoint of its base, and add --adapter"):
        hf.load(tmp_path)


def test_an_adapter_of_another_model_or_of_a_tied_embedding_is_refused(imported, tmp_path):
    llama, gpt2 = (imported(kind)[0] for kind in ("llama", "gpt2"))
    model = type(imported("gpt2")[2]).from_pretrained(gpt2)
    save_adapter(model, tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(UserError, match=r"the checkpoint has no array transformer.h.0.attn.c_attn.weight"):
        hf.load(llama, adapter=tmp_path)
    model = type(imported("gpt2")[2]).from_pretrained(gpt2)
    save_adapter(model, tmp_path / "tied", target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte"])
    with pytest.raises(UserError, match=r"changes transformer.wte.weight, which the model also uses as its output"):
        hf.load(gpt2, adapter=tmp_path / "tied")
