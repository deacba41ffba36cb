"""The rungs of configs/ladder.py: each adds one switch; and the widths of configs/transfer.py."""

import itertools
from pathlib import Path

import jax
import pytest

from tests.helpers import with_own_stacks
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import ModelConfig
from tformer_jax.models import registry

FOLDER = Path(__file__).resolve().parents[2] / "configs"
LADDER = f"{FOLDER / 'ladder.py'}"
SWITCHES = {
    "2017": set(),
    "pre_norm": {"model.norm_placement"},
    "rmsnorm": {"model.norm"},
    "swiglu": {"model.ffn", "model.activation", "model.ffn_dim"},
    "rope": {"model.position"},
    "gqa": {"model.num_kv_heads"},
    "qk_norm": {"model.qk_norm"},
    "tied": {"model.tie_embeddings"},
    "no_bias": {"model.attention_bias", "model.ffn_bias"},
    "cosine": {"optim.schedule", "optim.final_fraction"},
    "muon": {"optim.optimizer"},
}


def parameters(task: str, rung: str) -> int:
    cfg = read_config(f"{LADDER}:{task}:{rung}").model
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 300,
        "source_vocab_size": 300 if cfg.family == "seq2seq" else None,
    }
    model = registry.build(ModelConfig(**(vars(cfg) | with_own_stacks(cfg.family, sizes))))
    shapes = jax.eval_shape(lambda: registry.init(model, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.long
@pytest.mark.parametrize("task", ["shakespeare", "multi30k"])
def test_each_rung_adds_its_switch_alone(task):
    flat = {rung: config.flat(read_config(f"{LADDER}:{task}:{rung}")) for rung in SWITCHES}
    for before, after in itertools.pairwise(SWITCHES):
        changed = {name for name in flat[after] if flat[after][name] != flat[before][name]}
        assert changed == SWITCHES[after] | {"name"}, after
    assert config.flat(read_config(f"{LADDER}:{task}")) | {"name": ""} == flat["muon"] | {"name": ""}
    assert all(f"{rung}," in Path(LADDER).read_text() for rung in list(SWITCHES)[:-1])


@pytest.mark.parametrize("task", ["shakespeare", "multi30k"])
def test_the_gated_ffn_has_as_many_parameters(task):
    assert parameters(task, "swiglu") == pytest.approx(parameters(task, "rmsnorm"), rel=0.01)


@pytest.mark.parametrize("width", [64, 256])
def test_parameterizations_differ_in_nothing_else(width):
    standard, mup = (read_config(f"{FOLDER / 'transfer.py'}:{kind}:{width}") for kind in ("standard", "mup"))
    before, after = config.flat(standard), config.flat(mup)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"name", "model.parameterization", "model.base_dim"}
    assert mup.model.width_factor == width / 64
    for cfg in (standard, mup):
        assert (cfg.model.dim, cfg.model.ffn_dim, cfg.model.num_heads * cfg.model.head_size) == (
            width,
            4 * width,
            width,
        )


@pytest.mark.parametrize("location", ["ladder.py:rope", "ladder.py:multi30k:swish", "transfer.py:mup:100"])
def test_unknown_variants_are_named(location):
    with pytest.raises(UserError, match=f"^variant '{location.partition(':')[2]}' of configs/.*: write "):
        read_config(str(FOLDER / location))
