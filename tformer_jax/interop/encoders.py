"""Hugging Face's models with an encoder: BERT (classification), T5, BART, Marian."""

from typing import Any

from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.interop.architecture import Architecture, activation, check, refuse, written
from tformer_jax.interop.mapping import FLAT, ROW, SAME, Layout, Rule, kernel

Settings = dict[str, Any]
Part = tuple[str, str, Layout]

_AFFINE = (("kernel", "weight", kernel()), ("bias", "bias", FLAT))
_NORM = (("scale", "weight", SAME), ("bias", "bias", SAME))


def _parts(ours: str, theirs: str, leaves: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple((f"{ours}/{leaf}", f"{theirs}.{name}", layout) for leaf, name, layout in leaves)


def _rules(ours: str, theirs: str, parts: tuple[Part, ...]) -> tuple[Rule, ...]:
    return tuple(Rule(f"{ours}{a}", f"{theirs}{b}", layout) for a, b, layout in parts)


_BERT_LAYER = (
    *_parts("self_attention/query", "attention.self.query", _AFFINE),
    *_parts("self_attention/key", "attention.self.key", _AFFINE),
    *_parts("self_attention/value", "attention.self.value", _AFFINE),
    ("self_attention/output/kernel", "attention.output.dense.weight", kernel(2)),
    ("self_attention/output/bias", "attention.output.dense.bias", SAME),
    *_parts("self_attention_residual/norm", "attention.output.LayerNorm", _NORM),
    *_parts("ffn/expand", "intermediate.dense", _AFFINE),
    *_parts("ffn/contract", "output.dense", _AFFINE),
    *_parts("ffn_residual/norm", "output.LayerNorm", _NORM),
)
_BERT = (
    Rule("embedding/embedding", "bert.embeddings.word_embeddings.weight"),
    Rule("input/positions/embedding", "bert.embeddings.position_embeddings.weight"),
    Rule("input/types", "bert.embeddings.token_type_embeddings.weight"),
    *_rules("input/norm/", "bert.embeddings.LayerNorm.", _NORM),
    *_rules("pooler/", "bert.pooler.dense.", _AFFINE),
    *_rules("head/", "classifier.", _AFFINE),
    *_rules("encoder/layers_{i}/", "bert.encoder.layer.{i}.", _BERT_LAYER),
)


def _bert_settings(hf: Settings) -> Settings:
    refuse(hf, position_embedding_type="absolute", is_decoder=False)
    return {
        "family": "classifier",
        "vocab_size": hf["vocab_size"],
        "num_classes": len(hf.get("id2label") or [0, 1]),
        "max_length": hf["max_position_embeddings"],
        "dim": hf["hidden_size"],
        "encoder_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "ffn_dim": hf["intermediate_size"],
        "activation": activation(hf["hidden_act"]),
        "norm_placement": "post",
        "norm_eps": hf["layer_norm_eps"],
        "position": "learned",
        "embedding_norm": True,
        "token_types": hf["type_vocab_size"],
        "scale_embeddings": False,
        "pooling": "first",
        "pooler": True,
        "dropout": hf["hidden_dropout_prob"],
        "attention_dropout": hf["attention_probs_dropout_prob"],
        "initializer": "normal",
        "init_std": hf["initializer_range"],
    }


def _bert_config(cfg: ModelConfig) -> Settings:
    if not cfg.pooler:
        raise ConfigError("model_type 'bert' cannot hold this model: model.pooler=False")
    return {
        "vocab_size": cfg.vocab_size,
        "id2label": {str(label): f"LABEL_{label}" for label in range(cfg.known("num_classes"))},
        "max_position_embeddings": cfg.max_length,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.encoder_layers,
        "num_attention_heads": cfg.num_heads,
        "intermediate_size": cfg.ffn_dim,
        "hidden_act": written(cfg.activation),
        "layer_norm_eps": cfg.norm_eps,
        "type_vocab_size": cfg.token_types,
        "hidden_dropout_prob": cfg.dropout,
        "attention_probs_dropout_prob": cfg.attention_dropout,
        "initializer_range": cfg.init_std,
    }


def _t5_attention(ours: str, theirs: str) -> tuple[Part, ...]:
    names = (("query", "q"), ("key", "k"), ("value", "v"))
    inputs = tuple((f"{ours}/{a}/kernel", f"{theirs}.{b}.weight", kernel()) for a, b in names)
    return (*inputs, (f"{ours}/output/kernel", f"{theirs}.o.weight", kernel(2)))


def _t5_ffn(number: int) -> tuple[Part, ...]:
    """Parts of both the plain (`wi`) and the gated FFN (gate `wi_0`), without the rule of `wi` or `wi_1`."""
    dense = f"layer.{number}.DenseReluDense"
    return (
        ("ffn/gate/kernel", f"{dense}.wi_0.weight", kernel()),
        ("ffn/contract/kernel", f"{dense}.wo.weight", kernel()),
        ("ffn_residual/norm/scale", f"layer.{number}.layer_norm.weight", SAME),
    )


_T5_SELF = (
    *_t5_attention("self_attention", "layer.0.SelfAttention"),
    ("self_attention_residual/norm/scale", "layer.0.layer_norm.weight", SAME),
)
_T5_CROSS = (
    *_t5_attention("cross_attention", "layer.1.EncDecAttention"),
    ("cross_attention_residual/norm/scale", "layer.1.layer_norm.weight", SAME),
)
_T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _t5_rules(cfg: ModelConfig) -> tuple[Rule, ...]:
    expand = "wi_1" if cfg.ffn == "gated" else "wi"

    def hidden(number: int) -> Part:
        return ("ffn/expand/kernel", f"layer.{number}.DenseReluDense.{expand}.weight", kernel())

    return (
        Rule("target_embedding/embedding", "shared.weight"),
        Rule("head/kernel", "lm_head.weight", kernel()),
        Rule("encoder/norm/scale", "encoder.final_layer_norm.weight"),
        Rule("decoder/norm/scale", "decoder.final_layer_norm.weight"),
        Rule("encoder/attention_positions/embedding", f"encoder.{_T5_BIAS}"),
        Rule("decoder/attention_positions/embedding", f"decoder.{_T5_BIAS}"),
        *_rules("encoder/layers_{i}/", "encoder.block.{i}.", (*_T5_SELF, *_t5_ffn(1), hidden(1))),
        *_rules("decoder/layers_{i}/", "decoder.block.{i}.", (*_T5_SELF, *_T5_CROSS, *_t5_ffn(2), hidden(2))),
    )


def _t5_settings(hf: Settings) -> Settings:
    gated, _, kind = hf["feed_forward_proj"].rpartition("-")
    check(gated in ("", "gated"), f"feed_forward_proj={hf['feed_forward_proj']!r} is not supported")
    return {
        "family": "seq2seq",
        "vocab_size": hf["vocab_size"],
        "source_vocab_size": hf["vocab_size"],
        "max_length": hf["n_positions"],
        "dim": hf["d_model"],
        "encoder_layers": hf["num_layers"],
        "decoder_layers": hf.get("num_decoder_layers") or hf["num_layers"],
        "num_heads": hf["num_heads"],
        "head_dim": hf["d_kv"],
        "attention_bias": (),
        "attention_scale": 1.0,
        "ffn": "gated" if gated else "mlp",
        "ffn_dim": hf["d_ff"],
        "ffn_bias": False,
        "activation": "gelu_tanh" if gated and kind == "gelu" else activation(kind),
        "norm": "rmsnorm",
        "norm_eps": hf["layer_norm_epsilon"],
        "position": "relative",
        "relative": {
            "buckets": hf["relative_attention_num_buckets"],
            "distance": hf["relative_attention_max_distance"],
        },
        "scale_embeddings": False,
        "scale_output": hf.get("scale_decoder_outputs", hf["tie_word_embeddings"]),
        "dropout": hf["dropout_rate"],
        "initializer": "normal",
    }


def _t5_config(cfg: ModelConfig) -> Settings:
    gated = cfg.ffn == "gated"
    kind = "gelu" if gated and cfg.activation == "gelu_tanh" else written(cfg.activation)
    return {
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.max_length,
        "d_model": cfg.dim,
        "num_layers": cfg.encoder_layers,
        "num_decoder_layers": cfg.decoder_layers,
        "num_heads": cfg.num_heads,
        "d_kv": cfg.head_size,
        "d_ff": cfg.ffn_dim,
        "feed_forward_proj": f"gated-{kind}" if gated else kind,
        "layer_norm_epsilon": cfg.norm_eps,
        "relative_attention_num_buckets": cfg.relative.buckets,
        "relative_attention_max_distance": cfg.relative.distance,
        "tie_word_embeddings": cfg.scale_output,
        "scale_decoder_outputs": cfg.scale_output,
        "dropout_rate": cfg.dropout,
        "is_encoder_decoder": True,
    }


def _bart_attention(ours: str, theirs: str) -> tuple[Part, ...]:
    return (
        *_parts(f"{ours}/query", f"{theirs}.q_proj", _AFFINE),
        *_parts(f"{ours}/key", f"{theirs}.k_proj", _AFFINE),
        *_parts(f"{ours}/value", f"{theirs}.v_proj", _AFFINE),
        (f"{ours}/output/kernel", f"{theirs}.out_proj.weight", kernel(2)),
        (f"{ours}/output/bias", f"{theirs}.out_proj.bias", SAME),
        *_parts(f"{ours}_residual/norm", f"{theirs}_layer_norm", _NORM),
    )


_BART_FFN = (
    *_parts("ffn/expand", "fc1", _AFFINE),
    *_parts("ffn/contract", "fc2", _AFFINE),
    *_parts("ffn_residual/norm", "final_layer_norm", _NORM),
)
_BART_SELF = _bart_attention("self_attention", "self_attn")
_MARIAN = (
    Rule("target_embedding/embedding", "model.shared.weight"),
    Rule("head/bias", "final_logits_bias", ROW),
    Rule("head/kernel", "lm_head.weight", kernel()),
    *_rules("encoder/layers_{i}/", "model.encoder.layers.{i}.", (*_BART_SELF, *_BART_FFN)),
    *_rules(
        "decoder/layers_{i}/",
        "model.decoder.layers.{i}.",
        (*_BART_SELF, *_bart_attention("cross_attention", "encoder_attn"), *_BART_FFN),
    ),
)
_BART = (
    *_MARIAN,
    Rule("source_input/positions/embedding", "model.encoder.embed_positions.weight"),
    Rule("target_input/positions/embedding", "model.decoder.embed_positions.weight"),
    *_rules("source_input/norm/", "model.encoder.layernorm_embedding.", _NORM),
    *_rules("target_input/norm/", "model.decoder.layernorm_embedding.", _NORM),
)


def _marian_settings(hf: Settings) -> Settings:
    refuse(hf, share_encoder_decoder_embeddings=True, normalize_before=False, add_final_layer_norm=False)
    refuse(hf, decoder_vocab_size=hf["vocab_size"], normalize_embedding=True, add_bias_logits=False)
    for name in ("attention_heads", "ffn_dim"):
        refuse(hf, **{f"decoder_{name}": hf[f"encoder_{name}"]})
    return {
        "family": "seq2seq",
        "vocab_size": hf["vocab_size"],
        "source_vocab_size": hf["vocab_size"],
        "max_length": hf["max_position_embeddings"],
        "dim": hf["d_model"],
        "encoder_layers": hf["encoder_layers"],
        "decoder_layers": hf["decoder_layers"],
        "num_heads": hf["encoder_attention_heads"],
        "ffn_dim": hf["encoder_ffn_dim"],
        "activation": activation(hf["activation_function"]),
        "norm_placement": "post",
        "position": "sinusoidal_halves",
        "scale_embeddings": hf["scale_embedding"],
        "dropout": hf["dropout"],
        "attention_dropout": hf["attention_dropout"],
        "ffn_dropout": hf["activation_dropout"],
        "initializer": "normal",
        "init_std": hf["init_std"],
    }


def _bart_settings(hf: Settings) -> Settings:
    return _marian_settings(hf) | {"position": "learned", "position_offset": 2, "embedding_norm": True}


def _marian_config(cfg: ModelConfig) -> Settings:
    return {
        "vocab_size": cfg.vocab_size,
        "decoder_vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_length,
        "d_model": cfg.dim,
        "encoder_layers": cfg.encoder_layers,
        "decoder_layers": cfg.decoder_layers,
        "encoder_attention_heads": cfg.num_heads,
        "decoder_attention_heads": cfg.num_heads,
        "encoder_ffn_dim": cfg.ffn_dim,
        "decoder_ffn_dim": cfg.ffn_dim,
        "activation_function": written(cfg.activation),
        "scale_embedding": cfg.scale_embeddings,
        "dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        "activation_dropout": cfg.ffn_dropout,
        "init_std": cfg.init_std,
        "is_encoder_decoder": True,
    }


_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_MODEL_EMBEDDINGS = tuple(f"model.{name}" for name in _EMBEDDINGS)
_POSITIONS = (r"model\.(en|de)coder\.embed_positions\.weight",)

ENCODERS = {
    "bert": Architecture(
        "BertForSequenceClassification",
        _bert_settings,
        _bert_config,
        lambda cfg: _BERT,
        (r".*position_ids", r"cls\..*"),
        "bert.",
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration", _t5_settings, _t5_config, _t5_rules, shared="shared.weight", copies=_EMBEDDINGS
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        _bart_settings,
        _marian_config,
        lambda cfg: _BART,
        prefix="model.",
        shared="model.shared.weight",
        copies=_MODEL_EMBEDDINGS,
    ),
    "marian": Architecture(
        "MarianMTModel",
        _marian_settings,
        _marian_config,
        lambda cfg: _MARIAN,
        _POSITIONS,
        "model.",
        shared="model.shared.weight",
        copies=_MODEL_EMBEDDINGS,
    ),
}
