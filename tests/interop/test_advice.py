"""The settings that an export advises are those with which the architecture represents the model."""

import ast
import dataclasses

import pytest

from tests.helpers import build, rest_slow, tiny
from tests.parity import own_runs
from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf
from tformer_jax.interop import hf
from tformer_jax.interop.published_fields import UNSUPPORTED

MODELS = {
    "layers of translate_multi30k.py": ("seq2seq", presets.LAYERS_OF_QWEN3),
    "defaults": ("seq2seq", {}),
    "defaults of a language model": ("decoder_lm", {}),
}
CASES = [
    ("layers of translate_multi30k.py", "bart"),
    ("layers of translate_multi30k.py", "t5"),
    ("layers of translate_multi30k.py", "marian"),
    ("defaults of a language model", "llama"),
    *(("defaults", name) for name in ("bart", "t5", "marian", "mbart", "m2m_100")),
    *(("defaults of a language model", name) for name in ("gpt2", "mistral", "qwen2", "qwen3", "smollm3", "stablelm")),
]


@pytest.mark.parametrize("model_type", ["bart", "marian"])
def test_advice_for_two_tables_of_inputs_names_one(model_type):
    """Regression test: a model with the advised settings was refused for its embedding of sources."""
    assert "model.tie_embeddings='all'" in hf.needed_changes(tiny("seq2seq", tie_embeddings="output"), model_type)


@pytest.mark.parametrize("case", rest_slow(CASES, 4))
def test_a_model_with_the_advised_settings_is_saved(case, tmp_path):
    name, model_type = case
    family, settings = MODELS[name]
    cfg = tiny(family, tie_embeddings="all" if family == "seq2seq" else "output", **settings)
    with pytest.raises(UserError, match="cannot represent this model"):
        hf.save(tmp_path, model_type, cfg, build(cfg)[1])
    changes = hf.needed_changes(cfg, model_type)
    values = dict(change.removeprefix("model.").split("=") for change in changes)
    changed = dataclasses.replace(cfg, **{name: ast.literal_eval(value) for name, value in values.items()})
    hf.save(tmp_path, model_type, changed, build(changed)[1])
    assert hf.needed_changes(changed, model_type) == []
    assert hf.needed_changes(cfg, "bert") is None


def test_the_nearest_architecture_of_an_unsupported_one_is_supported():
    for kind, (module, nearest) in UNSUPPORTED.items():
        assert nearest in hf.ARCHITECTURES and kind not in hf.ARCHITECTURES
        with pytest.raises(UserError, match=f"'{kind}' is not supported: it has {module}; '{nearest}' is the nearest"):
            hf.architecture_of(kind)


def test_the_command_advises_the_architecture_with_the_fewest_changes(tmp_path):
    run = own_runs.make(tmp_path / "run", "marian", position="sinusoidal", norm_placement="pre", output_bias=False)
    with pytest.raises(
        UserError,
        match=r"^none of the architectures gpt2, .* represents this model; 'marian' needs a model trained with "
        r"model.norm_placement='post', model.position='sinusoidal_halves'$",
    ):
        export_hf.main(["--run", str(run), str(tmp_path / "out")])
    with pytest.raises(UserError, match=r"cannot represent this model: .*; 'bart' needs a model trained with "):
        export_hf.main(["--run", str(run), "--model-type", "bart", str(tmp_path / "out")])
