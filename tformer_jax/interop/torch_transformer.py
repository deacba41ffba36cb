"""State dicts of `torch.nn.Transformer` with embeddings and a generator, as in PyTorch's translation tutorial.

The expected names are `transformer.*` (nn.Transformer), `src_tok_emb.embedding.weight` and
`tgt_tok_emb.embedding.weight` (embeddings, multiplied by sqrt(D)), `generator.*` (nn.Linear) and, optionally,
`positional_encoding.pos_embedding` (sinusoids [max_len, 1, D]).
"""

from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.interop.architecture import REQUIRED, check_arguments
from tformer_jax.interop.files import StoredArrays
from tformer_jax.interop.mapping import AFFINE, NORM, Part, Rule, attention_parts, parts, rules_below

HAS = "transformer.encoder.layers.0.self_attn.q_proj.weight"
_SOURCE, _TARGET, _HEAD = "src_tok_emb.embedding.weight", "tgt_tok_emb.embedding.weight", "generator.weight"
_POSITIONS = "positional_encoding.pos_embedding"
BUFFERS = (r"positional_encoding\.pos_embedding",)


def _attention_parts(ours: str, theirs: str, norm: str) -> tuple[Part, ...]:
    projections = attention_parts(ours, (f"{theirs}.{name}_proj" for name in ("q", "k", "v", "out")))
    return (*projections, *parts(f"{ours}_residual/norm", norm, NORM))


def _layer_parts(*attentions: Part) -> tuple[Part, ...]:
    ffn = (*parts("ffn/expand", "linear1", AFFINE), *parts("ffn/contract", "linear2", AFFINE))
    return (*attentions, *ffn)


_SELF = _attention_parts("self_attention", "self_attn", "norm1")
_CROSS = _attention_parts("cross_attention", "multihead_attn", "norm2")
RULES = (
    Rule("source_embedding/embedding", _SOURCE),
    Rule("target_embedding/embedding", _TARGET),
    *rules_below("head/", "generator.", AFFINE),
    *rules_below("encoder/norm/", "transformer.encoder.norm.", NORM),
    *rules_below("decoder/norm/", "transformer.decoder.norm.", NORM),
    *rules_below(
        "encoder/layers_{i}/",
        "transformer.encoder.layers.{i}.",
        _layer_parts(*_SELF, *parts("ffn_residual/norm", "norm2", NORM)),
    ),
    *rules_below(
        "decoder/layers_{i}/",
        "transformer.decoder.layers.{i}.",
        _layer_parts(*_SELF, *_CROSS, *parts("ffn_residual/norm", "norm3", NORM)),
    ),
)


def settings(arrays: StoredArrays, args: dict[str, Any]) -> dict[str, Any]:
    """Returns our settings, given arguments of `nn.Transformer`; removes copies of an embedding from `arrays`."""
    (source_size, dim), (target_size, _) = arrays.matrix_shape(_SOURCE), arrays.matrix_shape(_TARGET)
    encoder, decoder = "transformer.encoder.", "transformer.decoder."
    bias = f"{encoder}layers.0.self_attn.q_proj.bias" in arrays
    sizes = {
        "d_model": dim,
        "num_encoder_layers": arrays.count_layers(rf"{encoder}layers\.(\d+)\."),
        "num_decoder_layers": arrays.count_layers(rf"{decoder}layers\.(\d+)\."),
        "dim_feedforward": arrays.matrix_shape(f"{encoder}layers.0.linear1.weight")[0],
        "src_vocab_size": source_size,
        "tgt_vocab_size": target_size,
        "bias": bias,
    }
    options = {"nhead": REQUIRED, "activation": "relu", "norm_first": False, "layer_norm_eps": 1e-5, "dropout": 0.1}
    values = check_arguments(args, sizes, options | {"max_len": _count_positions(arrays, dim)})
    if values["activation"] not in ("relu", "gelu"):
        raise UserError(f"model_args: activation={values['activation']!r} is not supported; supported are relu, gelu")
    return {
        "family": "seq2seq",
        "source_vocab_size": source_size,
        "vocab_size": target_size,
        "max_length": values["max_len"],
        "dim": dim,
        "encoder_layers": sizes["num_encoder_layers"],
        "decoder_layers": sizes["num_decoder_layers"],
        "num_heads": values["nhead"],
        "attention_bias": ("query", "key", "value", "output") if bias else (),
        "ffn_dim": sizes["dim_feedforward"],
        "ffn_bias": bias,
        "activation": values["activation"],
        "norm_placement": "pre" if values["norm_first"] else "post",
        "norm_eps": values["layer_norm_eps"],
        "norm_bias": f"{encoder}layers.0.norm1.bias" in arrays,
        "final_norm": f"{encoder}norm.weight" in arrays,
        "tie_embeddings": remove_tied(arrays, _SOURCE, _TARGET, _HEAD),
        "output_bias": "generator.bias" in arrays,
        **dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), values["dropout"]),
    }


def _count_positions(arrays: StoredArrays, dim: int) -> int:
    """Returns the number of positions in the table, which must be the tutorial's; 5000 without a table."""
    if _POSITIONS not in arrays:
        return 5000
    table = arrays[_POSITIONS]
    if dim % 2 or table.size % dim:
        raise UserError(f"{_POSITIONS} of the checkpoint has the shape {table.shape}, which does not fit D = {dim}")
    table = table.reshape(-1, dim)
    angles = np.arange(len(table))[:, None] * 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(table.shape)
    if np.abs(table - expected).max() > 1e-2:  # their angles are rounded to float32
        raise UserError(f"{_POSITIONS} of the checkpoint is not supported, only interleaved sines and cosines are")
    return len(table)


def remove_tied(arrays: StoredArrays, source: str, target: str, head: str) -> str:
    """Returns `tie_embeddings`, given the names of the embeddings and the head; removes copies of the target's."""

    def remove(name: str) -> bool:
        same = name in arrays and np.array_equal(arrays[name], arrays[target])
        if same:
            del arrays[name]
        return same

    kinds = {(True, True): "all", (True, False): "inputs", (False, True): "output", (False, False): "none"}
    return kinds[remove(source), remove(head)]
