"""Settings of a model that have no effect, or that a kind of attention does not support, are refused."""

import re

import pytest

from tformer_jax.config import ConfigError, ModelConfig, kinds

ROTARY, MOE = {"position": "rotary"}, {"ffn": "moe"}
YARN = {"scaling": "yarn", "factor": 2}
DELTA = {"family": "decoder_lm", "attention": "gated_delta"}
WITHOUT_EFFECT = {
    "model.moe.num_experts=4: is used only by model.ffn='moe', not 'mlp'": {"moe": {"num_experts": 4}},
    "model.rotary.base=5.0: is used only by model.position='rotary'": {"rotary": {"base": 5}},
    "model.relative.buckets=8: is used only by model.position='relative'": ROTARY | {"relative": {"buckets": 8}},
    "model.encoder_layers=2: is used only by model.family='seq2seq' or": {"family": "decoder_lm", "encoder_layers": 2},
    "model.decoder_layers=2: is used only by model.family='seq2seq' or": {"family": "classifier", "decoder_layers": 2},
    "model.norm_bias=False: is used only by model.norm='layernorm'": {"norm": "rmsnorm", "norm_bias": False},
    "model.position_offset=2: is used only by model.position='sinusoidal_fairseq' or 'learned'": {"position_offset": 2},
    "model.rotary.factor=2.0: needs model.rotary.scaling": ROTARY | {"rotary": {"factor": 2}},
    "model.rotary.factor=1.0: must exceed 1.0": ROTARY | {"rotary": {"scaling": "linear"}},
    "model.rotary.original_length=8: is used only by": ROTARY | {"rotary": {"original_length": 8}},
    "model.rotary.window_base=9.0: no layer uses it": ROTARY | {"rotary": {"window_base": 9}},
    "model.rotary.window_base=9.0: applies to all layers; write it as model.rotary.base": ROTARY
    | {"rotary": {"window_base": 9}, "layer_pattern": ("window", "nope"), "window": 3},
    "model.rotary.beta_slow=2.0: is used only by model.rotary.scaling='yarn'": ROTARY | {"rotary": {"beta_slow": 2}},
    "model.rotary.beta_fast=1.0: must exceed model.rotary.beta_slow=1.0": ROTARY | {"rotary": YARN | {"beta_fast": 1}},
    "model.rotary.base=1.0: must exceed 1.0 for": ROTARY | {"rotary": YARN | {"base": 1}},
    "model.ffn_dropout=0.1: is not supported by ffn 'moe': is not applied to experts; write 0.0": MOE
    | {"ffn_dropout": 0.1},
    "model.moe.shared_gate=True: there is no shared expert": MOE | {"moe": {"shared_gate": True}},
    "model.moe.dense_dim=3: every layer has experts": MOE | {"moe": {"dense_dim": 3}},
    "model.moe.every=7: leaves none of the 6 layers with experts": MOE | {"moe": {"every": 7}},
    "model.moe.dense_layers=6: leaves none of the 6 layers": MOE | {"moe": {"dense_layers": 6}},
    "model.scan_layers=True: cannot scan over layers that differ": MOE
    | {"moe": {"dense_layers": 1}, "scan_layers": True},
    "model.layer_pattern=('full', 'nope'): 'nope' has no effect with": {"layer_pattern": ("full", "nope")},
    "model.layer_pattern=('nope',): no layer uses model.position='rotary'": ROTARY | {"layer_pattern": ("nope",)},
    "model.layer_pattern=('nope', 'gated_delta'): no layer uses model.position='rotary'": {
        "layer_pattern": ("nope", "gated_delta"),
        "family": "decoder_lm",
        **ROTARY,
    },
    "model.layer_pattern=('gated_delta',): no layer uses model.attention='multi_head'; set model.attention='gated_": {
        "layer_pattern": ("gated_delta",),
        "family": "decoder_lm",
        **ROTARY,
    },
    **{
        f"model.attention_sinks=True: is used only by model.attention='multi_head', not {kind!r}": {
            "attention": kind,
            "num_heads": 1,
            "attention_sinks": True,
        }
        for kind in ("basic", "mla", "gated_delta")
    },
    "model.attention_softcap=2.0: is used only by model.attention='multi_head' or 'mla', not 'gated_delta'": {
        "layer_pattern": ("gated_delta",),
        "attention_softcap": 2.0,
    },
    "model.output_bias=True: is used only by model.family='seq2seq' or 'decoder_lm' or 'masked_lm', not 'classifier'": {
        "family": "classifier",
        "output_bias": True,
    },
    "model.prefix_lm=True: is used only by model.family='decoder_lm'": {"prefix_lm": True},
    "model.moe.expert_capacity=0.0: must be above 0": MOE | {"moe": {"expert_capacity": 0}},
    "model.layer_pattern=('full', 'window'): no stack reaches 'window' in 1 layers": {
        "family": "classifier",
        "encoder_layers": 1,
        "layer_pattern": ("full", "window"),
        "window": 4,
    },
    "model.lookahead=1: is used only by model.family='seq2seq' or 'classifier' or 'masked_lm', not 'decoder_lm'": {
        "family": "decoder_lm",
        "lookahead": 1,
    },
    "model.pooling='last': is used only by model.family='classifier'": {"pooling": "last"},
    "model.num_classes=2: is used only by model.family='classifier'": {"num_classes": 2},
    "model.source_vocab_size=9: is used only by": {"family": "decoder_lm", "source_vocab_size": 9},
    "model.attention_projections='fused_kv': is used only by": {
        "attention": "basic",
        "num_heads": 1,
        "attention_projections": "fused_kv",
    },
    "model.attention_bias=(): is used only by model.attention='multi_head', not 'basic'; leave it out, or write "
    "('query', 'key', 'value', 'output')": {"attention": "basic", "num_heads": 1, "attention_bias": ()},
    "model.mla.latent_dim=8: is used only by model.attention='mla', not 'multi_head'; leave it out, or write 512": {
        "mla": {"latent_dim": 8}
    },
    "model.gated_delta.num_key_heads=2: is used only by model.attention='gated_delta', not 'multi_head'; leave it out, "
    "or write None": {"gated_delta": {"num_key_heads": 2}},
    "model.num_kv_heads=2: is used only by": {"attention": "mla", "num_kv_heads": 2},
    "model.qk_norm=True: is used only by model.attention='multi_head'": DELTA | {"qk_norm": True},
}


@pytest.mark.parametrize("sentence", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused(sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ModelConfig(**WITHOUT_EFFECT[sentence])


UNSUPPORTED = {
    "model.family='seq2seq': is not supported by attention 'gated_delta': a recurrent state only reads earlier tokens; "
    "write 'decoder_lm'": {"attention": "gated_delta"},
    "model.prefix_lm=True: is not supported by attention 'gated_delta'": DELTA | {"prefix_lm": True},
    "model.window=4: is not supported by": DELTA | {"window": 4, "layer_pattern": ("window",)},
    "model.attention_backend='blockwise': is not supported by": DELTA | {"attention_backend": "blockwise"},
    "model.position='rotary': is not supported by attention 'gated_delta'": DELTA | {"position": "rotary"},
    "model.parameterization='mup': is not supported by attention 'mla'": {
        "attention": "mla",
        "parameterization": "mup",
        "base_dim": 8,
    },
    "model.parameterization='mup': is not supported by attention 'basic'": {
        "attention": "basic",
        "num_heads": 1,
        "parameterization": "mup",
        "base_dim": 8,
    },
    "model.gated_delta.num_key_heads=3: must divide the 8 value heads": DELTA | {"gated_delta": {"num_key_heads": 3}},
    "model.mla.rotary_dim=3: must be even": {"attention": "mla", "mla": {"rotary_dim": 3}},
    "model.prefix_lm=True: is not": {
        "family": "decoder_lm",
        "layer_pattern": ("gated_delta", "full"),
        "prefix_lm": True,
    },
}


@pytest.mark.parametrize("sentence", UNSUPPORTED)
def test_what_a_kind_of_attention_does_not_support_is_refused(sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ModelConfig(**UNSUPPORTED[sentence])


def test_other_layers_may_use_what_a_recurrence_does_not():
    own = {"layer_pattern": ("gated_delta", "window"), "window": 4, "position": "rotary"}
    cfg = ModelConfig(family="decoder_lm", attention_backend="blockwise", gated_delta={"num_key_heads": 2}, **own)
    assert cfg.attentions == ("gated_delta", "multi_head")


def test_a_registered_kind_of_attention_brings_its_limits(monkeypatch):
    class Own:
        limits = (kinds.Limit("model.num_heads", (1, 2), "is small"),)

    monkeypatch.setitem(kinds.ATTENTIONS, "own", Own)
    with pytest.raises(
        ConfigError, match="model.num_heads=8: is not supported by attention 'own': is small; write 1 or 2"
    ):
        ModelConfig(attention="own")


def test_registered_kinds_use_the_settings_that_they_declare(monkeypatch):
    class Own:
        settings = ("moe",)

        @staticmethod
        def check(cfg):
            if cfg.ffn_dim % 2:
                raise cfg.error("ffn_dim", "must be even")

    monkeypatch.setitem(kinds.FFNS, "own", Own)
    assert ModelConfig(ffn="own", moe={"num_experts": 4}).moe.num_experts == 4
    with pytest.raises(ConfigError, match="model.ffn_dim=3: must be even"):
        ModelConfig(ffn="own", ffn_dim=3)
    monkeypatch.setattr(Own, "settings", ())
    with pytest.raises(ConfigError, match="model.moe.num_experts=4: is used only by model.ffn='moe', not 'own'"):
        ModelConfig(ffn="own", moe={"num_experts": 4})


def test_only_recurrences_are_named_in_the_pattern_of_layers():
    with pytest.raises(ConfigError, match="'mla' is no recurrence; write 'full', and model.attention='mla'"):
        ModelConfig(layer_pattern=("mla", "full"))


def test_narrow_embeddings_of_a_masked_lm_need_a_transform_of_their_width():
    assert ModelConfig(family="masked_lm", embedding_dim=4, head_transform=True).embedding_dim == 4
    assert ModelConfig(family="classifier", embedding_dim=4, num_classes=2).embedding_dim == 4
    with pytest.raises(ConfigError, match=r"model\.embedding_dim=4: needs model\.head_transform=True, whose outputs"):
        ModelConfig(family="masked_lm", embedding_dim=4)
