"""Checkpoints without an output head, with wrapped names, longer texts, and fields of earlier versions."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import tformer_jax as tj
from tests.helpers import assert_close
from tests.parity import checkpoints
from tests.parity import test_huggingface as parity
from tests.parity.test_import_mistakes import fields, removed
from tformer_jax.base.errors import UserError
from tformer_jax.cli import classify, embed, generate, import_hf, score
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.interop import hf
from tformer_jax.models import registry

TEXTS = ["the cat sat on the mat", "a dog"]


def base_model(folder, target):
    """Copies a checkpoint of Llama as its base model alone."""
    shutil.copytree(folder, target)
    transformers.AutoModel.from_pretrained(folder).save_pretrained(target)
    return target


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForCausalLM"])
def test_a_language_model_without_a_head_embeds(imported, kind, tmp_path, capsys):
    """As E5-Mistral, or as Qwen3-Embedding, whose config.json names a class with a head."""
    folder = base_model(imported("llama")[0], tmp_path / "base")
    fields(architectures=[kind])(folder)
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    notes = capsys.readouterr().err
    assert "no output head: the run embeds texts, and generates only after training" in notes
    assert "modules.json" not in notes
    run, flags = tj.load(tmp_path / "run"), ["--run", str(tmp_path / "run")]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    assert_close(run.embed(TEXTS), torch.stack(states).numpy(), 1e-5)
    embed.main([*flags, TEXTS[0]])
    assert len(capsys.readouterr().out.split()) == 8
    for command in (generate, score):
        with pytest.raises(UserError, match="^this command: .* has no trained output head and only embeds texts"):
            command.main([*flags, "the cat"])
    for use in (run.generate, run.score, run.logits, run.watch):
        with pytest.raises(UserError, match="has no trained output head and only embeds texts: use embed"):
            use(["the cat"])


def test_a_language_model_that_lost_its_head_is_refused(imported, tmp_path):
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    arrays = load_file(folder / "model.safetensors")
    del arrays["lm_head.weight"]
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(UserError, match="tie_word_embeddings=False, but it has no lm_head.weight"):
        import_hf.main([str(folder), "--run", str(tmp_path / "run")])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod."])
def test_names_of_wrapped_models(imported, prefix, tmp_path):
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    arrays = load_file(folder / "model.safetensors")
    save_file({prefix + name: array for name, array in arrays.items()}, folder / "model.safetensors")
    cfg, params = hf.load(folder)
    expected = hf.load(imported("llama")[0])
    assert cfg == expected[0]
    parity.jax.tree.map(np.testing.assert_array_equal, params, expected[1])


def test_the_length_that_is_given(tmp_path):
    """T5 has 512 positions unless told otherwise; YaRN multiplies the length before scaling."""
    parity.their_model("t5 1.0").save_pretrained(tmp_path / "t5")
    assert hf.load(tmp_path / "t5")[0].max_length == 512
    assert hf.load(tmp_path / "t5", max_length=640)[0].max_length == 640
    parity.their_model("qwen2").save_pretrained(tmp_path / "yarn")
    for original, longest in ((32, 128), (16, 32)):
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
        fields(rope_parameters=scaling | {"rope_theta": 1e4})(tmp_path / "yarn")
        assert hf.load(tmp_path / "yarn")[0].max_length == longest


@pytest.mark.slow
def test_t5_reads_more_tokens_than_its_config_names(tmp_path):
    """Its positions have no maximum, which transformers does not limit, either."""
    parity.their_model("t5 1.0").save_pretrained(tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    source = np.random.default_rng(0).integers(3, parity.V, (1, 600)).astype(np.int32)
    target = source[:, :4]
    cfg, params = hf.load(tmp_path, max_length=640)
    assert (cfg.max_length, hf.load(tmp_path)[0].max_length) == (640, 512)
    with torch.no_grad():
        ids = (torch.tensor(array, dtype=torch.long) for array in (source, target))
        expected = theirs(input_ids=next(ids), decoder_input_ids=next(ids)).logits.numpy()
    ours = registry.build(cfg).apply({"params": params}, source=source, target=target)
    assert_close(ours, expected, 1e-5)


@pytest.mark.slow
def test_the_length_of_yarn(tmp_path):
    """Published configs name the length before scaling; transformers reads texts as long as the factor allows."""
    model = parity.their_model("qwen2")
    model.save_pretrained(tmp_path)
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    fields(rope_parameters=scaling)(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    cfg, params = hf.load(tmp_path)
    assert cfg.max_length == 128
    tokens = np.random.default_rng(0).integers(3, parity.V, (1, 128)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert_close(registry.build(cfg).apply({"params": params}, tokens), expected, 1e-5)


def test_a_maximum_length_of_learned_positions_is_refused(imported, tmp_path):
    with pytest.raises(UserError, match="^max_length=64: its positions end at 32; leave the maximum length out$"):
        import_hf.main([str(imported("gpt2")[0]), "--run", str(tmp_path / "run"), "--max-length", "64"])


def test_float8_arrays_are_refused_by_name(tmp_path):
    from safetensors.torch import save_file as save_torch

    model = parity.their_model("llama")
    model.save_pretrained(tmp_path)
    arrays = {name: array.clone() for name, array in model.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    arrays[name] = arrays[name].to(torch.float8_e4m3fn)
    save_torch(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"array {name} has the dtype F8_E4M3, which is not read: save the checkpoint"):
        hf.load(tmp_path)


@pytest.mark.parametrize("changed", [False, True])
def test_saved_positions_of_marian_are_compared(changed, tmp_path):
    model = parity.their_model("marian")
    model.save_pretrained(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    table = model.model.encoder.embed_positions.weight.numpy()
    name = "model.encoder.embed_positions.weight"
    save_file(arrays | {name: np.float16(table + 0.1 * changed)}, tmp_path / "model.safetensors")
    if not changed:
        hf.load(tmp_path)
        return
    with pytest.raises(UserError, match=f"this checkpoint cannot be read: {name} has other positions than sinusoids"):
        hf.load(tmp_path)


def test_a_decoder_that_nothing_starts_is_refused(imported, tmp_path):
    """transformers refuses to generate."""
    folder = shutil.copytree(imported("t5")[0], tmp_path / "copy")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        left = {k: v for k, v in config.items() if k not in ("decoder_start_token_id", "bos_token_id")}
        (folder / name).write_text(json.dumps(left))
    with pytest.raises(UserError, match="^config.json has no decoder_start_token_id, with which the inputs of the"):
        import_hf.main([str(folder), "--run", str(tmp_path / "run")])


@pytest.mark.parametrize("own", [False, True])
def test_where_the_first_token_of_an_output_is_read(own, tmp_path):
    """Of generation_config.json alone, if it exists; `force_bos_token_to_be_generated` forces BOS."""
    config = parity.BART | {"vocab_size": 99, "force_bos_token_to_be_generated": True, "bad_words_ids": [[5]]}
    transformers.BartForConditionalGeneration(transformers.BartConfig(**config)).save_pretrained(tmp_path)
    fields(forced_bos_token_id="left out", force_bos_token_to_be_generated=True, bad_words_ids=[[5]])(tmp_path)
    removed("generation_config.json")(tmp_path)
    if own:
        (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 2}))
    checkpoints.bart_tokenizer(tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config
    special = load_checkpoint_tokenizers(tmp_path).target.special
    assert special.forced == (() if theirs.forced_bos_token_id is None else (theirs.forced_bos_token_id,))
    assert special.forced == (() if own else (1,))
    assert special.suppressed == (() if theirs.bad_words_ids is None else (5,))


@pytest.mark.parametrize("names", ["left out", {"0": "bad", "1": "good"}])
def test_a_number_of_labels_without_names(imported, names, tmp_path, capsys):
    """Also with the names of another number of labels, which rxnfp's config has."""
    folder = shutil.copytree(imported("bert")[0], tmp_path / "copy")
    fields(id2label=names, label2id="left out", num_labels=3)(folder)
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert tj.load(tmp_path / "run").labels == tuple(model.config.id2label.values())
    classify.main(["--run", str(tmp_path / "run"), "the cat"])
    ids = transformers.AutoTokenizer.from_pretrained(folder)("the cat", return_tensors="pt")
    best = int(model.eval()(**ids).logits.argmax())
    assert f"LABEL_{best}" in capsys.readouterr().out
