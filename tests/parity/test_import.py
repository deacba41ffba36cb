"""Checkpoints imported by the command compute what transformers computes, from text to text, and are exported equal."""

import dataclasses
import json
import shutil
import weakref

import huggingface_hub
import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import checkpoints
from tformer_jax.base.errors import UserError
from tformer_jax.cli import classify, embed, export_hf, fill_mask, generate, import_hf, score, translate
from tformer_jax.cli.outputs import join_lines
from tformer_jax.config import EvalConfig, OptimConfig, ParallelConfig, TrainConfig, read_mesh
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.interop import files, hf, hub
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import experiment, training

PROMPTS = ["the cat", "a dog and the", "der Hund"]
NEW = 6
OMIT = ["--unknown", "omit"]
"""As transformers does with `skip_special_tokens`."""


def their_tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def their_outputs(folder, model, texts, **settings) -> list[str]:
    """Without tokens that the tokenizer does not have, which transformers decodes to nothing."""
    tokenizer, actual = their_tokenizer(folder), []
    settings["suppress_tokens"] = list(range(len(tokenizer), model.config.vocab_size)) or None
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            output = model.generate(**ids, max_new_tokens=NEW, do_sample=False, use_cache=False, **settings)[0]
        actual.append(tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return actual


@pytest.mark.parametrize("kind", checkpoints.MAKERS)
def test_ids_and_special_tokens_are_those_of_transformers(imported, kind):
    folder, run, _ = imported(kind)
    ours, theirs = tj.load(run).tokenizers, their_tokenizer(folder)
    for text in [*PROMPTS, "an unseen Ω word", "cat </s> <extra_id_0> [SEP] dog", ">>fr<< the cat"]:
        if kind == "marian" and "</s>" in text:
            continue  # theirs splits names of special tokens from the text, which SentencePiece does not know
        special = ours.source.special
        whole = special.wrap_side if kind in ("t5", "marian") else special.wrap_text
        assert whole(ours.source.encode(text)) == theirs(text)["input_ids"]
        if "</s>" in text:
            continue  # ends our decoding
        ids = ours.target.encode(text)
        assert ours.target.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "beams"), [("gpt2", 1), ("llama", 1), ("llama", 3)])
def test_continuations_are_equal(imported, kind, beams, capsys):
    """Of the two end tokens of `llama`, both end beams."""
    folder, run, model = imported(kind)
    expected = their_outputs(folder, model, PROMPTS, pad_token_id=0, num_beams=beams)
    file = folder / "prompts.txt"
    file.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    flags = [] if beams == 1 else ["--beams", str(beams)]
    generate.main(["--run", str(run), "--input", str(file), "--max-new-tokens", str(NEW), *OMIT, *flags])
    assert capsys.readouterr().out.split("\n")[:-1] == list(map(join_lines, expected))


def test_the_engine_streams_the_same_continuation(imported):
    """As the server does: the first piece of a text keeps its space."""
    folder, run, model = imported("llama")
    loaded = tj.load(run)
    engine = Engine(loaded.config, loaded.model, loaded.params, loaded.tokenizers, max_rows=1)
    tokenizer = loaded.tokenizers.target
    ids = tokenizer.special.wrap_text(tokenizer.encode(PROMPTS[0]))
    engine.submit(Request(tuple(ids), loaded.decoding({"max_new_tokens": NEW, "unknown": "omit"})))
    text = PROMPTS[0]
    while not engine.idle:
        text += "".join(event.text for event in engine.step())
    assert text == their_outputs(folder, model, PROMPTS[:1], pad_token_id=0)[0]


@pytest.mark.parametrize("case", rest_slow([("t5", 3), ("t5", 1), ("marian", 3), ("marian", 1)], 1))
def test_translations_are_equal(imported, case, capsys):
    kind, beams = case
    folder, run, model = imported(kind)
    expected = their_outputs(folder, model, PROMPTS, num_beams=beams)
    flags = ["--strategy", "greedy"] if beams == 1 else ["--beams", str(beams)]
    translate.main(["--run", str(run), *PROMPTS, "--max-new-tokens", str(NEW), *OMIT, *flags])
    assert capsys.readouterr().out.split("\n")[:-1] == list(map(join_lines, expected))


@pytest.mark.parametrize("beams", rest_slow([1, 3], 1))
def test_a_forced_end_shortens_outputs(imported, beams, tmp_path, capsys):
    """Of an output that is as long as the limit, transformers replaces the last token by EOS."""
    folder, _, model = imported("marian")
    folder, run = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "run"
    ids = json.loads((folder / "generation_config.json").read_text())
    limits = {"max_length": 5, "forced_eos_token_id": 0, "num_beams": beams}
    (folder / "generation_config.json").write_text(json.dumps(ids | limits))
    import_hf.main([str(folder), "--run", str(run)])
    assert ("not applied: forced_eos_token_id=0 (only outputs" in capsys.readouterr().err) == (beams > 1)
    tokenizer = their_tokenizer(folder)
    translate.main(["--run", str(run), *PROMPTS, *OMIT])
    for text, ours in zip(PROMPTS, capsys.readouterr().out.splitlines(), strict=True):
        tokens = model.generate(**tokenizer(text, return_tensors="pt"), **limits)[0]
        assert len(tokens) == 5 and tokens[-1] == 0
        assert ours == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("limits", [{"max_new_tokens": 1}, {"max_length": 2}])
def test_a_forced_end_without_a_token_before_it_is_not_applied(imported, limits, tmp_path, capsys):
    """Regression test: without a word, outputs had a token where those of transformers are empty."""
    folder, _, model = imported("marian")
    folder, limits = shutil.copytree(folder, tmp_path / "copy"), limits | {"forced_eos_token_id": 0, "num_beams": 1}
    ids = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(ids | limits))
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    assert "not applied: forced_eos_token_id=0" in capsys.readouterr().err
    tokens = model.generate(**their_tokenizer(folder)(PROMPTS[0], return_tensors="pt"), **limits)[0]
    assert tokens.tolist() == [model.config.decoder_start_token_id, 0]


def test_scores_are_equal(imported, capsys):
    folder, run, model = imported("llama")
    score.main(["--run", str(run), *PROMPTS])
    for text, line in zip(PROMPTS, capsys.readouterr().out.splitlines(), strict=True):
        ids = their_tokenizer(folder)(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_p = model(ids).logits[0, :-1].log_softmax(-1)
        expected = log_p.gather(1, ids[0, 1:, None]).sum().item()
        assert abs(float(line.split("\t")[0]) - expected) < 1e-3


def test_labels_and_embeddings_are_equal(imported, tmp_path, capsys):
    folder, run, model = imported("bert")
    inputs = their_tokenizer(folder)(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        probabilities = model(**inputs).logits.softmax(-1).numpy()
        states = model.bert(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    expected = (states * real).sum(1) / real.sum(1)
    classify.main(["--run", str(run), *PROMPTS])
    for row, line in zip(probabilities, capsys.readouterr().out.splitlines(), strict=True):
        label, probability, _ = line.split("\t")
        assert label == model.config.id2label[int(row.argmax())]
        assert abs(float(probability) - row.max()) < 1e-4
    embed.main(["--run", str(run), *PROMPTS, "--output", str(tmp_path / "a.npy")])
    actual = np.load(tmp_path / "a.npy")
    assert json.loads((tmp_path / "a.npy.provenance.json").read_text())["command"]["pooling"] == "mean"
    assert_close(actual, expected.numpy(), 1e-5)
    assert_close(tj.load(run).embed(PROMPTS, pooling="first"), states[:, 0].numpy(), 1e-5)
    last = states[np.arange(3), inputs["attention_mask"].sum(1) - 1]
    embed.main(["--run", str(run), *PROMPTS, "--pooling", "last", "--normalize"])
    lines = np.array([list(map(float, line.split(" "))) for line in capsys.readouterr().out.splitlines()])
    assert_close(lines, (last / last.norm(dim=1, keepdim=True)).numpy(), 1e-5)


def test_masks_are_filled_equally(imported, tmp_path, capsys):
    """Also several masks in a text, and in the texts of a batch of different lengths."""
    folder, run, model = imported("bert_masked_lm")
    texts = ["the [MASK] sat on the mat", "[MASK] and a [MASK]", "der Hund und die [MASK] and the dog sat on the log"]
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=their_tokenizer(folder), top_k=3)
    for text, fills in zip(texts, tj.load(run).fill_mask(texts, top=3), strict=True):
        theirs = pipeline(text)
        masks = theirs if isinstance(theirs[0], list) else [theirs]
        assert len(fills) == 3
        for rank, fill in enumerate(fills):
            assert fill.tokens == tuple(actual[rank]["token_str"] for actual in masks)
            expected = np.prod([actual[rank]["score"] for actual in masks])
            assert abs(fill.probability - expected) < 1e-5
            if len(masks) == 1:
                assert fill.text == masks[0][rank]["sequence"]
    fill_mask.main(["--run", str(run), *texts[:1], " ", "--top", "2"])
    first, second, *blank = capsys.readouterr().out.split("\n")
    assert [first.split("\t")[1], second.split("\t")[1]] == [actual["sequence"] for actual in pipeline(texts[0])[:2]]
    assert blank == ["", "", ""]
    (tmp_path / "texts.txt").write_text(f"{texts[1]}\n")
    fill_mask.main(["--run", str(run), "--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "a.jsonl")])
    (record,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [len(fill["tokens"]) for fill in record["fills"]] == [2] * 5
    with pytest.raises(UserError, match=r"text 1: the text has no mask: write \[MASK\] where a token is to be"):
        fill_mask.main(["--run", str(run), "the cat"])
    with pytest.raises(UserError, match="top=1000: must be from 1 to"):
        tj.load(run).fill_mask(texts, top=1000)


def test_a_masked_language_model_is_imported_as_a_classifier_on_demand(imported, tmp_path):
    folder, run, _ = imported("bert_masked_lm")
    import_hf.main([str(folder), "--run", str(tmp_path / "run"), "--family", "classifier"])
    actual, expected = tj.load(tmp_path / "run"), tj.load(run)
    assert actual.config.model.family == "classifier"
    np.testing.assert_array_equal(actual.embed(PROMPTS), expected.embed(PROMPTS))
    with pytest.raises(UserError, match=r"fill_mask: .* holds a classifier model; use classify"):
        actual.fill_mask(PROMPTS)
    with pytest.raises(UserError, match="model_type 'llama' is no masked_lm; bert, roberta, xlm-roberta, "):
        import_hf.main([str(imported("llama")[0]), "--run", str(tmp_path / "other"), "--family", "masked_lm"])


@pytest.mark.slow
def test_a_run_tuned_with_lora_is_exported_merged(imported, tmp_path):
    """transformers computes what the tuned run computes, and only kernels of layers differ from the original."""
    folder, run, model = imported("llama")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in checkpoints.TEXTS))
    cfg = tj.load(run).config
    cfg = dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, bucket_lengths=(16,), window=16, batch_size=4),
        optim=OptimConfig(schedule="constant", learning_rate=0.1, warmup_steps=1),
        train=TrainConfig(steps=2, lora_rank=2, start_from=str(run)),
        parallel=ParallelConfig(data=1),
        eval=EvalConfig(batch_size=4, examples=4, samples=0),
    )
    assert training.run(experiment.build(cfg, tmp_path / "tuned", data_root=tmp_path))
    export_hf.main(["--run", str(tmp_path / "tuned"), "--model-type", "llama", str(tmp_path / "out")])
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = their_tokenizer(folder)(PROMPTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = tuned(ids).logits[0].numpy()
        assert np.abs(expected - model(ids).logits[0].numpy()).max() > 1e-2
    assert_close(tj.load(tmp_path / "tuned").logits(PROMPTS[:1])[0], expected, 1e-5)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    changed = {name.split(".")[-2] for name, array in after.items() if not np.array_equal(array, before[name])}
    projections = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert changed == projections


@pytest.mark.parametrize("kind", checkpoints.MAKERS)
def test_the_export_is_equal(imported, kind, tmp_path):
    """Bit for bit in the arrays, and in the ids that transformers reads from the exported tokenizer."""
    folder, run, model = imported(kind)
    out = tmp_path / "missing" / "out"
    export_hf.main(["--run", str(run), str(out)])
    exported, original = (load_file(place / "model.safetensors") for place in (out, folder))
    back = type(model).from_pretrained(out).state_dict()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(back[name], array)
    assert exported.keys() <= original.keys() | {"lm_head.weight", "final_logits_bias"}
    theirs, ours = their_tokenizer(folder), their_tokenizer(out)
    for text in PROMPTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    config = json.loads((out / "config.json").read_text())
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if "bert" not in kind and getattr(model.config, name, None) is not None:
            assert config[name] == getattr(model.config, name)


def test_the_export_decodes_equally(imported, tmp_path):
    """By the settings of its generation_config.json: beams, lengths, and padding, which is never generated."""
    folder, run, model = imported("marian")
    export_hf.main(["--run", str(run), str(tmp_path / "out")])
    back = type(model).from_pretrained(tmp_path / "out")
    ids, pad = their_tokenizer(folder)(PROMPTS[:1], return_tensors="pt"), model.config.pad_token_id
    expected, actual = (each.generate(**ids, use_cache=False) for each in (model, back))
    assert actual.tolist() == expected.tolist()
    back.final_logits_bias[0, pad] = 50.0
    assert pad not in back.generate(**ids, use_cache=False)[0, 1:]


def test_an_encoder_without_a_head(tmp_path):
    """MiniLM: no head, no pooler and no prefix; it embeds, and does not classify."""
    model = checkpoints.bert(tmp_path)
    body = {
        name: a for name, a in load_file(tmp_path / "model.safetensors").items() if "encoder" in name or "emb" in name
    }
    save_file({name.removeprefix("bert."): array for name, array in body.items()}, tmp_path / "model.safetensors")
    run = tmp_path / "run"
    import_hf.main([str(tmp_path), "--run", str(run)])
    inputs = their_tokenizer(tmp_path)(PROMPTS[:1], return_tensors="pt")
    with torch.no_grad():
        expected = model.bert(**inputs).last_hidden_state.mean(1)
    loaded = tj.load(run)
    assert_close(loaded.embed(PROMPTS[:1]), expected.numpy(), 1e-5)
    with pytest.raises(UserError, match="has no labels.json: its classification head is not trained"):
        loaded.classify(PROMPTS)


def test_arrays_are_read_one_by_one_onto_a_mesh(imported, monkeypatch):
    """At most one array of the checkpoint is in memory besides the parameters, which are sharded."""
    folder, run, _ = imported("llama")
    references, alive = [], []

    class Array(np.ndarray):
        """An array that can be referenced weakly."""

    def read(reader):
        array = np.array(reader()).view(Array)
        references.append(weakref.ref(array))
        alive.append(sum(reference() is not None for reference in references))
        return array

    opened = files._open
    monkeypatch.setattr(files, "_open", lambda file: {name: lambda r=r: read(r) for name, r in opened(file).items()})
    _, params = hf.load(folder, mesh=make_mesh(read_mesh("tensor=2")))
    assert len(alive) > 10 and max(alive) <= 2
    expected = tj.load(run, mesh="tensor=2").params
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, expected)


def test_a_model_of_the_hub(imported, tmp_path, monkeypatch):
    """Only the files that are read are downloaded, and state dicts if there is no safetensors file."""
    folder, run, _ = imported("llama")
    published = ["model.safetensors", "config.json", "tokenizer.json", "README.md", "pytorch_model.bin"]
    published += ["onnx/config.json", "consolidated.safetensors", "vocab.txt", "source.spm", "tokenizer.model", "a.py"]
    published += ["chat_template.jinja", "modules.json", "onnx/model.safetensors", "original/tokenizer.model"]
    in_folders = ["1_Pooling/config.json", "2_Normalize/config.json", "additional_chat_templates/tool.jinja"]
    asked = []

    def snapshot_download(name, *, revision=None, **filters):
        chosen = huggingface_hub.utils.filter_repo_objects(published + in_folders, **filters)
        asked.append((name, revision, sorted(chosen)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    import_hf.main(["org/model-1.0", "--run", str(tmp_path / "run")])
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "modules.json", "source.spm"]
    wanted += ["tokenizer.json", "tokenizer.model", "vocab.txt"]
    assert asked == [("org/model-1.0", None, wanted), ("org/model-1.0", folder.name, in_folders)]
    jax.tree.map(np.testing.assert_array_equal, tj.load(tmp_path / "run").params, tj.load(run).params)
    assert json.loads((tmp_path / "run" / "imported.json").read_text())["checkpoint"] == "org/model-1.0"


def test_a_model_of_the_hub_without_safetensors(tmp_path, monkeypatch):
    published = [
        "config.json",
        "pytorch_model.bin",
        "onnx/pytorch_model.bin",
        "training_args.bin",
        "1_Pooling/config.json",
    ]
    asked = []

    def snapshot_download(name, *, revision=None, **filters):
        asked.append(sorted(huggingface_hub.utils.filter_repo_objects(published, **filters)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.download("org/model") == tmp_path
    assert asked == [["config.json"], ["1_Pooling/config.json", "pytorch_model.bin"]]


def test_a_tokenizer_of_a_checkpoint_surrounds_texts_in_training(imported):
    from tformer_jax.data.columns import Column
    from tformer_jax.data.features import FeatureConverter, tokenize

    pair = load_checkpoint_tokenizers(imported("t5")[0])
    block = tokenize([{"source": "the cat", "target": "a dog"}], pair)
    features = FeatureConverter(16, 16, source=pair.source.special, target=pair.target.special)(block)
    theirs = their_tokenizer(imported("t5")[0])
    source, target = theirs("the cat")["input_ids"], theirs("a dog")["input_ids"]
    assert features["source"].ids.tolist() == source
    assert features["target_out"].ids.tolist() == target
    assert features["target_in"].ids.tolist() == [0, *target[:-1]]  # their shift to the right
    llama = load_checkpoint_tokenizers(imported("llama")[0])
    block = tokenize([{"text": "the cat"}], llama)
    assert block["text"].ids.tolist() == their_tokenizer(imported("llama")[0])("the cat")["input_ids"]
    bert = load_checkpoint_tokenizers(imported("bert")[0])
    ids = bert.target.encode("the cat sat on the mat")
    cut = FeatureConverter(5, 5, target=bert.target.special)(
        {"text": Column.from_rows([ids]), "label": Column.from_rows([[0]])}
    )
    assert cut["tokens"].ids.tolist() == [2, *ids[:3], 3]
