"""Gemma 1, 2 and 3, and T5Gemma: norms with a unit offset and scaled embeddings; since Gemma 2, norms on both sides."""

from tformer_jax.config import ModelConfig
from tformer_jax.interop import llama
from tformer_jax.interop.architecture import (
    Architecture,
    Settings,
    check,
    layer_types,
    our_activation,
    read_layer_types,
    require,
    transformers_activation,
)
from tformer_jax.interop.files import IMAGES
from tformer_jax.interop.mapping import NORM, Part, Rule, attention_parts, kernel, parts, rules_below
from tformer_jax.interop.rotary import rotary_fields_by_kind


def _gemma_settings(hf: Settings) -> Settings:
    """Returns our settings; "gelu" of the first configs means the approximation by tanh."""
    require(hf, use_bidirectional_attention=False)
    settings = llama.settings(hf) | {"ffn_bias": False, "norm_unit_offset": True, "scale_embeddings": True}
    return settings | ({"activation": "gelu_tanh"} if hf["hidden_act"] == "gelu" else {})


def _gemma2_settings(hf: Settings) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else every second one."""
    return _sandwich_settings(hf, period=2)


def _sandwich_settings(hf: Settings, period: int, *, window_base: float | None = None) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else every `period`-th one."""
    require(hf, use_bidirectional_attention=False)
    layers = read_layer_types(hf, *["sliding"] * (period - 1), "full")
    return llama.settings(hf, window_base=window_base) | {
        **llama.window_settings(hf, layers),
        "activation": our_activation(hf["hidden_activation"]),
        "ffn_bias": False,
        "norm_placement": "both",
        "norm_unit_offset": True,
        "scale_embeddings": True,
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": hf.get("attn_logit_softcapping"),
        "output_softcap": hf.get("final_logit_softcapping"),
    }


def _gemma3_settings(hf: Settings) -> Settings:
    """Returns our settings; attention scores are not capped, although config.json has a field for it."""
    base = hf["rope_local_base_freq"]
    settings = _sandwich_settings(hf, period=hf["sliding_window_pattern"], window_base=base)
    return llama.rotary_by_kind(settings) | {"attention_softcap": None, "qk_norm": True}


def _sandwich_config(cfg: ModelConfig) -> Settings:
    return llama.windows_config(cfg) | {
        "hidden_activation": transformers_activation(cfg.activation),
        "query_pre_attn_scalar": round((cfg.attention_scale or cfg.head_size**-0.5) ** -2),
        "attn_logit_softcapping": cfg.attention_softcap,
        "final_logit_softcapping": cfg.output_softcap,
    }


def _gemma3_config(cfg: ModelConfig) -> Settings:
    fields = rotary_fields_by_kind(cfg.rotary)
    base = fields["rope_parameters"]["sliding_attention"]["rope_theta"]
    return _sandwich_config(cfg) | fields | {"rope_local_base_freq": base}


def _t5gemma_settings(hf: Settings) -> Settings:
    """Returns our settings of stacks that have the same pattern of layers."""
    require(hf, is_encoder_decoder=True, is_decoder=True, cross_attention_hidden_size=hf["hidden_size"])
    depth = hf["encoder_num_hidden_layers"]
    decoder = _gemma2_settings(hf)
    encoder = _gemma2_settings(hf | {"num_hidden_layers": depth, "layer_types": hf["encoder_layer_types"]})
    same = encoder.get("layer_pattern") == decoder.get("layer_pattern")
    check(same, "layer_types of the encoder and the decoder have different patterns")
    sizes = {"source_vocab_size": hf["vocab_size"], "encoder_layers": depth}
    return decoder | sizes | {"family": "seq2seq", "dropout": hf["dropout_rate"]}


def _t5gemma_config(cfg: ModelConfig) -> Settings:
    stack = _sandwich_config(cfg) | {"model_type": "t5_gemma_module"}
    tied = stack.pop("tie_word_embeddings")
    encoder = {"num_hidden_layers": cfg.encoder_layers, "layer_types": layer_types(cfg, cfg.encoder_layers)}
    return {
        "encoder": stack | encoder,
        "decoder": stack | {"is_decoder": True, "cross_attention_hidden_size": cfg.dim},
        "is_encoder_decoder": True,
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": tied,
        "dropout_rate": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
    }


_SANDWICH_NORMS = (
    *parts("self_attention_residual/norm", "input_layernorm", NORM),
    *parts("self_attention_residual/norm_after", "post_attention_layernorm", NORM),
    *parts("ffn_residual/norm", "pre_feedforward_layernorm", NORM),
    *parts("ffn_residual/norm_after", "post_feedforward_layernorm", NORM),
)


def _t5gemma_norms(ours: str, theirs: str) -> tuple[Part, ...]:
    before = parts(f"{ours}_residual/norm", f"pre_{theirs}_layernorm", NORM)
    return (*before, *parts(f"{ours}_residual/norm_after", f"post_{theirs}_layernorm", NORM))


_T5GEMMA_SELF = (*llama.ATTENTION, *_t5gemma_norms("self_attention", "self_attn"))
_T5GEMMA_CROSS = (
    *attention_parts("cross_attention", (f"cross_attn.{name}_proj" for name in "qkvo")),
    *_t5gemma_norms("cross_attention", "cross_attn"),
)
_T5GEMMA_FFN = (*llama.GATED, *_t5gemma_norms("ffn", "feedforward"))
_T5GEMMA = (
    Rule("source_embedding/embedding", "model.encoder.embed_tokens.weight"),
    Rule("target_embedding/embedding", "model.decoder.embed_tokens.weight"),
    Rule("head/kernel", "lm_head.out_proj.weight", kernel()),
    *(rule for stack in ("encoder", "decoder") for rule in rules_below(f"{stack}/norm/", f"model.{stack}.norm.", NORM)),
    *rules_below("encoder/layers_{i}/", "model.encoder.layers.{i}.", (*_T5GEMMA_SELF, *_T5GEMMA_FFN)),
    *rules_below("decoder/layers_{i}/", "model.decoder.layers.{i}.", (*_T5GEMMA_SELF, *_T5GEMMA_CROSS, *_T5GEMMA_FFN)),
)

_SANDWICH = llama.rules(*llama.ATTENTION, *llama.GATED, *_SANDWICH_NORMS)

GEMMA = {
    "gemma": llama.architecture("GemmaForCausalLM", _gemma_settings, llama.config),
    "gemma2": llama.architecture("Gemma2ForCausalLM", _gemma2_settings, _sandwich_config, _SANDWICH),
    "gemma3_text": llama.architecture(
        "Gemma3ForCausalLM", _gemma3_settings, _gemma3_config, _SANDWICH, ignored=(*llama.BUFFERS, IMAGES)
    ),
}
T5GEMMA = {
    "t5gemma": Architecture(
        "T5GemmaForConditionalGeneration",
        _t5gemma_settings,
        _t5gemma_config,
        lambda cfg: _T5GEMMA,
        llama.BUFFERS,
        "model.",
        shared="model.decoder.embed_tokens.weight",
        two_embeddings=True,
        head="lm_head.out_proj.weight",
    )
}
