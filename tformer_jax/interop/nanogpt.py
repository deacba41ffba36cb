"""nanoGPT's state dicts: GPT-2 with `nn.Linear`, the exact GELU, and biases that may be absent."""

from typing import Any

import numpy as np

from tformer_jax.interop.architecture import REQUIRED, check_arguments
from tformer_jax.interop.decoders import gpt2_rules
from tformer_jax.interop.files import StoredArrays
from tformer_jax.interop.mapping import kernel

HAS = "transformer.h.0.attn.c_attn.weight"
BUFFERS = (r"transformer\.h\.\d+\.attn\.bias",)
_EMBEDDING, _HEAD = "transformer.wte.weight", "lm_head.weight"
RULES = gpt2_rules(kernel)


def settings(arrays: StoredArrays, args: dict[str, Any]) -> dict[str, Any]:
    """Returns our settings, given `model_args`; removes the head from `arrays` if it is the embedding."""
    vocab_size, dim = arrays.matrix_shape(_EMBEDDING)
    length, ffn_dim = (arrays.matrix_shape(f"transformer.{name}.weight")[0] for name in ("wpe", "h.0.mlp.c_fc"))
    layers, bias = arrays.count_layers(r"transformer\.h\.(\d+)\."), "transformer.ln_f.bias" in arrays
    sizes = {"n_layer": layers, "n_embd": dim, "block_size": length, "vocab_size": vocab_size, "bias": bias}
    values = check_arguments(args, sizes, {"n_head": REQUIRED, "dropout": 0.0})
    tied = _HEAD not in arrays or np.array_equal(arrays[_HEAD], arrays[_EMBEDDING])
    if tied and _HEAD in arrays:
        del arrays[_HEAD]
    return {
        "family": "decoder_lm",
        "vocab_size": vocab_size,
        "max_length": length,
        "dim": dim,
        "decoder_layers": layers,
        "num_heads": values["n_head"],
        "ffn_dim": ffn_dim,
        "attention_projections": "fused_qkv",
        "attention_bias": ("query", "key", "value", "output") if bias else (),
        "ffn_bias": bias,
        "norm_bias": bias,
        "activation": "gelu",
        "position": "learned",
        "tie_embeddings": "output" if tied else "none",
        "scale_embeddings": False,
        "dropout": values["dropout"],
        "attention_dropout": values["dropout"],
        "initializer": "normal",
        "scale_residual_init": True,
    }
