"""Compares whole models with Hugging Face's: logits, gradients, and checkpoints in both directions.

Each model has random weights; nothing is downloaded.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from transformers.models.bert import modeling_bert

from tests.helpers import assert_close, normal, rest_slow, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.interop import files, hf, mapping
from tformer_jax.models import registry

V, B = 19, 2
TOKENS = np.array([[5, 6, 7, 8, 9, 4, 12, 3], [4, 10, 4, 18, 7, 0, 0, 0]], np.int32)
REAL = np.arange(8) < np.array([[8], [5]])
SOURCE = np.array([[9, 8, 7, 4, 2, 11], [6, 5, 17, 0, 0, 0]], np.int32)
SOURCE_REAL = np.arange(6) < np.array([[6], [3]])

SIZES = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PAIR = {"d_model": 8, "vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    **PAIR,
    "decoder_start_token_id": 2,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
}
T5 = {
    **PAIR,
    "d_kv": 3,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
T5 |= {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
HALF = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
NTK = {"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 10.0, "factor": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 8}
YARN_BY_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.3}
MULTIPLIERS |= {"attention_multiplier": 0.7}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 3}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {**GQA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "num_key_value_heads": 4}
DEEPSEEK |= {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": None}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "n_shared_experts": 2}
DEEPSEEK |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
QWEN3_5 = {**GQA, "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 3, "num_hidden_layers": 3}
QWEN3_5 |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
QWEN3_5 |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
ALBERT = {**SIZES, "embedding_size": 6, "max_position_embeddings": 16, "num_labels": 3, "pad_token_id": 0}
ALBERT |= {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "gelu"}
QWEN3_NEXT = {**QWEN3_5, **EXPERTS, "shared_expert_intermediate_size": 4}
ROBERTA = {**SIZES, "max_position_embeddings": 17, "type_vocab_size": 1, "pad_token_id": 0, "num_labels": 3}
ROBERTA |= {"hidden_act": "relu"}
DISTILBERT = {"vocab_size": V, "dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 4, "num_labels": 3}
DISTILBERT |= {"max_position_embeddings": 16}
MODERNBERT = {**SIZES, "num_attention_heads": 2, "max_position_embeddings": 16, "local_attention": 4, "num_labels": 3}
MODERNBERT |= {"num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
MODERNBERT |= {"cls_token_id": 1, "sep_token_id": 2, "classifier_pooling": "mean", "classifier_activation": "silu"}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 8, "n_layer": 2, "n_head": 4, "vocab_size": V, "n_positions": 16}),
    "llama": ("LlamaForCausalLM", {**GQA, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**GQA, "sliding_window": 3, "head_dim": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**GQA, "head_dim": 6}),
    "gemma2": ("Gemma2ForCausalLM", {**GQA, **WINDOW, "head_dim": 4, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", {**GQA, **WINDOW, "head_dim": 4, "query_pre_attn_scalar": 5}),
    "mixtral": ("MixtralForCausalLM", {**GQA, **LOCAL_EXPERTS, "sliding_window": None}),
    "gemma": ("GemmaForCausalLM", {**GQA, "head_dim": 6}),
    "ministral": ("MinistralForCausalLM", {**GQA, **WINDOW, "head_dim": 6}),
    "cwm": ("CwmForCausalLM", {**GQA, **WINDOW, "head_dim": 6, "eos_token_id": 2, "bos_token_id": 1}),
    "arcee": ("ArceeForCausalLM", {**GQA, "mlp_bias": True, "eos_token_id": 2, "bos_token_id": 1}),
    "seed_oss": ("SeedOssForCausalLM", {**GQA, "head_dim": 6, "rope_parameters": LLAMA3}),
    "phi3": ("Phi3ForCausalLM", {**GQA, **TWO_HEADS, "rope_parameters": HALF, "sliding_window": 3}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {**GQA, "head_dim": 6, "rope_parameters": NTK}),
    "olmo2": ("Olmo2ForCausalLM", GQA),
    "olmo3": ("Olmo3ForCausalLM", {**GQA, **WINDOW, "rope_parameters": YARN_BY_KIND, "head_dim": 6}),
    "granite": ("GraniteForCausalLM", {**GQA, **MULTIPLIERS}),
    "smollm3": ("SmolLM3ForCausalLM", {**GQA, "no_rope_layers": [1, 0]}),
    "stablelm": ("StableLmForCausalLM", {**GQA, **TWO_HEADS, "rope_parameters": HALF, "use_qkv_bias": True}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**GQA, **EXPERTS, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 4},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**GQA, **EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**GQA, **WINDOW, **LOCAL_EXPERTS, "head_dim": 6, "swiglu_limit": 0.5},
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", QWEN3_5),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN3_NEXT),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "q_lora_rank": 5}),
    "bert": ("BertForSequenceClassification", {**SIZES, "max_position_embeddings": 16, "num_labels": 3}),
    "bert masked_lm": ("BertForMaskedLM", {**SIZES, "max_position_embeddings": 16}),
    "roberta": ("RobertaForSequenceClassification", ROBERTA),
    "roberta masked_lm": ("RobertaForMaskedLM", ROBERTA),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", ROBERTA),
    "distilbert": ("DistilBertForSequenceClassification", DISTILBERT),
    "distilbert masked_lm": ("DistilBertForMaskedLM", DISTILBERT),
    "modernbert": ("ModernBertForSequenceClassification", MODERNBERT),
    "modernbert masked_lm": ("ModernBertForMaskedLM", MODERNBERT),
    "albert": ("AlbertForSequenceClassification", ALBERT),
    "albert masked_lm": ("AlbertForMaskedLM", ALBERT),
    "t5 1.0": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "relu"}),
    "t5 1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("BartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", {**BART, "scale_embedding": True, "activation_function": "swish"}),
    "mt5": ("MT5ForConditionalGeneration", {**T5, "tie_word_embeddings": False}),
    "umt5": ("UMT5ForConditionalGeneration", {**T5, "tie_word_embeddings": False}),
    "mbart": ("MBartForConditionalGeneration", {**BART, "scale_embedding": True}),
    "m2m_100": ("M2M100ForConditionalGeneration", {**BART, "scale_embedding": True}),
}
BUFFERS = "final_logits_bias", "e_score_correction_bias"
"""Names of arrays that have no gradient there."""
UNTIED = "t5 1.1", "mt5", "umt5"
SLOW = {"smollm3", "mt5", "stablelm", "qwen2_moe", "qwen3_moe", "xlm-roberta", "roberta masked_lm"}
SLOW |= {"distilbert masked_lm", "modernbert", "gemma", "ministral", "cwm", "arcee", "seed_oss", "olmo2"}
"""Models that differ from others in one setting each, or in their heads."""


def their_model(name: str) -> torch.nn.Module:
    """Initialises random weights, large enough to matter."""
    kind, settings = MODELS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**settings)
    if name in UNTIED:
        config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    if name in UNTIED:
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    torch.manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if "embed_positions" not in parameter_name or parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.4)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(BUFFERS):
            torch.nn.init.normal_(buffer)
    return model


def run_theirs(model: torch.nn.Module) -> torch.Tensor:
    tokens, mask = torch.tensor(TOKENS, dtype=torch.long), torch.tensor(REAL, dtype=torch.long)
    if model.config.is_encoder_decoder:
        source, source_mask = torch.tensor(SOURCE, dtype=torch.long), torch.tensor(SOURCE_REAL, dtype=torch.long)
        return model(
            input_ids=source, attention_mask=source_mask, decoder_input_ids=tokens, decoder_attention_mask=mask
        ).logits
    return model(input_ids=tokens, attention_mask=mask).logits


def run_ours(model, params) -> jax.Array:
    arguments = {
        "seq2seq": {
            "source": SOURCE,
            "target": TOKENS,
            "source_padding_mask": SOURCE_REAL,
            "target_padding_mask": REAL,
        },
        "decoder_lm": {"tokens": TOKENS, "padding_mask": REAL},
        "classifier": {"tokens": TOKENS, "padding_mask": REAL},
        "masked_lm": {"tokens": TOKENS, "padding_mask": REAL},
    }[model.cfg.family]
    return model.apply({"params": params}, **arguments)


def shown(logits):
    """Returns the logits of real tokens; those of padding are undefined."""
    return logits[REAL] if logits.ndim == 3 else logits


def their_gradients(model: torch.nn.Module, folder) -> dict[str, np.ndarray]:
    """Returns gradients by checkpoint name: saves and reads a model whose parameters are its gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return {name: np.asarray(array) for name, array in files.read_arrays(folder).items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
def test_logits_gradients_and_checkpoints(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    ours = registry.build(cfg)
    proves = (f"whole model: {name}", f"transformers {MODELS[name][0]}")

    expected = run_theirs(theirs)
    weights = normal(*expected.shape, seed=3) * (REAL[..., None] if expected.ndim == 3 else 1)
    (expected * torch.tensor(np.asarray(weights))).sum().backward()

    def total(params):
        logits = run_ours(ours, params)
        return (logits * weights).sum(), logits

    gradients, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    assert_close(shown(logits), shown(expected.detach().numpy()), 1e-5, proves=proves)

    hf.save(tmp_path / "ours", json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"], cfg, params)
    back = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        assert_close(shown(run_theirs(back).numpy()), shown(expected.detach().numpy()), 1e-6)

    model_type = json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"]
    architecture = hf.architecture_of(model_type, cfg.family)
    actual = mapping.join_fused(mapping.to_theirs(architecture.rules(cfg), gradients), architecture.fused(cfg))
    wanted = their_gradients(theirs, tmp_path / "gradients")
    scale = max(np.abs(array).max() for array in wanted.values())
    compared = 0
    for parameter, gradient in actual.items():
        if not parameter.endswith(BUFFERS):
            assert_close(
                gradient / scale, wanted[parameter] / scale, 1e-4, proves=(f"{proves[0]}, gradients", proves[1])
            )
            compared += gradient.size
    assert compared == sum(parameter.numel() for parameter in theirs.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", rest_slow(["cwm", "gemma2", "gemma3", "gpt_oss", "ministral", "olmo3"], 1))
def test_a_model_without_windows_of_an_architecture_with_them_is_written(name, tmp_path):
    """Regression test: its window was null, which transformers refuses."""
    model = their_model(name)
    model.config.layer_types = ["full_attention"] * model.config.num_hidden_layers
    model.save_pretrained(tmp_path / "theirs")
    hf.save(tmp_path / "ours", model.config.model_type, *hf.load(tmp_path / "theirs"))
    expected, actual = (
        run_theirs(type(model).from_pretrained(tmp_path / place, attn_implementation="eager")).detach().numpy()
        for place in ("theirs", "ours")
    )
    assert_close(shown(actual), shown(expected), 1e-6)


@pytest.mark.parametrize("name", rest_slow(["t5 1.1", "mt5", "umt5"], 1))
def test_a_t5_without_its_head_has_its_embedding(name, tmp_path):
    """Regression test: with `tie_word_embeddings` false, as in their configs, it was refused."""
    model = their_model(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    arrays = {key: array for key, array in files.read_arrays(tmp_path).items() if key != "lm_head.weight"}
    save_file({key: np.array(array) for key, array in arrays.items()}, tmp_path / "model.safetensors")
    theirs = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    cfg, params = hf.load(tmp_path)
    expected = run_theirs(theirs).detach().numpy()
    assert cfg.tie_embeddings == "all" and not cfg.scale_output
    assert_close(shown(run_ours(registry.build(cfg), params)), shown(expected), 1e-5)


def test_the_head_of_masked_language_models():
    """`BertForMaskedLM`'s predictions of the outputs of its encoder."""
    settings = transformers.BertConfig(**SIZES, hidden_act="gelu")
    theirs = modeling_bert.BertOnlyMLMHead(settings).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    arrays = {name: parameter.detach().numpy() for name, parameter in theirs.predictions.named_parameters()}
    cfg = tiny(
        "masked_lm",
        dim=settings.hidden_size,
        vocab_size=settings.vocab_size,
        head_transform=True,
        output_bias=True,
        activation="gelu",
        norm_eps=settings.layer_norm_eps,
    )
    params = {
        "embedding": {"embedding": arrays["decoder.weight"]},
        "transform": {"kernel": arrays["transform.dense.weight"].T, "bias": arrays["transform.dense.bias"]},
        "transform_norm": {"scale": arrays["transform.LayerNorm.weight"], "bias": arrays["transform.LayerNorm.bias"]},
        "head": {"bias": arrays["decoder.bias"]},
    }
    x = normal(2, 3, cfg.dim)
    logits = registry.build(cfg).apply({"params": params}, x, method="logits")
    with torch.no_grad():
        assert_close(logits, theirs(torch.tensor(np.asarray(x))).numpy(), proves=("head_transform", "transformers"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    their_model("gpt2").save_pretrained(folder)
    return folder


def change(source, target, **settings):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"model_type": "bloom"},
            "model_type 'bloom' is not supported; supported are albert, arcee, bart, bert, cwm, ",
        ),
        ({"model_type": "olmoe"}, "'olmoe' is not supported: it has experts .* 'olmo2' is the nearest that is"),
        ({"n_layer": 3}, "the checkpoint has no array 'transformer.h.2.*' for the parameter decoder/layers_2/"),
        ({"n_layer": 1}, "the checkpoint has arrays that the model does not: transformer.h.1"),
        ({"n_inner": 20}, "transformer.h.0.mlp.* of the checkpoint has the shape .*; expected: "),
        ({"activation_function": "mish"}, "this checkpoint cannot be read: activation 'mish' is not supported"),
    ],
)
def test_checkpoints_that_do_not_fit(checkpoint, tmp_path, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        hf.load(change(checkpoint, tmp_path / "changed", **settings))


def test_folders_that_are_no_checkpoint(checkpoint, tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        hf.load(tmp_path)
    changed = change(checkpoint, tmp_path / "damaged")
    (changed / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        hf.load(changed)
    (changed / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no .safetensors file"):
        hf.load(changed)


def test_a_model_that_an_architecture_cannot_hold(checkpoint, tmp_path):
    cfg, params = hf.load(checkpoint)
    with pytest.raises(
        UserError,
        match="'llama' cannot represent this model: the architecture has no array for the parameter input/positions",
    ):
        hf.save(tmp_path / "llama", "llama", cfg, params)


def test_settings_change_the_config(checkpoint):
    cfg, params = hf.load(checkpoint, dtype="bfloat16", attention_backend="blockwise")
    assert (cfg.dtype, cfg.attention_backend) == ("bfloat16", "blockwise")
    assert jax.tree.leaves(params)[0].dtype == jnp.float32
