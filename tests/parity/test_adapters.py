"""Adapters of PEFT, merged on import or written from runs with LoRA, give the logits of PEFT."""

import contextlib
import dataclasses
import json
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import checkpoints
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf, import_hf, vocabulary
from tformer_jax.interop import hf
from tformer_jax.interop.files import read_adapter, read_arrays
from tformer_jax.models import registry
from tformer_jax.runs import experiment, initial_state, training, weights
from tformer_jax.train import parameters

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""PEFT 0.21 reads it of models of transformers 5."""
TOKENS = np.arange(12).reshape(2, 6) + 3
LORA = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
CASES = {
    "llama": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 9},
        "modules_to_save": ["lm_head"],
    },
    "llama, head": {"target_modules": ["v_proj", "lm_head"], "task_type": "CAUSAL_LM"},
    "gpt2": {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True},
}


def save_adapter(model, folder, std=0.4, **options) -> torch.nn.Module:
    """Saves a random adapter of a model, and returns the model with it."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA | options))
    for name, parameter in adapted.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=std)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("kind", rest_slow([*CASES], 1))
def test_logits_are_those_of_peft(kind, imported, tmp_path):
    folder, _, model = imported(kind.partition(",")[0])
    model = type(model).from_pretrained(folder)
    before = model(torch.tensor(TOKENS)).logits.detach().numpy()
    adapted = save_adapter(model, tmp_path / "adapter", **CASES[kind])
    import_hf.main([str(folder), "--run", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")])
    run = tj.load(tmp_path / "run")
    expected = adapted(torch.tensor(TOKENS)).logits.detach().numpy()
    assert np.abs(expected - before).max() > 0.1
    assert_close(run.model.apply({"params": run.params}, jnp.asarray(TOKENS)), expected, 1e-4)
    origin = json.loads((tmp_path / "run" / "imported.json").read_text())
    assert origin["adapter"] == str(tmp_path / "adapter") and "adapter/adapter_model.safetensors" in origin["sha256"]


@pytest.mark.parametrize("beside", ["its base", "a backup", "a head for values", "a backup, in a file of PyTorch"])
def test_an_adapter_is_read_from_its_own_file(beside, imported, tmp_path):
    """Regression test: without a word, the base was read instead of an adapter beside it; backups were read as well."""
    folder, _, model = imported("llama")
    save_adapter(type(model).from_pretrained(folder), tmp_path, target_modules=["q_proj"])
    arrays = {name: np.asarray(array) for name, array in read_adapter(tmp_path).items()}
    others = {"its base": dict(read_arrays(folder)), "a head for values": {"v_head.weight": np.ones((1, 8), "f4")}}
    written = others.get(beside, {name: 0 * array for name, array in arrays.items()})
    name = "model.safetensors" if beside == "its base" else "adapter_model_old.safetensors"
    safetensors.numpy.save_file(written, tmp_path / name)
    if "PyTorch" in beside:
        (tmp_path / "adapter_model.safetensors").unlink()
        torch.save({name: torch.tensor(array) for name, array in arrays.items()}, tmp_path / "adapter_model.bin")
    cfg, params = hf.load(folder, adapter=tmp_path)
    theirs = peft.PeftModel.from_pretrained(type(model).from_pretrained(folder), tmp_path).eval()
    expected = theirs(torch.tensor(TOKENS)).logits.detach().numpy()
    assert_close(registry.build(cfg).apply({"params": params}, jnp.asarray(TOKENS)), expected, 1e-4)


def test_an_adapter_beside_its_base_is_not_called_unread(imported, tmp_path, capsys):
    folder, _, model = imported("llama")
    folder, run = shutil.copytree(folder, tmp_path / "base"), str(tmp_path / "run")
    save_adapter(type(model).from_pretrained(folder), folder, target_modules=["q_proj"])
    for flags, said in (([], True), (["--adapter", str(folder)], False)):
        import_hf.main([str(folder), "--run", run, "--overwrite", *flags])
        assert ("not read: adapter_model.safetensors" in capsys.readouterr().err) == said


def test_the_orientation_of_matrices_is_that_of_the_base(imported, tmp_path):
    """Regression test: PEFT, too, ignores `fan_in_fan_out`, which decided about square matrices here."""
    folder, _, model = imported("gpt2")
    adapted = save_adapter(type(model).from_pretrained(folder), tmp_path, target_modules=["attn.c_proj"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": False}))
    cfg, params = hf.load(folder, adapter=tmp_path)
    expected = adapted(torch.tensor(TOKENS)).logits.detach().numpy()
    actual = registry.build(cfg).apply({"params": params}, jnp.asarray(TOKENS))
    assert_close(actual, expected, 1e-4)


def test_patterns_are_those_of_the_model_that_was_adapted(imported, tmp_path):
    """Regression test: the names of a base model had the prefix of the whole model."""
    folder, _, _ = imported("bert")
    model = transformers.AutoModel.from_pretrained(folder)
    options = {"target_modules": ["query"], "alpha_pattern": {"^encoder.layer.0.attention.self.query": 20}}
    save_adapter(model, tmp_path, **options)
    factors = {name: np.float64(each) for name, each in read_adapter(tmp_path).items() if "layer.0." in name}
    a, b = (next(each for name, each in factors.items() if f"lora_{side}" in name) for side in "AB")
    plain, changed = (hf.load(folder, adapter=adapter)[1] for adapter in (None, tmp_path))
    before, after = (tree["encoder"]["layers_0"]["self_attention"]["query"]["kernel"] for tree in (plain, changed))
    expected = np.float64(before) + (20 / 3 * (b @ a).T).reshape(before.shape)
    assert_close(after, expected, 1e-5)


def test_an_adapter_of_an_embedding_is_refused(imported, tmp_path):
    folder, _, model = imported("llama")
    save_adapter(type(model).from_pretrained(folder), tmp_path, target_modules=["embed_tokens"])
    with pytest.raises(UserError, match="adapts the embedding model.embed_tokens: not supported"):
        hf.load(folder, adapter=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported, only 'LORA' is"),
    ],
)
def test_other_adapters_are_refused(options, message, imported, tmp_path):
    folder, _, _ = imported("llama")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2} | options))
    with pytest.raises(UserError, match=message):
        hf.load(folder, adapter=tmp_path)
    with pytest.raises(UserError, match="is an adapter of PEFT: name the checkpoint of its base, and add --adapter"):
        hf.load(tmp_path)


def test_an_adapter_of_another_model_or_of_a_tied_embedding_is_refused(imported, tmp_path):
    llama, gpt2 = (imported(kind)[0] for kind in ("llama", "gpt2"))
    model = type(imported("gpt2")[2]).from_pretrained(gpt2)
    save_adapter(model, tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(UserError, match=r"the checkpoint has no array transformer.h.0.attn.c_attn.weight"):
        hf.load(llama, adapter=tmp_path)
    model = type(imported("gpt2")[2]).from_pretrained(gpt2)
    save_adapter(model, tmp_path / "tied", target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte"])
    with pytest.raises(UserError, match=r"changes transformer.wte.weight, but the embedding is also the output"):
        hf.load(gpt2, adapter=tmp_path / "tied")


def test_an_adapter_of_a_tied_output_head_is_refused(tmp_path):
    """Regression test: the message was that the checkpoint lacks the head, so that they do not fit together."""
    sizes = {**checkpoints.SIZES, "vocab_size": 64, "tie_word_embeddings": True}
    model = checkpoints.save(tmp_path, "LlamaForCausalLM", sizes)
    save_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(UserError, match="changes lm_head.weight, but the embedding is also the output head"):
        hf.load(tmp_path, adapter=tmp_path / "adapter")


DAMAGED = {
    "no factors": ({}, {}, "has no factors of LoRA"),
    "ranks": ({}, {"A": (2, 16), "B": (16, 3)}, r"have the shapes \(2, 16\) and \(16, 3\), which do not fit"),
    "alpha": (
        {"lora_alpha": "8"},
        {"A": (2, 16), "B": (16, 2)},
        "lora_alpha='8' and alpha_pattern={} must be a number",
    ),
    "pattern": ({"alpha_pattern": {"(": 1}}, {"A": (2, 16), "B": (16, 2)}, "must be a number, and numbers by regular"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_adapters_are_refused(name, imported, tmp_path):
    options, shapes, message = DAMAGED[name]
    config = {"peft_type": "LORA", "lora_alpha": 2} | options
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    arrays = {f"{module}.lora_{side}.weight": np.ones(shape, np.float32) for side, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        hf.load(imported("llama")[0], adapter=tmp_path)


LABELED = {"source": "tsv", "train": "labels.tsv", "bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
PAIR = {"source": "tsv", "train": "pairs.tsv", "bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
TEXT = {"source": "text", "train": "text.txt", "batching": "windows", "window": 8, "batch_size": 2}


def tuned(start, folder, **train):
    """Returns the folder of a run with random factors, which starts from the run of an imported checkpoint."""
    (folder / "text.txt").write_text("the cat sat on the mat " * 20)
    (folder / "pairs.tsv").write_text("the cat\tthe dog\na log\ta mat\nthe dog\ta cat\n" * 5)
    (folder / "labels.tsv").write_text("good\tthe cat\nbad\tthe dog\nneither\ta mat\n" * 5)
    cfg = config.load(start / "config.json")
    data = TEXT if cfg.model.model_class.continues else LABELED if cfg.model.model_class.classifies else PAIR
    cfg = dataclasses.replace(
        cfg,
        data=config.DataConfig(tokenizer="file", tokenizer_file=str(start), **data),
        train=config.TrainConfig(steps=1, start_from=str(start), lora_rank=2, lora_alpha=6.0, **train),
        parallel=config.ParallelConfig(data=1),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(initial_state, "compiling", lambda *_: contextlib.nullcontext()))
        built = stack.enter_context(contextlib.closing(experiment.build(cfg, folder / "run", data_root=folder)))
        started = stack.enter_context(contextlib.closing(training.Training(built)))
        state, keys = started.trainer.state, iter(jax.random.split(jax.random.key(3), 99))
        drawn = jax.tree.map(
            lambda x: x + 0.4 * jax.random.normal(next(keys), x.shape), parameters.trainable(state.params)
        )
        started.trainer.state = state = state.replace(params=parameters.with_trainable(state.params, drawn))
        started.save()
        weights.save(folder / "run", weights.to_evaluate(built.cfg, state), "last", [0], 0)
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("change", rest_slow(["another vocabulary", "an adapter", "trained weights"], 1))
def test_an_adapter_of_a_changed_base_needs_its_name(change, imported, tmp_path):
    """Regression test: it was written for the checkpoint before the change."""
    folder, start, model = imported("llama")
    if change == "an adapter":
        save_adapter(type(model).from_pretrained(folder), tmp_path / "adapter", target_modules=["q_proj"])
        import_hf.main([str(folder), "--run", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter")])
    elif change == "trained weights":
        (tmp_path / "first").mkdir()
        tuned(start, tmp_path / "first").rename(tmp_path / "base")
    else:
        vocabulary.main(["extend", str(start), "--symbols", "<br>", "--output", str(tmp_path / "base")])
    run = tuned(tmp_path / "base", tmp_path)
    with pytest.raises(UserError, match=f"base is .* with {change}: export it, and name it by --base"):
        export_hf.main(["--run", str(run), str(tmp_path / "out"), "--format", "peft", "--no-check"])
    with pytest.raises(UserError, match=f"the base {folder} must be the checkpoint or an export of .*base, from which"):
        export_hf.main(["--run", str(run), str(tmp_path / "out"), "--format", "peft", "--base", str(folder)])
    export_hf.main(["--run", str(tmp_path / "base"), str(tmp_path / "exported"), "--no-check"])
    export_hf.main(["--run", str(run), str(tmp_path / "out"), "--format", "peft", "--base", str(tmp_path / "exported")])


WRITTEN = {
    "llama": (
        {"lora_kernels": ("*attention/query/*", "*ffn/*"), "lora_whole": ("head/*", "*norm*/scale")},
        ["lm_head"],
    ),
    "gpt2": ({"lora_kernels": ("*attention/*",)}, []),
    "marian": ({}, []),
    "t5": ({"lora_kernels": ("decoder/*",)}, []),
    "bert": ({"lora_kernels": ("encoder/*",)}, []),
}


@pytest.mark.parametrize("kind", rest_slow([*WRITTEN], 1))
def test_the_adapter_of_a_run_gives_its_logits_in_peft(kind, imported, tmp_path, capsys):
    train, whole = WRITTEN[kind]
    folder, start, model = imported(kind)
    out = tmp_path / "adapter"
    run = tuned(start, tmp_path, **train)
    export_hf.main(["--run", str(run), str(out), "--format", "peft"])
    assert "checked with PEFT " in capsys.readouterr().out
    written = json.loads((out / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (2, 6.0) and set(whole) <= set(written["modules_to_save"] or ())
    loaded = tj.load(run)
    base = type(model).from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, out).eval()
    inputs = {"input_ids": torch.tensor(TOKENS)}
    ours = {loaded.model.inputs[0]: jnp.asarray(TOKENS)}
    if loaded.config.model.family == "seq2seq":
        inputs["decoder_input_ids"], ours["target_in"] = torch.tensor(TOKENS), jnp.asarray(TOKENS)
    expected = np.asarray(loaded.model.apply({"params": loaded.params}, **loaded.model.arguments(ours)))
    assert_close(theirs(**inputs).logits.detach().numpy(), expected, 1e-4)
    with theirs.disable_adapter():
        assert np.abs(theirs(**inputs).logits.detach().numpy() - expected).max() > 0.1
    import_hf.main([str(folder), "--run", str(tmp_path / "again"), "--adapter", str(out)])
    again = tj.load(tmp_path / "again").params
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), again, loaded.params)


def test_runs_without_an_adapter_are_refused(imported, tmp_path):
    start = imported("llama")[1]
    (tmp_path / "int8").mkdir()
    refused = {
        "lora_base='int8' rounded the kernels of the base": (tuned(start, tmp_path / "int8", lora_base="int8"), ()),
        "has no adapter: it was trained without train.lora_rank": (start, ()),
        "PEFT has no adapter like this one: it has no factors": (
            tuned(start, tmp_path, lora_kernels=(), lora_whole=("head/*",)),
            ("--base", str(imported("llama")[0])),
        ),
    }
    for message, (run, flags) in refused.items():
        with pytest.raises(UserError, match=message):
            export_hf.main(["--run", str(run), str(tmp_path / "out"), "--format", "peft", *flags])
    with pytest.raises(UserError, match="--base is for --format peft: add it, or leave --base out"):
        export_hf.main(["--run", str(start), str(tmp_path / "out"), "--base", "x"])
    assert not (tmp_path / "out").exists()


def test_small_changes_of_a_base_of_bfloat16(imported, tmp_path, capsys):
    """Regression test: most of them were lost, because the sum was rounded to bfloat16."""
    source, _, model = imported("llama")
    folder = shutil.copytree(source, tmp_path / "base")
    model = type(model).from_pretrained(source).to(torch.bfloat16)
    model.save_pretrained(folder)
    adapted = save_adapter(model.float(), tmp_path / "adapter", std=1e-2, target_modules=["q_proj", "v_proj"])
    import_hf.main([str(folder), "--run", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")])
    assert "the parameters are float32: in bfloat16" in capsys.readouterr().err
    run = tj.load(tmp_path / "run")
    with adapted.disable_adapter():
        before = adapted(torch.tensor(TOKENS)).logits.detach().numpy()
    change = adapted(torch.tensor(TOKENS)).logits.detach().numpy() - before
    actual = np.asarray(run.model.apply({"params": run.params}, jnp.asarray(TOKENS))) - before
    assert np.abs(actual - change).max() < 0.02 * np.abs(change).max()


def test_a_classifier_of_a_base_without_a_head(tmp_path):
    """Its labels are those of the head in the adapter, whose number config.json of the base need not have."""
    (tmp_path / "base").mkdir()
    base = checkpoints.bert(tmp_path / "base").bert
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "base" / name).unlink()
    base.config.id2label = base.config.label2id = None
    base.save_pretrained(tmp_path / "base")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=4).eval()
    adapted = save_adapter(model, tmp_path / "adapter", task_type="SEQ_CLS", target_modules=["query", "value"])
    flags = ["--adapter", str(tmp_path / "adapter"), "--family", "classifier", "--run", str(tmp_path / "run")]
    import_hf.main([str(tmp_path / "base"), *flags])
    run, tokens = tj.load(tmp_path / "run"), np.array([[2, 7, 9, 3]])
    assert run.labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")
    expected = adapted(torch.tensor(tokens)).logits.detach().numpy()
    assert_close(run.model.apply({"params": run.params}, jnp.asarray(tokens)), expected, 1e-4)


def test_an_adapter_of_a_classifier_with_a_layer_before_its_head(tmp_path):
    """Regression test: `pre_classifier`, which PEFT saves with the head, was asked of a base for masked tokens."""
    (tmp_path / "base").mkdir()
    size = checkpoints.word_pieces(tmp_path / "base")["vocab_size"]
    sizes = {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32, "pad_token_id": 1}
    checkpoints.save(tmp_path / "base", "DistilBertForMaskedLM", {"vocab_size": size, **sizes})
    model = transformers.DistilBertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3).eval()
    adapted = save_adapter(model, tmp_path / "adapter", task_type="SEQ_CLS", target_modules=["q_lin", "v_lin"])
    flags = ["--adapter", str(tmp_path / "adapter"), "--family", "classifier", "--run", str(tmp_path / "run")]
    import_hf.main([str(tmp_path / "base"), *flags])
    run, tokens = tj.load(tmp_path / "run"), np.array([[2, 7, 9, 3]])
    expected = adapted(torch.tensor(tokens)).logits.detach().numpy()
    assert_close(run.model.apply({"params": run.params}, jnp.asarray(tokens)), expected, 1e-4)


@pytest.mark.parametrize("kind", rest_slow(["Bert", "Roberta"], 1))
def test_an_adapter_with_all_biases_of_a_classifier(kind, tmp_path):
    """Regression test: PEFT writes biases of the head also by the names of its wrapper, which were refused."""
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    folder.mkdir()
    sizes = checkpoints.word_pieces(folder) | {"num_labels": 3}
    model = type(checkpoints.save(folder, f"{kind}ForSequenceClassification", sizes))
    options = {"task_type": "SEQ_CLS", "target_modules": ["query"], "bias": "all"}
    adapted = save_adapter(model.from_pretrained(folder), adapter, **options)
    for name, bias in adapted.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias)
    adapted.save_pretrained(adapter)
    path = adapter / "adapter_model.safetensors"
    arrays = {name: array + ("modules_to_save" in name) for name, array in safetensors.numpy.load_file(path).items()}
    safetensors.numpy.save_file(arrays, path)
    theirs, tokens = peft.PeftModel.from_pretrained(model.from_pretrained(folder), adapter), np.array([[2, 7, 9, 3]])
    cfg, params = hf.load(folder, family="classifier", adapter=adapter)
    expected = theirs.eval()(torch.tensor(tokens)).logits.detach().numpy()
    assert any("original_module" in name for name in arrays)
    assert_close(registry.build(cfg).apply({"params": params}, jnp.asarray(tokens)), expected, 1e-4)


def test_an_adapter_of_a_base_model_has_names_without_its_prefix(tmp_path):
    """Regression test: adapters of embedders, which PEFT wraps around `AutoModel`, were refused."""
    (tmp_path / "base").mkdir()
    base = checkpoints.llama(tmp_path / "base").model
    adapted = save_adapter(base, tmp_path / "adapter", task_type="FEATURE_EXTRACTION", target_modules=["q_proj"])
    flags = ["--adapter", str(tmp_path / "adapter"), "--run", str(tmp_path / "run")]
    import_hf.main([str(tmp_path / "base"), *flags])
    run = tj.load(tmp_path / "run")
    expected = adapted(torch.tensor(TOKENS)).last_hidden_state.detach().numpy()
    actual = run.model.apply({"params": run.params}, jnp.asarray(TOKENS), method="features")
    assert_close(actual, expected, 1e-4)
