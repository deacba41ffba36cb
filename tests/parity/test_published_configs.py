"""Configs and checkpoints as published, not only as the current transformers writes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests.helpers import tiny
from tests.parity import test_huggingface as parity
from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop import files, generation, hf, settings_comparison

CLASSES = {
    "gpt2": transformers.GPT2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "smollm3": transformers.SmolLM3Config,
    "gemma": transformers.GemmaConfig,
    "ministral": transformers.MinistralConfig,
    "cwm": transformers.CwmConfig,
    "arcee": transformers.ArceeConfig,
    "seed_oss": transformers.SeedOssConfig,
    "phi3": transformers.Phi3Config,
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "granite": transformers.GraniteConfig,
    "stablelm": transformers.StableLmConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "xlm-roberta": transformers.XLMRobertaConfig,
    "albert": transformers.AlbertConfig,
    "distilbert": transformers.DistilBertConfig,
    "modernbert": transformers.ModernBertConfig,
    "t5": transformers.T5Config,
    "bart": transformers.BartConfig,
    "marian": transformers.MarianConfig,
    "mt5": transformers.MT5Config,
    "umt5": transformers.UMT5Config,
    "mbart": transformers.MBartConfig,
    "m2m_100": transformers.M2M100Config,
}
SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
PAIR = {"vocab_size": 50, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2}
PAIR |= {
    f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("attention_heads", 8), ("ffn_dim", 9))
}
T5 = {"vocab_size": 50, "d_model": 64, "d_ff": 9, "num_layers": 2, "num_heads": 8}
BARE = {
    "gpt2": {"vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 8},
    **dict.fromkeys(("t5", "mt5", "umt5"), T5),
    **dict.fromkeys(("bart", "mbart", "m2m_100"), PAIR),
    "marian": PAIR | {"decoder_vocab_size": 50},
    "gemma": SIZES | {"num_attention_heads": 16, "head_dim": 8},
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe"), SIZES | {"num_attention_heads": 32}),
    "deepseek_v2": SIZES | {"num_experts_per_tok": 6},
    "deepseek_v3": SIZES | {"num_attention_heads": 128},
    "stablelm": SIZES | {"num_attention_heads": 32, "hidden_size": 256},
    "distilbert": {"vocab_size": 50, "dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 8},
}


def read(model_type: str, config: dict) -> ModelConfig:
    arrays = {"lm_head.weight": np.ones(1)}
    settings = hf._read_settings({"model_type": model_type, **config}, arrays, hf.ARCHITECTURES[model_type])
    return ModelConfig(**settings)


@pytest.mark.parametrize("model_type", CLASSES)
def test_what_a_config_leaves_out_is_as_in_transformers(model_type):
    """Reading the config with the sizes alone equals reading it with all defaults of its class written out."""
    sizes = BARE.get(model_type, SIZES | ({"head_dim": 8} if "gemma" in model_type else {}))
    whole = json.loads(CLASSES[model_type](**sizes).to_json_string(use_diff=False))
    bare, written_out = read(model_type, sizes), read(model_type, whole)
    assert settings_comparison.differences(bare, written_out) == []
    for name in ("dropout", "attention_dropout", "ffn_dropout", "init_std"):
        assert getattr(bare, name) == getattr(written_out, name), name


LLAMA = SIZES | {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_key_value_heads": 4}
GEMMA = LLAMA | {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 5,
}
LINEAR, OLD_LINEAR = ({name: "linear", "factor": 2.0} for name in ("rope_type", "type"))
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
PUBLISHED = {
    "gemma2, no layer_types": ("gemma2", GEMMA, ["window", "full"] * 2),
    "gemma3, a pattern": ("gemma3_text", GEMMA | {"sliding_window_pattern": 3}, ["window", "window", "full", "window"]),
    "gemma3, windows alone": ("gemma3_text", GEMMA, ["window"] * 4),
    "gemma3, no pattern": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}, ["window"] * 5 + ["full", "window"]),
    "qwen2, off": ("qwen2", LLAMA | {"use_sliding_window": False, "sliding_window": 5}, ["full"] * 4),
    "qwen2, unsaid": ("qwen2", LLAMA | {"sliding_window": 5}, ["full"] * 4),
    "qwen2, max_window_layers": ("qwen2", LLAMA | SLIDING | {"max_window_layers": 3}, ["full"] * 3 + ["window"]),
    "qwen3, max_window_layers": ("qwen3", LLAMA | SLIDING | {"max_window_layers": 0}, ["window"] * 4),
    "mistral 0.1": ("mistral", LLAMA | {"sliding_window": 5}, ["window"] * 4),
    "smollm3, unsaid": ("smollm3", LLAMA, ["full"] * 3 + ["nope"]),
    "smollm3, a list": ("smollm3", LLAMA | {"no_rope_layers": [0, 1, 0, 1, 1]}, ["nope", "full"] * 2),
    "mistral 0.2": ("mistral", LLAMA | {"sliding_window": None}, ["full"] * 4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_which_layers_see_a_window(name):
    model_type, config, expected = PUBLISHED[name]
    cfg = read(model_type, config)
    assert [cfg.layer_pattern[i % len(cfg.layer_pattern)] for i in range(cfg.decoder_layers)] == expected
    assert cfg.window == (5 if "window" in expected else None)
    theirs = CLASSES[model_type](**config)
    if model_type == "smollm3":
        assert ["full" if rotated else "nope" for rotated in theirs.no_rope_layers[:4]] == expected
    elif hasattr(theirs, "layer_types"):
        names = {"sliding_attention": "window", "full_attention": "full"}
        assert [names[kind] for kind in theirs.layer_types] == expected


LAYERS = {
    "every layer": ({}, [0, 1, 2, 3]),
    "every second layer": ({"decoder_sparse_step": 2}, [1, 3]),
    "all but the first": ({"mlp_only_layers": [0]}, [1, 2, 3]),
    "every second layer but the first": ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, [3]),
    "a dense layer that would be dense": ({"decoder_sparse_step": 2, "mlp_only_layers": [2]}, [1, 3]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_which_layers_have_experts(name):
    config, expected = LAYERS[name]
    cfg = read("qwen2_moe", LLAMA | config)
    assert [i for i in range(4) if cfg.has_experts(i)] == expected
    assert cfg.moe.dense_dim == (None if len(expected) == 4 else 96)


HUB = json.loads(Path(__file__).with_name("published.json").read_text())
PRESETS = {
    "gpt2": "gpt2",
    "meta-llama/Llama-2-7b-hf": "llama2_7b",
    "meta-llama/Meta-Llama-3-8B": "llama3_8b",
    "meta-llama/Llama-3.2-1B": "llama3_2_1b",
    "mistralai/Mistral-7B-v0.1": "mistral_7b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral_8x7b",
    "Qwen/Qwen2.5-0.5B": "qwen2_5_0_5b",
    "Qwen/Qwen3-0.6B": "qwen3_0_6b",
    "google/gemma-2-2b": "gemma2_2b",
    "google/gemma-3-1b-it": "gemma3_1b",
    "google-bert/bert-base-uncased": "bert_base_mlm",
    "google-t5/t5-small": "t5_small",
    "google/flan-t5-small": "t5_v1_1_small",
    "facebook/bart-base": "bart_base",
    "Helsinki-NLP/opus-mt-en-de": "opus_mt",
    "facebook/m2m100_418M": "m2m_100_418m",
    "facebook/nllb-200-distilled-600M": "nllb_200_600m",
}
NOT_TIED = (
    "Llama-2",
    "Meta-Llama-3",
    "Mistral",
    "Mixtral",
    "Qwen2-7B",
    "flan-t5",
    "mt5",
    "madlad",
    "AFM",
    "Seed-OSS",
    "Phi-3",
    "OLMo",
    "Olmo",
    "gpt-oss",
    "DeepSeek",
    "Qwen3-Next",
)


@pytest.mark.parametrize("name", HUB)
def test_a_published_config_is_read_as_our_preset(name):
    config = dict(HUB[name])
    if name == "deepseek-ai/DeepSeek-V3":
        config.pop("quantization_config")  # as converted to bfloat16: float8 is not read
    arrays = {"lm_head.weight": np.ones(1)} if any(part in name for part in NOT_TIED) else {}
    arrays |= (
        dict.fromkeys(("cls.predictions.bias", "final_logits_bias"), 0) if "bert-base" in name or "opus" in name else {}
    )
    architecture = hf.architecture_of(config["model_type"], hf._pretrained_family(config))
    cfg = ModelConfig(**hf._read_settings(config, arrays, architecture))
    if name in PRESETS:
        preset = presets.build(PRESETS[name])
        assert settings_comparison.differences(cfg, preset) == []
        assert preset.ffn != "moe" or preset.moe.balance_loss == cfg.moe.balance_loss


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("gpt2", BARE["gpt2"] | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("llama", LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            "llama",
            LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ("llama", LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
        ("llama", LLAMA | {"rope_scaling": {"type": "longrope", "factor": 1.0}}, "rotary scaling 'longrope'"),
        ("qwen2_moe", LLAMA | {"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\] is not supported, only the first"),
        ("qwen2_moe", LLAMA | {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
        ("qwen3_moe", LLAMA | {"use_sliding_window": True}, "use_sliding_window=True"),
        ("smollm3", LLAMA | {"use_sliding_window": True}, "use_sliding_window=True"),
        ("stablelm", LLAMA | {"use_parallel_residual": True}, "use_parallel_residual=True"),
        ("smollm3", LLAMA | {"no_rope_layers": [1]}, "no_rope_layers has the length 1 for 4 layers"),
        ("qwen2", LLAMA | SLIDING | {"layer_types": ["full_attention"]}, "layer_types has the length 1, but num_hid"),
        ("gemma2", GEMMA | {"layer_types": ["full_attention"] * 5}, "layer_types has the length 5, but num_hidden"),
        ("bert", SIZES | {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("roberta", SIZES | {"is_decoder": True}, "is_decoder=True"),
        ("modernbert", SIZES | {"layer_types": ["full_attention"] * 4}, "layer_types=.* is not supported, only both"),
        (
            "modernbert",
            SIZES | {"rope_scaling": LINEAR},
            "rope_scaling, which scales both kinds of layers",
        ),
        (
            "gemma3_text",
            GEMMA | {"rope_scaling": OLD_LINEAR},
            "rope_scaling=.* has a type, which transformers ignores",
        ),
        ("olmo3", LLAMA | {"rope_scaling": OLD_LINEAR}, "rope_scaling=.* has a type, which transformers ignores"),
        ("modernbert", SIZES | {"rope_parameters": LINEAR}, "rope_parameters must be given for full_attention and sl"),
        ("bart", PAIR | {"normalize_before": True}, "normalize_before=True"),
        ("bart", PAIR | {"normalize_embedding": False}, "normalize_embedding=False"),
        ("bart", PAIR | {"decoder_attention_heads": 4}, "decoder_attention_heads=4"),
        ("bart", PAIR | {"static_position_embeddings": True}, "static_position_embeddings=True is not supported"),
        ("bart", PAIR | {"num_hidden_layers": 3}, "num_hidden_layers=3 differs from encoder_layers=2"),
        ("gpt2", BARE["gpt2"] | {"hidden_size": 65}, "hidden_size=65 differs from n_embd=64"),
        ("gpt2", BARE["gpt2"] | {"layer_types": ["full_attention"] * 2}, "the field layer_types="),
        ("llama", LLAMA | {"hidden_activation": "gelu"}, "the field hidden_activation='gelu' is not supported"),
        ("llama", LLAMA | {"sliding_window": 5}, "the field sliding_window=5 is not supported"),
        ("qwen2_moe", LLAMA | {"num_local_experts": 5}, "the field num_local_experts=5 is not supported"),
        ("qwen3_moe", LLAMA | {"num_local_experts": 5, "num_experts": 6}, "num_local_experts=5 differs from num_exp"),
        ("qwen3_moe", LLAMA | {"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention, but use"),
        ("qwen2", LLAMA | {"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention, but use_sli"),
        (
            "mixtral",
            LLAMA | {"layer_types": ["sliding_attention"] * 4, "sliding_window": None},
            "layer_types has sliding_attention, but sliding_window is null",
        ),
        ("gemma2", GEMMA | {"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is null"),
        ("stablelm", BARE["stablelm"] | {"head_dim": 9}, "head_dim=9 is not supported, only 8 is"),
        ("marian", PAIR | {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings=False"),
    ],
)
def test_what_our_models_lack_is_refused_by_name(model_type, config, problem):
    with pytest.raises(UserError, match=f"this checkpoint cannot be read: {problem}"):
        read(model_type, config)


def test_gpt2_without_scaled_scores():
    assert read("gpt2", BARE["gpt2"] | {"scale_attn_weights": False}).attention_scale == 1.0


def test_decoding_settings_that_are_reported(tmp_path):
    """Those that differ from the defaults of transformers."""

    def reported(given):
        return generation.read_decoding(tmp_path, given, tiny("seq2seq"))[1]

    assert reported(transformers.GenerationConfig._get_default_generation_params()) == []
    for name in generation.NEUTRAL:
        assert reported({name: 3}) == [f"{name}=3"]


def test_beam_search_does_not_sample(tmp_path):
    given = {"num_beams": 4, "do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 1.0}
    decode, unapplied = generation.read_decoding(tmp_path, given, tiny("seq2seq"))
    assert (decode.strategy, decode.temperature, decode.top_k) == ("beam", 1.0, None)
    assert unapplied == ["do_sample=True", "temperature=0.7", "top_k=10"]
    assert generation.read_decoding(tmp_path, given | {"do_sample": False}, tiny("seq2seq"))[1] == []


@pytest.mark.parametrize(
    ("family", "given", "shortest", "longest"),
    [
        ("decoder_lm", {}, 0, None),
        ("decoder_lm", {"min_length": 5, "max_length": 9}, 0, None),  # of the prompt and the output
        ("decoder_lm", {"max_new_tokens": 15}, 0, 15),
        ("decoder_lm", {"max_new_tokens": 16}, 0, None),  # more than the model has
        ("decoder_lm", {"min_new_tokens": 3, "max_new_tokens": 9}, 3, 9),
        ("seq2seq", {}, 0, None),
        ("seq2seq", {"max_length": 16}, 0, 15),
        ("seq2seq", {"max_length": 17}, 0, None),  # BOS, and as many tokens as the model writes
        ("seq2seq", {"max_length": 17, "forced_eos_token_id": 2}, 0, 15),
        ("seq2seq", {"min_length": 5, "max_length": 9}, 4, 8),  # with the first input of the decoder
        ("seq2seq", {"min_length": 9, "max_length": 9, "forced_eos_token_id": 2}, 7, 7),
    ],
)
def test_numbers_of_new_tokens(tmp_path, family, given, shortest, longest):
    cfg, _ = generation.read_decoding(tmp_path, given, tiny(family))
    assert (cfg.min_new_tokens, cfg.max_new_tokens) == (shortest, longest)


def test_only_bad_words_of_one_token_are_applied(tmp_path):
    _, unapplied = generation.read_decoding(tmp_path, {"bad_words_ids": [[7], [5, 6], [8, 9, 4]]}, tiny("seq2seq"))
    assert unapplied == ["bad_words_ids=[[5, 6], [8, 9, 4]]"]


def rewritten(folder, **arrays):
    """Rewrites the arrays of a checkpoint folder."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "llama"])
def test_older_names_and_those_of_a_base_model(name, tmp_path):
    """Without the base model's prefix, with gamma and beta, and with the heads of BERT's pretraining."""
    theirs = parity.their_model(name)
    theirs.save_pretrained(tmp_path)
    cfg, params = hf.load(tmp_path)
    prefix = hf.ARCHITECTURES[json.loads((tmp_path / "config.json").read_text())["model_type"]].prefix
    older = {}
    for key, array in files.read_arrays(tmp_path).items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        older[key.removeprefix(prefix)] = np.asarray(array)
    rewritten(tmp_path, **older, **({"cls.predictions.bias": np.ones(3)} if name == "bert" else {}))
    again, same = hf.load(tmp_path)
    assert again == cfg
    parity.jax.tree.map(np.testing.assert_array_equal, same, params)


def test_a_checkpoint_without_a_classification_head(tmp_path):
    parity.their_model("bert").save_pretrained(tmp_path)
    body = {name: a for name, a in files.read_arrays(tmp_path).items() if not name.startswith("classifier.")}
    rewritten(tmp_path, **{name: np.asarray(array) for name, array in body.items()})
    with pytest.raises(UserError, match="no classification head; set num_classes=... to initialize one randomly"):
        hf.load(tmp_path)
    cfg, params = hf.load(tmp_path, num_classes=5)
    assert cfg.num_classes == 5
    assert params["head"]["kernel"].shape == (8, 5)


def test_an_untied_checkpoint_without_its_head_is_refused(tmp_path):
    parity.their_model("llama").save_pretrained(tmp_path)
    body = {name: np.asarray(a) for name, a in files.read_arrays(tmp_path).items() if name != "lm_head.weight"}
    rewritten(tmp_path, **body)
    with pytest.raises(UserError, match="tie_word_embeddings=False, but it has no lm_head.weight"):
        hf.load(tmp_path)
