"""Hugging Face's encoders: as classifiers, which need no head to embed texts, and as masked language models.

RoBERTa and XLM-R have BERT's layers with other positions and heads; DistilBERT and ALBERT have BERT's with other names.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import (
    Architecture,
    Settings,
    check,
    class_names,
    label_fields,
    layer_types,
    our_activation,
    our_layer_pattern,
    our_settings,
    read_layer_types,
    require,
    their_fields,
    transformers_activation,
)
from tformer_jax.interop.mapping import (
    AFFINE,
    NORM,
    SAME,
    Part,
    Rule,
    attention_parts,
    fused_rows,
    kernel,
    parts,
    rules_below,
)
from tformer_jax.interop.rotary import rotary_fields_by_kind, rotary_settings


def _layer(attention: Iterable[str], *names: str) -> tuple[Part, ...]:
    """Returns the parts of BERT's layer, given the names of its projections, and of norm, FFN kernels and norm."""
    modules = ("self_attention_residual/norm", "ffn/expand", "ffn/contract", "ffn_residual/norm")
    named = zip(modules, names, (NORM, AFFINE, AFFINE, NORM), strict=True)
    others = (part for ours, theirs, leaves in named for part in parts(ours, theirs, leaves))
    return (*attention_parts("self_attention", attention), *others)


_BERT_LAYER = _layer(
    (*(f"attention.self.{role}" for role in ("query", "key", "value")), "attention.output.dense"),
    *("attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)
_DISTILBERT_LAYER = _layer(
    (f"attention.{name}_lin" for name in ("q", "k", "v", "out")),
    *("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
)
_ALBERT_LAYER = _layer(
    (f"attention.{name}" for name in ("query", "key", "value", "dense")),
    *("attention.LayerNorm", "ffn", "ffn_output", "full_layer_layer_norm"),
)
_MODERNBERT_LAYER = (
    *parts("self_attention/qkv", "attn.Wqkv", AFFINE),
    ("self_attention/output/kernel", "attn.Wo.weight", kernel(2)),
    ("self_attention/output/bias", "attn.Wo.bias", SAME),
    *parts("self_attention_residual/norm", "attn_norm", NORM),
    *parts("ffn/gate", "mlp.gate", AFFINE),
    *parts("ffn/expand", "mlp.expand", AFFINE),
    *parts("ffn/contract", "mlp.Wo", AFFINE),
    *parts("ffn_residual/norm", "mlp_norm", NORM),
)


def _encoder_rules(prefix: str, layers: str, layer: Iterable[Part]) -> tuple[Rule, ...]:
    """Returns the rules of an encoder with BERT's embeddings, given the name and the parts of a layer."""
    return (
        Rule("embedding/embedding", f"{prefix}embeddings.word_embeddings.weight"),
        Rule("input/positions/embedding", f"{prefix}embeddings.position_embeddings.weight"),
        Rule("input/types", f"{prefix}embeddings.token_type_embeddings.weight"),
        *rules_below("input/norm/", f"{prefix}embeddings.LayerNorm.", NORM),
        *rules_below("encoder/layers_{i}/", f"{prefix}{layers}.{{i}}.", layer),
    )


_MODERNBERT_RULES = (
    Rule("embedding/embedding", "model.embeddings.tok_embeddings.weight"),
    *rules_below("input/norm/", "model.embeddings.norm.", NORM),
    *rules_below("encoder/layers_{i}/", "model.layers.{i}.", _MODERNBERT_LAYER),
    *rules_below("encoder/norm/", "model.final_norm.", NORM),
)

_SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
    "hidden_size": "dim",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "initializer_range": "init_std",
}
_BERT_FIELDS = _SIZES | {
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "type_vocab_size": "token_types",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_DISTILBERT_FIELDS = {
    **{name: _SIZES[name] for name in ("vocab_size", "max_position_embeddings", "initializer_range")},
    **{name: name for name in ("dim", "activation", "dropout", "attention_dropout")},
    "n_layers": "encoder_layers",
    "n_heads": "num_heads",
    "hidden_dim": "ffn_dim",
}
_MODERNBERT_FIELDS = _SIZES | {
    "hidden_activation": "activation",
    "norm_eps": "norm_eps",
    "norm_bias": "norm_bias",
    "mlp_bias": "ffn_bias",
    "classifier_bias": "transform_bias",
    "embedding_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "mlp_dropout": "ffn_dropout",
}
_POST_NORM = {
    "norm_placement": "post",
    "position": "learned",
    "embedding_norm": True,
    "scale_embeddings": False,
    "initializer": "normal",
}


def _bert_settings(hf: Settings) -> Settings:
    """Returns our settings of BERT, without its family."""
    require(hf, position_embedding_type="absolute", is_decoder=False)
    return our_settings(_BERT_FIELDS, hf) | _POST_NORM


def _bert_config(cfg: ModelConfig) -> Settings:
    """Returns their settings; CTranslate2's converter reads the kind of positions, which transformers 5 does not."""
    _check_set(cfg, "token_types")
    return their_fields(_BERT_FIELDS, cfg) | {"position_embedding_type": "absolute"}


def _check_set(cfg: ModelConfig, name: str) -> None:
    """Raises `UserError` if a setting is 0 or False that the architecture needs to be on."""
    if not (value := getattr(cfg, name)):
        raise UserError(f"model.{name}={value!r}")


def _roberta_settings(hf: Settings) -> Settings:
    """Returns our settings; the first position is `pad_token_id + 1`, because padding has position `pad_token_id`."""
    offset = hf["pad_token_id"] + 1
    return _bert_settings(hf) | {"position_offset": offset, "max_length": hf["max_position_embeddings"] - offset}


def _roberta_config(cfg: ModelConfig) -> Settings:
    rows = cfg.position_offset + cfg.max_length
    return _bert_config(cfg) | {"max_position_embeddings": rows, "pad_token_id": cfg.position_offset - 1}


def _distilbert_settings(hf: Settings) -> Settings:
    return our_settings(_DISTILBERT_FIELDS, hf) | _POST_NORM | {"norm_eps": 1e-12}


def _modernbert_settings(hf: Settings) -> Settings:
    """Returns our settings; in a window, a token sees `local_attention // 2` tokens on each side."""
    check(not hf.get("rope_scaling"), "rope_scaling, which scales both kinds of layers, is not supported")
    layers = read_layer_types(hf, "full", *["sliding"] * (hf["global_attn_every_n_layers"] - 1))
    both = {*layers} == {"sliding_attention", "full_attention"}
    check(both, f"layer_types={layers!r} is not supported, only both kinds of attention are")
    return our_settings(_MODERNBERT_FIELDS, hf) | {
        "attention_bias": ("query", "key", "value", "output") if hf["attention_bias"] else (),
        "attention_projections": "fused_qkv",
        "norm": "layernorm",
        "position": "rotary",
        "rotary": rotary_settings(hf, partial=False, window_base=hf["rope_local_base_freq"]),
        "window": hf["local_attention"] // 2 + 1,
        "layer_pattern": our_layer_pattern(layers, "sliding", "full"),
        "ffn": "gated",
        "first_norm": False,
        "embedding_norm": True,
        "head_transform": True,
        "transform_activation": our_activation(hf["classifier_activation"]),
        "scale_embeddings": False,
        "initializer": "normal",
    }


def _modernbert_config(cfg: ModelConfig) -> Settings:
    rotary = rotary_fields_by_kind(cfg.rotary)
    return their_fields(_MODERNBERT_FIELDS, cfg) | {
        "attention_bias": "output" in cfg.attention_bias,
        "classifier_activation": transformers_activation(cfg.head_activation),
        "layer_types": layer_types(cfg, cfg.encoder_layers),
        **({} if cfg.model_class.classifies else {"decoder_bias": cfg.output_bias}),
        "local_attention": 2 * (cfg.window or 1) - 2,
        "global_rope_theta": rotary["rope_theta"],
        "local_rope_theta": rotary["rope_parameters"]["sliding_attention"]["rope_theta"],
        "rope_parameters": rotary["rope_parameters"],
    }


def _albert_settings(hf: Settings) -> Settings:
    """Returns our settings of ALBERT: embeddings of another width, and layers that share their parameters."""
    require(hf, num_hidden_groups=1, inner_group_num=1)
    return _bert_settings(hf) | {"shared_layers": True, "embedding_dim": hf["embedding_size"]}


def _albert_config(cfg: ModelConfig) -> Settings:
    _check_set(cfg, "embedding_dim")
    return _bert_config(cfg) | {"embedding_size": cfg.embedding_dim}


Read = Callable[[Settings], Settings]
Write = Callable[[ModelConfig], Settings]


def _pooled(settings: Read, **pooler: Any) -> Read:
    """Returns a reader of the settings of a classifier of the first token; `pooler` adds its pooler's settings."""
    return lambda hf: settings(hf) | {"pooling": "first", **pooler}


def _classifier(
    name: str, settings: Read, config: Write, rules: tuple[Rule, ...], *, layer: str = "pooler", **names: Any
) -> Architecture:
    """Returns an architecture with one label per text.

    Args:
        settings: their config.json -> our settings, except for the classes.
        layer: our setting of the layer before the output head, which all models of the architecture have.
        names: fields of `Architecture`.
    """

    def read(hf: Settings) -> Settings:
        return settings(hf) | {"family": "classifier", "num_classes": len(class_names(hf))}

    def write(cfg: ModelConfig) -> Settings:
        _check_set(cfg, layer)
        return config(cfg) | label_fields([f"LABEL_{i}" for i in range(cfg.size("num_classes"))])

    rules += rules_below("head/", f"{names.get('classifier', 'classifier')}.", AFFINE)
    return Architecture(f"{name}ForSequenceClassification", read, write, lambda cfg: rules, **names)


def _transform_rules(dense: str, norm: str) -> tuple[Rule, ...]:
    return (*rules_below("transform/", f"{dense}.", AFFINE), *rules_below("transform_norm/", f"{norm}.", NORM))


def _masked_lm(
    name: str, settings: Read, config: Write, rules: tuple[Rule, ...], *, head: tuple[str, str, str], **names: Any
) -> Architecture:
    """Returns an architecture with a tied output head.

    Args:
        head: their names of the transform before the output head, its norm, and the head itself.
        names: fields of `Architecture`.
    """

    def read(hf: Settings) -> Settings:
        require(hf, tie_word_embeddings=True)
        return settings(hf) | {"family": "masked_lm", "head_transform": True}

    def write(cfg: ModelConfig) -> Settings:
        _check_set(cfg, "head_transform")
        return config(cfg)

    transform, norm, output = head
    bias = names["head_bias"]
    rules = (*rules, *_transform_rules(transform, norm), Rule("head/bias", bias))
    copies = {f"{output}.weight": rules[0].theirs} | ({} if bias.startswith(output) else {f"{output}.bias": bias})
    return Architecture(f"{name}ForMaskedLM", read, write, lambda cfg: rules, copies=copies, **names)


_POSITION_IDS = r".*position_ids"
_BERT_RULES = _encoder_rules("bert.", "encoder.layer", _BERT_LAYER)
_ROBERTA_RULES = _encoder_rules("roberta.", "encoder.layer", _BERT_LAYER)
_ROBERTAS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
_DISTILBERT_RULES = _encoder_rules("distilbert.", "transformer.layer", _DISTILBERT_LAYER)
_DISTILBERT_NAMES: dict[str, Any] = {"prefix": "distilbert.", "heads": ("pre_classifier.", "classifier.", "vocab_")}
_MODERNBERT_NAMES: dict[str, Any] = {
    "prefix": "model.",
    "heads": ("head.", "decoder.", "classifier."),
    "fused": lambda cfg: fused_rows("mlp.Wi", "mlp.gate", "mlp.expand"),
    "projections": "fused_qkv",
}
_ALBERT_RULES = (
    *_encoder_rules("albert.", "encoder.albert_layer_groups.0.albert_layers", _ALBERT_LAYER),
    *rules_below("projection/", "albert.encoder.embedding_hidden_mapping_in.", AFFINE),
)
_ALBERT_NAMES: dict[str, Any] = {"prefix": "albert.", "heads": ("predictions.", "classifier.", "sop_classifier.")}


def _pooler_rules(name: str) -> tuple[Rule, ...]:
    return rules_below("pooler/", f"{name}.", AFFINE)


CLASSIFIERS = {
    "bert": _classifier(
        "Bert",
        _pooled(_bert_settings),
        _bert_config,
        _BERT_RULES + _pooler_rules("bert.pooler.dense"),
        ignored=(_POSITION_IDS, r"cls\..*"),
        prefix="bert.",
    ),
    **{
        kind: _classifier(
            name,
            _pooled(_roberta_settings, pooler=True),
            _roberta_config,
            _ROBERTA_RULES + _pooler_rules("classifier.dense"),
            ignored=(_POSITION_IDS, r"roberta\.pooler\..*", r"lm_head\..*"),
            prefix="roberta.",
            classifier="classifier.out_proj",
        )
        for kind, name in _ROBERTAS.items()
    },
    "distilbert": _classifier(
        "DistilBert",
        _pooled(_distilbert_settings, pooler=True, pooler_activation="relu"),
        lambda cfg: their_fields(_DISTILBERT_FIELDS, cfg),
        _DISTILBERT_RULES + _pooler_rules("pre_classifier"),
        ignored=(_POSITION_IDS, r"vocab_.*"),
        **_DISTILBERT_NAMES,
    ),
    "modernbert": _classifier(
        "ModernBert",
        lambda hf: _modernbert_settings(hf) | {"pooling": hf["classifier_pooling"].replace("cls", "first")},
        lambda cfg: _modernbert_config(cfg) | {"classifier_pooling": "cls" if cfg.pooling == "first" else cfg.pooling},
        _MODERNBERT_RULES + _transform_rules("head.dense", "head.norm"),
        layer="head_transform",
        ignored=(r"decoder\..*",),
        **_MODERNBERT_NAMES,
    ),
    "albert": _classifier(
        "Albert",
        _pooled(_albert_settings, pooler=True),
        _albert_config,
        _ALBERT_RULES + _pooler_rules("albert.pooler"),
        ignored=(_POSITION_IDS, r"predictions\..*", r"sop_classifier\..*"),
        **_ALBERT_NAMES,
    ),
}
"""Architectures of classifiers by `model_type`."""
MASKED_LMS = {
    "bert": _masked_lm(
        "Bert",
        _bert_settings,
        _bert_config,
        _BERT_RULES,
        head=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
        ignored=(_POSITION_IDS, r"bert\.pooler\..*", r"cls\.seq_relationship\..*"),
        prefix="bert.",
        head_bias="cls.predictions.bias",
    ),
    **{
        kind: _masked_lm(
            name,
            lambda hf: _roberta_settings(hf) | {"transform_activation": "gelu"},
            _roberta_config,
            _ROBERTA_RULES,
            head=("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
            ignored=(_POSITION_IDS, r"roberta\.pooler\..*"),
            prefix="roberta.",
            head_bias="lm_head.bias",
        )
        for kind, name in _ROBERTAS.items()
    },
    "distilbert": _masked_lm(
        "DistilBert",
        _distilbert_settings,
        lambda cfg: their_fields(_DISTILBERT_FIELDS, cfg),
        _DISTILBERT_RULES,
        head=("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        ignored=(_POSITION_IDS,),
        head_bias="vocab_projector.bias",
        **_DISTILBERT_NAMES,
    ),
    "modernbert": _masked_lm(
        "ModernBert",
        _modernbert_settings,
        _modernbert_config,
        _MODERNBERT_RULES,
        head=("head.dense", "head.norm", "decoder"),
        head_bias="decoder.bias",
        **_MODERNBERT_NAMES,
    ),
    "albert": _masked_lm(
        "Albert",
        _albert_settings,
        _albert_config,
        _ALBERT_RULES,
        head=("predictions.dense", "predictions.LayerNorm", "predictions.decoder"),
        ignored=(_POSITION_IDS, r"albert\.pooler\..*", r"sop_classifier\..*"),
        head_bias="predictions.bias",
        **_ALBERT_NAMES,
    ),
}
"""Architectures of masked language models by `model_type`."""
