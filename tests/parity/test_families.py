"""Each family, imported and exported by the commands, with small sizes in configs of the hub.

The weights are random; outputs of the import and of the export equal those of transformers. The configs of
`published.json` were compared with copies in public repositories, field by field, except those of Qwen2-7B, gemma-2-2b
and flan-t5-small, of which no copy was found, parts of opus-mt-en-de, t5-small and Qwen3-0.6B, and the decoders from
gemma-2b on. Of these, Phi-3 and gpt-oss were compared, the sizes of Seed-OSS, OLMo 2 (1B) and Granite 3.1, the latent
sizes, rotation and router of DeepSeek-V3, and T5Gemma's encoder; the rest is written from memory.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import tformer_jax as tj
from tests.parity import checkpoints, family_table
from tformer_jax.cli import embed, export_hf, generate, import_hf, translate
from tformer_jax.cli.export_checks import logits
from tformer_jax.cli.outputs import join_lines

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
PROMPTS = ["the cat", "a dog and the", "der Hund"]
NEW = 6

DECODER = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
LATENTS = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "moe_intermediate_size": 8}
DELTA = {"key_head_dim": 4, "num_key_heads": 2, "num_value_heads": 4, "value_head_dim": 3}
SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32},
    "bert": checkpoints.SIZES | {"max_position_embeddings": 32},
    "t5": checkpoints.PAIR | {"n_positions": 32},
    **dict.fromkeys(("bart", "marian"), checkpoints.MARIAN | {"num_hidden_layers": 2}),
    "gemma3_text": DECODER | {"num_hidden_layers": 7},
    "t5_gemma_module": DECODER | {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": DECODER | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "hunyuan_v1_dense": DECODER | {"attention_head_dim": 4},
    "gpt_oss": DECODER
    | {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4, "swiglu_limit": 0.7}
    | dict.fromkeys(("num_experts_per_tok", "experts_per_token"), 2),
}
SIZES["qwen3_next"] = DECODER | {"num_hidden_layers": 4, "head_dim": 8}
SIZES["qwen3_next"] |= {f"linear_{name}": size for name, size in DELTA.items()}
SIZES["qwen3_5_text"] = SIZES["qwen3_next"] | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
SIZES["qwen3_next"] |= {"num_experts": 4, "num_experts_per_tok": 2}
SIZES["qwen3_next"] |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
SIZES["deepseek_v2"] = DECODER | LATENTS | {"n_routed_experts": 6, "num_experts_per_tok": 2}
SIZES["deepseek_v3"] = SIZES["deepseek_v2"] | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
SIZES["deepseek_v3"] |= {"first_k_dense_replace": 1, "q_lora_rank": 5}
"""Small sizes by `model_type`; 7 layers of Gemma 3 have one without a window."""
SMALLER = {"head_dim": 4, "sliding_window": 4, "num_decoder_layers": 2}
"""Sizes of a config that has them."""
CLASSES = {"BartModel": "BartForConditionalGeneration"}
DECODERS = [
    name for name, config in PUBLISHED.items() if config["architectures"][0].endswith(("CausalLM", "LMHeadModel"))
]
PAIRS = ("google-t5", "google/flan", "google/t5gemma", "facebook/bart", "Hel")
ENCODER_DECODERS = [name for name in PUBLISHED if name.startswith(PAIRS)]
ENCODERS = [name for name, config in PUBLISHED.items() if config["model_type"] == "bert"]
BYTES = ("gpt2", "qwen2", "qwen3", "qwen3_next", "qwen3_5_text")
"""Types with byte-level tokenizers, besides Llama 3."""


def small(name: str) -> dict:
    """Returns a published config with small sizes; its token ids are those of the tokenizer."""
    config = PUBLISHED[name]
    if "encoder" in config:
        stacks = {key: small_sizes(config[key]) for key in ("encoder", "decoder")}
        stacks["decoder"]["cross_attention_hidden_size"] = DECODER["hidden_size"]
        return config | stacks
    return small_sizes(config)


def small_sizes(config: dict) -> dict:
    """Returns a config, or that of one stack, with small sizes."""
    sizes = SIZES.get(config["model_type"], DECODER)
    sizes = {key: size for key, size in SMALLER.items() if config.get(key) is not None} | sizes
    if config.get("num_key_value_heads") == config.get("num_attention_heads") and "num_key_value_heads" in config:
        sizes |= {"num_key_value_heads": 4}
    return {key: value for key, value in config.items() if key != "quantization_config"} | sizes


def tokenizer_of(folder: Path, name: str) -> dict:
    """Writes a tokenizer as the family has it; returns the fields of config.json that depend on it."""
    kind = PUBLISHED[name]["model_type"]
    if kind == "bert":
        return {"vocab_size": checkpoints.word_pieces(folder)["vocab_size"], "pad_token_id": 1}
    if kind == "bart":
        neutral = {"forced_eos_token_id": None, "num_beams": 1, "no_repeat_ngram_size": 0, "early_stopping": False}
        return checkpoints.bart_tokenizer(folder) | neutral
    makers = {"t5": checkpoints.t5, "marian": checkpoints.marian}
    maker = makers.get(kind, checkpoints.gpt2 if kind in BYTES or "Llama-3" in name else checkpoints.llama)
    theirs = maker(folder).config
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "decoder_vocab_size")
    actual = {field: getattr(theirs, field) for field in names if field in PUBLISHED[name]}
    if kind == "marian":
        actual |= {"bad_words_ids": [[theirs.pad_token_id]], "forced_eos_token_id": None, "num_beams": 1}
    if kind == "t5gemma":  # which CTranslate2 converts only if each token has a name
        return actual | {"vocab_size": len(transformers.AutoTokenizer.from_pretrained(folder, config=theirs))}
    return actual | {"vocab_size": theirs.vocab_size}


@pytest.fixture(autouse=True)
def windows_as_published(request, monkeypatch):
    """Gives T5Gemma's encoder the windows of transformers 4, with which it was published.

    A token attends to those less than `sliding_window` away, as in the decoder; in 5.24, also to those exactly as far
    (`findings/transformers_t5gemma_window.sh`).
    """
    if "t5gemma" in request.node.callspec.params["name"]:
        window = lambda size: lambda row, head, query, key: abs(query - key) < size  # noqa: E731
        monkeypatch.setattr(transformers.masking_utils, "sliding_window_bidirectional_overlay", window)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns a function that makes the folder, the run and transformers' model of a name, once."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            config = small(name) | tokenizer_of(folder, name)
            for stack in {"encoder", "decoder"} & config.keys():
                config[stack]["vocab_size"] = config["vocab_size"]
            made[name] = folder, folder.with_name(f"{folder.name}_run"), save(folder, config)
            import_hf.main([str(folder), "--run", str(made[name][1])])
        return made[name]

    return make


def save(folder: Path, config: dict) -> torch.nn.Module:
    """Saves random parameters, and the config as it is, not as today's transformers writes it."""
    kind = config["architectures"][0]
    model_class = getattr(transformers, CLASSES.get(kind, kind))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    loading = "model_type", "architectures", "torch_dtype", "dtype"
    given = {key: value for key, value in config.items() if key not in loading}
    stored = getattr(torch, config.get("torch_dtype", config.get("dtype", "float32")))
    checkpoints.save(folder, CLASSES.get(kind, kind), given).to(stored).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def their_outputs(folder: Path, model: torch.nn.Module, beams: int) -> list[str]:
    tokenizer, actual = transformers.AutoTokenizer.from_pretrained(folder), []
    ends = np.atleast_1d(model.config.eos_token_id)
    absent = list(range(len(tokenizer), model.config.vocab_size)) or None  # tokens that we never generate
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        settings = {"num_beams": beams, "max_new_tokens": NEW, "do_sample": False, "use_cache": False}
        settings["suppress_tokens"] = absent
        with torch.no_grad():
            output = model.generate(**ids, **settings, pad_token_id=0)[0].tolist()
        output = output[:-1] if output[-1] in ends else output  # an ordinary token may end texts
        actual.append(
            join_lines(tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        )
    return actual


def our_outputs(run: Path, beams: int, folder: Path, capsys) -> list[str]:
    capsys.readouterr()
    flags = ["--strategy", "greedy"] if beams == 1 else ["--beams", str(beams)]
    flags += ["--run", str(run), "--max-new-tokens", str(NEW), "--unknown", "omit"]
    if tj.load(run).config.model.family == "seq2seq":
        translate.main([*PROMPTS, *flags])
    else:
        (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
        generate.main(["--input", str(folder / "prompts.txt"), *flags])
    return capsys.readouterr().out.split("\n")[:-1]


def exported(run: Path, folder: Path, model: torch.nn.Module) -> torch.nn.Module:
    """Exports the run, checks that its arrays are those of the model, and returns transformers' model of it."""
    export_hf.main(["--run", str(run), str(folder)])
    back = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(back.state_dict()[name], array)
    return back


def _pair(name: str, model: torch.nn.Module) -> tuple[str, str]:
    return f"whole model: {name}", f"transformers {type(model).__name__}"


def compare_ids_and_logits(folder: Path, run: tj.Run, model: torch.nn.Module, name: str) -> None:
    """Compares the ids of prompts, and the logits of rows of random ids, longer than the model's windows."""
    tokenizer, pair = transformers.AutoTokenizer.from_pretrained(folder), run.config.model.family == "seq2seq"
    for text in PROMPTS:
        ids, special = run.tokenizers.source.encode(text), run.tokenizers.source.special
        assert tokenizer(text)["input_ids"] == (special.wrap_side(ids) if pair else special.wrap_text(ids))
    keys, draw = ("source", "target_in") if pair else ("tokens",), np.random.default_rng(3)
    batch = {key: draw.integers(0, run.config.model.vocab_size, (3, 12), np.int32) for key in keys}
    names = {"source": "input_ids", "tokens": "input_ids", "target_in": "decoder_input_ids"}
    inputs = {names[key]: torch.tensor(rows, dtype=torch.long) for key, rows in batch.items()}
    with torch.no_grad():
        theirs = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits.numpy()
    kind = PUBLISHED[name]["model_type"]
    family_table.record_logits(name, folder, kind, logits(run, batch), theirs, _pair(name, model))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_outputs_of_the_import_and_of_the_export(imported, tmp_path, name, capsys):
    folder, run, model = imported(name)
    loaded = tj.load(run)
    compare_ids_and_logits(folder, loaded, model, name)
    back = exported(run, tmp_path / "out", model)
    for beams in (1, 3):
        expected = their_outputs(folder, model, beams)
        assert our_outputs(run, beams, tmp_path, capsys) == expected
        assert their_outputs(tmp_path / "out", back, beams) == expected
    assert len(set(expected)) > 1
    actual = family_table.equal_searches(loaded, tmp_path / "out", PROMPTS, NEW)
    family_table.record(name, outputs="greedy, beams", export="arrays, outputs", ctranslate2=actual)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_of_the_import_and_of_the_export(imported, tmp_path, name):
    folder, run, model = imported(name)
    base = getattr(model, "bert", model)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        states = base(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    expected = ((states * real).sum(1) / real.sum(1)).numpy()
    embed.main(["--run", str(run), *PROMPTS, "--output", str(tmp_path / "a.npy")])
    embedded, kind = np.load(tmp_path / "a.npy"), PUBLISHED[name]["model_type"]
    family_table.record_logits(name, folder, kind, embedded, expected, _pair(name, base))
    export_hf.main(["--run", str(run), str(tmp_path / "out")])
    arrays, original = (load_file(place / "model.safetensors") for place in (tmp_path / "out", folder))
    prefix = "" if "bert.embeddings.word_embeddings.weight" in original else "bert."
    assert {prefix + key for key in original if "pooler" not in key} <= arrays.keys() | {"cls.predictions.decoder.bias"}
    for key in original:
        if prefix + key in arrays:
            np.testing.assert_array_equal(arrays[prefix + key], original[key])
    rows = [row[mask == 1].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    actual = family_table.equal_states(tj.load(run), tmp_path / "out", rows, states.numpy())
    family_table.record(name, outputs="embeddings", export="arrays", ctranslate2=actual)
