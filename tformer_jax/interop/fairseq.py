"""State dicts of fairseq's `transformer` (IWSLT, WMT), with sinusoids and learned tables of tokens.

Their `cfg` is read if it is of plain values; `--model-args` name what the arrays do not determine, by fairseq's names.
"""

import dataclasses
from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import REQUIRED, check, check_arguments, our_activation
from tformer_jax.interop.encoder_decoders import ENCODER_DECODERS
from tformer_jax.interop.files import StoredArrays
from tformer_jax.interop.mapping import Rule, kernel
from tformer_jax.interop.torch_transformer import remove_tied

HAS = "decoder.layers.0.encoder_attn.q_proj.weight"
BUFFERS = (r"(en|de)coder\.version", r"(en|de)coder\.embed_positions\._float_tensor")
_SOURCE, _TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
_HEAD = "decoder.output_projection.weight"
_POSITION_OFFSET = 2
"""Number of the first position: one more than the position of padding, which is the id of `<pad>`."""
RULES = (
    Rule("source_embedding/embedding", _SOURCE),
    Rule("target_embedding/embedding", _TARGET),
    Rule("head/kernel", _HEAD, kernel()),
    *(
        dataclasses.replace(rule, theirs=rule.theirs.removeprefix("model."))
        for rule in ENCODER_DECODERS["m2m_100"].rules(ModelConfig())
        if "layer" in rule.theirs
    ),
)
OPTIONS: dict[str, Any] = {
    "encoder_attention_heads": REQUIRED,
    "decoder_attention_heads": 0,
    "activation_fn": "relu",
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
    "max_source_positions": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
"""Arguments that the arrays do not determine, and their defaults in fairseq; 0 heads: as many as in the encoder."""


def settings(arrays: StoredArrays, args: dict[str, Any]) -> dict[str, Any]:
    """Returns our settings, given arguments of fairseq; removes copies of an embedding from `arrays`."""
    (source_size, dim), (target_size, _) = arrays.matrix_shape(_SOURCE), arrays.matrix_shape(_TARGET)
    pre_norm = "encoder.layer_norm.weight" in arrays
    sizes = {
        "encoder_embed_dim": dim,
        "encoder_layers": arrays.count_layers(r"encoder\.layers\.(\d+)\."),
        "decoder_layers": arrays.count_layers(r"decoder\.layers\.(\d+)\."),
        "encoder_ffn_embed_dim": arrays.matrix_shape("encoder.layers.0.fc1.weight")[0],
        "encoder_normalize_before": pre_norm,
    }
    values = check_arguments(args, sizes, OPTIONS)
    heads = values["encoder_attention_heads"]
    check(values["decoder_attention_heads"] in (0, heads), "its encoder and decoder have other numbers of heads")
    check(not values["no_token_positional_embeddings"], "no_token_positional_embeddings is not supported")
    return {
        "family": "seq2seq",
        "source_vocab_size": source_size,
        "vocab_size": target_size,
        "max_length": values["max_source_positions"],
        "dim": dim,
        "encoder_layers": sizes["encoder_layers"],
        "decoder_layers": sizes["decoder_layers"],
        "num_heads": heads,
        "ffn_dim": sizes["encoder_ffn_embed_dim"],
        "activation": our_activation(values["activation_fn"]),
        "norm_placement": "pre" if pre_norm else "post",
        "position": "sinusoidal_fairseq",
        "position_offset": _POSITION_OFFSET,
        "scale_embeddings": not values["no_scale_embedding"],
        "tie_embeddings": remove_tied(arrays, _SOURCE, _TARGET, _HEAD),
        "dropout": values["dropout"],
        "attention_dropout": values["attention_dropout"],
        "ffn_dropout": values["activation_dropout"],
    }


def read_arguments(cfg: Any) -> dict[str, Any]:
    """Returns the arguments in a checkpoint's `cfg` that this package reads."""
    model = cfg.get("model") if isinstance(cfg, dict) else None
    return {name: model[name] for name in OPTIONS if name in model} if isinstance(model, dict) else {}
