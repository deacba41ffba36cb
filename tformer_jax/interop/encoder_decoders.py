"""Hugging Face's encoder-decoder models: T5, mT5, umT5, BART, mBART, Marian, M2M-100."""

from collections.abc import Callable
from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import (
    Architecture,
    Settings,
    check,
    our_activation,
    our_settings,
    require,
    their_fields,
    transformers_activation,
)
from tformer_jax.interop.mapping import (
    AFFINE,
    NORM,
    ROW,
    SAME,
    Part,
    Rule,
    attention_parts,
    kernel,
    parts,
    rules_below,
)

Config = Callable[[ModelConfig], Settings]


def _t5_attention(ours: str, theirs: str) -> tuple[Part, ...]:
    return attention_parts(ours, (f"{theirs}.{name}" for name in "qkvo"))


def _t5_ffn(number: int, expand: str) -> tuple[Part, ...]:
    """Returns the parts of T5's FFNs, given their name of the projection that all have, `wi` (plain) or `wi_1`."""
    dense = f"layer.{number}.DenseReluDense"
    return (
        ("ffn/gate/kernel", f"{dense}.wi_0.weight", kernel()),
        ("ffn/expand/kernel", f"{dense}.{expand}.weight", kernel()),
        ("ffn/contract/kernel", f"{dense}.wo.weight", kernel()),
        ("ffn_residual/norm/scale", f"layer.{number}.layer_norm.weight", SAME),
    )


_T5_BIAS = "SelfAttention.relative_attention_bias.weight"
_T5_SELF = (
    *_t5_attention("self_attention", "layer.0.SelfAttention"),
    ("self_attention_residual/norm/scale", "layer.0.layer_norm.weight", SAME),
    ("attention_positions/embedding", f"layer.0.{_T5_BIAS}", SAME),
)
_T5_CROSS = (
    *_t5_attention("cross_attention", "layer.1.EncDecAttention"),
    ("cross_attention_residual/norm/scale", "layer.1.layer_norm.weight", SAME),
)
_T5_UNUSED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
"""Published checkpoints have it, and no model reads it: cross-attention has no positions."""


def _t5_rules(cfg: ModelConfig) -> tuple[Rule, ...]:
    expand = "wi_1" if cfg.ffn == "gated" else "wi"
    return (
        Rule("target_embedding/embedding", "shared.weight"),
        Rule("head/kernel", "lm_head.weight", kernel()),
        Rule("encoder/norm/scale", "encoder.final_layer_norm.weight"),
        Rule("decoder/norm/scale", "decoder.final_layer_norm.weight"),
        *(
            Rule(f"{s}/attention_positions/embedding", f"{s}.block.0.layer.0.{_T5_BIAS}")
            for s in ("encoder", "decoder")
        ),
        *rules_below("encoder/layers_{i}/", "encoder.block.{i}.", (*_T5_SELF, *_t5_ffn(1, expand))),
        *rules_below("decoder/layers_{i}/", "decoder.block.{i}.", (*_T5_SELF, *_T5_CROSS, *_t5_ffn(2, expand))),
    )


def _t5_feed_forward(hf: Settings) -> tuple[bool, str]:
    """Returns whether FFNs are gated, and their activation: `feed_forward_proj`, unless another field has it."""
    gate, _, kind = hf["feed_forward_proj"].rpartition("-")
    check(gate in ("", "gated"), f"feed_forward_proj={hf['feed_forward_proj']!r} is not supported")
    gated, activation = hf.get("is_gated_act"), "gelu_new" if gate and kind == "gelu" else kind
    return bool(gate) if gated is None else gated, hf.get("dense_act_fn") or activation


_T5_FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "max_length",
    "d_model": "dim",
    "num_layers": "encoder_layers",
    "num_heads": "num_heads",
    "d_kv": "head_dim",
    "d_ff": "ffn_dim",
    "layer_norm_epsilon": "norm_eps",
}


def _t5_settings(hf: Settings) -> Settings:
    require(hf, is_encoder_decoder=True)
    gated, activation = _t5_feed_forward(hf)
    return our_settings(_T5_FIELDS, hf) | {
        "family": "seq2seq",
        "source_vocab_size": hf["vocab_size"],
        "decoder_layers": hf["num_layers"] if hf.get("num_decoder_layers") is None else hf["num_decoder_layers"],
        "attention_bias": (),
        "attention_scale": 1.0,
        "ffn": "gated" if gated else "mlp",
        "ffn_bias": False,
        "activation": our_activation(activation),
        "norm": "rmsnorm",
        "position": "relative",
        "relative": {
            "buckets": hf["relative_attention_num_buckets"],
            "distance": hf["relative_attention_max_distance"],
        },
        "scale_embeddings": False,
        "scale_output": hf.get("scale_decoder_outputs", hf["tie_word_embeddings"]),
        **dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), hf["dropout_rate"]),
        "initializer": "normal",
    }


def _t5_config(cfg: ModelConfig) -> Settings:
    gated = cfg.ffn == "gated"
    kind = "gelu" if gated and cfg.activation == "gelu_tanh" else transformers_activation(cfg.activation)
    return their_fields(_T5_FIELDS, cfg) | {
        "num_decoder_layers": cfg.decoder_layers,
        "d_kv": cfg.head_size,
        "feed_forward_proj": f"gated-{kind}" if gated else kind,
        "relative_attention_num_buckets": cfg.relative.buckets,
        "relative_attention_max_distance": cfg.relative.distance,
        "tie_word_embeddings": cfg.scale_output or cfg.tie_embeddings == "all",
        "scale_decoder_outputs": cfg.scale_output,
        "dropout_rate": cfg.dropout,
        "is_encoder_decoder": True,
    }


def _umt5_settings(hf: Settings) -> Settings:
    settings = _t5_settings(hf)
    return settings | {"relative": settings["relative"] | {"by_layer": True}}


def _bart_attention(ours: str, theirs: str) -> tuple[Part, ...]:
    projections = attention_parts(ours, (f"{theirs}.{name}_proj" for name in ("q", "k", "v", "out")))
    return (*projections, *parts(f"{ours}_residual/norm", f"{theirs}_layer_norm", NORM))


_BART_FFN = (
    *parts("ffn/expand", "fc1", AFFINE),
    *parts("ffn/contract", "fc2", AFFINE),
    *parts("ffn_residual/norm", "final_layer_norm", NORM),
)
_BART_SELF = _bart_attention("self_attention", "self_attn")
_MARIAN = (
    Rule("target_embedding/embedding", "model.shared.weight"),
    Rule("head/bias", "final_logits_bias", ROW),
    Rule("head/kernel", "lm_head.weight", kernel()),
    *rules_below("encoder/layers_{i}/", "model.encoder.layers.{i}.", (*_BART_SELF, *_BART_FFN)),
    *rules_below(
        "decoder/layers_{i}/",
        "model.decoder.layers.{i}.",
        (*_BART_SELF, *_bart_attention("cross_attention", "encoder_attn"), *_BART_FFN),
    ),
)
_BART = (
    *_MARIAN,
    Rule("source_input/positions/embedding", "model.encoder.embed_positions.weight"),
    Rule("target_input/positions/embedding", "model.decoder.embed_positions.weight"),
    *rules_below("source_input/norm/", "model.encoder.layernorm_embedding.", NORM),
    *rules_below("target_input/norm/", "model.decoder.layernorm_embedding.", NORM),
)
_FINAL_NORMS = (
    *rules_below("encoder/norm/", "model.encoder.layer_norm.", NORM),
    *rules_below("decoder/norm/", "model.decoder.layer_norm.", NORM),
)
_MARIAN_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
    "d_model": "dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "ffn_dim",
    "activation_function": "activation",
    "scale_embedding": "scale_embeddings",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "ffn_dropout",
    "init_std": "init_std",
}


def _marian_settings(hf: Settings, *, pre_norm: bool = False) -> Settings:
    require(hf, is_encoder_decoder=True, normalize_before=pre_norm, add_final_layer_norm=pre_norm)
    require(hf, share_encoder_decoder_embeddings=True, decoder_vocab_size=hf["vocab_size"], add_bias_logits=False)
    for name in ("attention_heads", "ffn_dim"):
        require(hf, **{f"decoder_{name}": hf[f"encoder_{name}"]})
    return our_settings(_MARIAN_FIELDS, hf) | {
        "family": "seq2seq",
        "source_vocab_size": hf["vocab_size"],
        "norm_placement": "pre" if pre_norm else "post",
        "position": "sinusoidal_halves",
        "initializer": "normal",
    }


def _bart_settings(hf: Settings, *, pre_norm: bool = False) -> Settings:
    require(hf, normalize_embedding=True, static_position_embeddings=False, extra_pos_embeddings=2)
    learned = {"position": "learned", "position_offset": 2, "embedding_norm": True}
    return _marian_settings(hf, pre_norm=pre_norm) | learned


def _m2m_100_settings(hf: Settings) -> Settings:
    """Returns our settings; the first position is `pad_token_id + 1`, because padding has position `pad_token_id`."""
    offset = hf["pad_token_id"] + 1
    return _marian_settings(hf, pre_norm=True) | {"position": "sinusoidal_fairseq", "position_offset": offset}


def _bart_config(cfg: ModelConfig, *, pre_norm: bool = False) -> Settings:
    """Returns their settings; CTranslate2's converter reads `normalize_before`, which transformers 5 no longer has."""
    return _marian_config(cfg) | {"normalize_before": pre_norm}


def _m2m_100_config(cfg: ModelConfig) -> Settings:
    """Returns their settings; without the last two, transformers would skip layers when it trains the model."""
    return _marian_config(cfg) | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def _marian_config(cfg: ModelConfig) -> Settings:
    return their_fields(_MARIAN_FIELDS, cfg) | {
        "decoder_vocab_size": cfg.vocab_size,
        "decoder_attention_heads": cfg.num_heads,
        "decoder_ffn_dim": cfg.ffn_dim,
        "is_encoder_decoder": True,
        "tie_word_embeddings": cfg.tie_embeddings == "all",
    }


_EMBEDDINGS = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight")
_MODEL_EMBEDDINGS = {f"model.{copy}": f"model.{name}" for copy, name in _EMBEDDINGS.items()}
_POSITIONS = (r"model\.(en|de)coder\.embed_positions\.weights?",)
_VERSIONS = (r"model\.(en|de)coder\.version",)
"""Fairseq's numbers of its format, which published checkpoints of BART have."""


def _t5_architecture(name: str, settings: Callable[[Settings], Settings], config: Config) -> Architecture:
    rest: dict[str, Any] = {"shared": "shared.weight", "ties_missing_head": True, "copies": _EMBEDDINGS}
    return Architecture(name, settings, config, _t5_rules, _T5_UNUSED, **rest)


def _bart_architecture(
    name: str, settings: Callable[[Settings], Settings], config: Config, *rules: Rule, ignored: tuple[str, ...] = ()
) -> Architecture:
    rest: dict[str, Any] = {"shared": "model.shared.weight", "copies": _MODEL_EMBEDDINGS}
    rest["stored_sinusoids"] = name == "MarianMTModel"
    return Architecture(name, settings, config, lambda cfg: rules, (*_VERSIONS, *ignored), "model.", **rest)


ENCODER_DECODERS = {
    "t5": _t5_architecture("T5ForConditionalGeneration", _t5_settings, _t5_config),
    "mt5": _t5_architecture(
        "MT5ForConditionalGeneration",
        lambda hf: _t5_settings(hf) | {"scale_output": False},
        lambda cfg: _t5_config(cfg) | {"tie_word_embeddings": cfg.tie_embeddings == "all"},
    ),
    "umt5": _t5_architecture("UMT5ForConditionalGeneration", _umt5_settings, _t5_config),
    "bart": _bart_architecture("BartForConditionalGeneration", _bart_settings, _bart_config, *_BART),
    "mbart": _bart_architecture(
        "MBartForConditionalGeneration",
        lambda hf: _bart_settings(hf, pre_norm=True),
        lambda cfg: _bart_config(cfg, pre_norm=True),
        *_BART,
        *_FINAL_NORMS,
    ),
    "marian": _bart_architecture("MarianMTModel", _marian_settings, _marian_config, *_MARIAN, ignored=_POSITIONS),
    "m2m_100": _bart_architecture(
        "M2M100ForConditionalGeneration",
        _m2m_100_settings,
        _m2m_100_config,
        *_MARIAN,
        *_FINAL_NORMS,
        ignored=_POSITIONS,
    ),
}
