"""T5Gemma, whose config.json has a config of each stack; `test_families` compares the published sizes of both."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close
from tests.parity import checkpoints
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, export_hf, import_hf, translate
from tformer_jax.cli.export_checks import logits
from tformer_jax.config import EvalConfig, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.interop import hf
from tformer_jax.interop.fields import Fields
from tformer_jax.models import registry
from tformer_jax.runs import experiment, training
from tformer_jax.serving.model import ServedModel

STACK = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
STACK |= {"max_position_embeddings": 32, "sliding_window": 32, "query_pre_attn_scalar": 9, "vocab_size": 55}


def config(depths=(2, 4), encoder=None, **fields) -> dict:
    """Returns the config that transformers writes, with other fields of the encoder or of the whole."""
    stacks = {
        stack: STACK | {"num_hidden_layers": depth} for stack, depth in zip(("encoder", "decoder"), depths, strict=True)
    }
    stacks["encoder"] |= encoder or {}
    theirs = transformers.T5GemmaConfig(**stacks, vocab_size=55, **fields)
    return json.loads(theirs.to_json_string(use_diff=False))


def make(folder: Path, **fields) -> torch.nn.Module:
    """Saves a random model, whose encoder and decoder have 2 and 4 layers, with a tokenizer."""
    checkpoints.llama(folder)
    ids = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}
    given = {name: value for name, value in config(**fields).items() if name != "model_type"}
    return checkpoints.save(folder, "T5GemmaForConditionalGeneration", given | ids, **ids)


def test_every_field_that_transformers_writes_is_read_or_declared():
    fields = Fields(config())
    settings = hf.ARCHITECTURES["t5gemma"].settings(fields)
    fields.check_all_read()
    assert (settings["encoder_layers"], settings["decoder_layers"], settings["window"]) == (2, 4, 32)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"encoder": {"intermediate_size": 13}}, "intermediate_size=13 of the encoder differs from 12 of the decoder"),
        ({"encoder": {"layer_types": ["full_attention"] * 2}}, "layer_types of the encoder and the decoder have"),
        ({"encoder": {"attn_logit_softcapping": None}}, "attn_logit_softcapping=None of the encoder differs from 50.0"),
    ],
)
def test_stacks_that_differ_in_more_than_their_depth_are_refused(changes, problem):
    with pytest.raises(UserError, match=problem):
        hf.ARCHITECTURES["t5gemma"].settings(Fields(config(**changes)))


def test_a_config_without_a_stack_is_refused():
    with pytest.raises(UserError, match="needs the fields encoder and decoder, one for each stack"):
        Fields({name: value for name, value in config().items() if name != "encoder"})


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_depths_that_differ_and_a_head_of_its_own(tied, tmp_path):
    model = make(tmp_path, tie_word_embeddings=tied)
    cfg, params = hf.load(tmp_path)
    assert (cfg.encoder_layers, cfg.decoder_layers, cfg.tie_embeddings) == (2, 4, "output" if tied else "none")
    hf.save(tmp_path / "out", "t5gemma", cfg, params)
    back = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(back.state_dict()[name], array)
    rows = np.random.default_rng(0).integers(1, 55, (2, 2, 9), np.int32)
    ours = registry.build(cfg).apply({"params": params}, rows[0], rows[1])
    with torch.no_grad():
        inputs = dict(zip(("input_ids", "decoder_input_ids"), torch.tensor(rows, dtype=torch.long), strict=True))
        assert_close(ours, back(**inputs).logits.numpy(), 1e-5)


@pytest.mark.slow
def test_tuning_translating_evaluating_and_exporting(tmp_path, capsys):
    """A source is BOS and its tokens, and a target its tokens and EOS after BOS, as Gemma's own."""
    model, folder, run = make(tmp_path / "theirs"), tmp_path / "theirs", tmp_path / "run"
    import_hf.main([str(folder), "--run", str(run)])
    loaded = tj.load(run)
    row = loaded._inputs(0, ("the cat", "a dog"))
    ids = {text: loaded.tokenizers.source.encode(text) for text in ("the cat", "a dog")}
    assert row == {"source": [1, *ids["the cat"]], "target_in": [1, *ids["a dog"]]}
    served = ServedModel.build(loaded.config, loaded.model, loaded.params, loaded.tokenizers)
    for text in ("the cat", tuple(row["source"])):
        assert served._ids("input", text, ()) == tuple(row["source"])
    rows = [{"source": text, "target": text[::-1]} for text in checkpoints.TEXTS[:4]]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    cfg = dataclasses.replace(
        loaded.config,
        data=dataclasses.replace(loaded.config.data, bucket_lengths=(32,), batch_tokens=256),
        optim=OptimConfig(schedule="constant", learning_rate=0.1, warmup_steps=1),
        train=TrainConfig(steps=2, start_from=str(run), metric="loss"),
        parallel=ParallelConfig(data=1),
        eval=EvalConfig(batch_size=4, examples=4, samples=0),
    )
    read = experiment.build(cfg, tmp_path / "read", data_root=tmp_path)
    batch = {name: np.asarray(array)[0].tolist() for name, array in next(iter(read.batches)).items()}
    read.close()
    end = batch["target_out"].index(2)
    assert batch["source"][0] == 1 and batch["target_in"][: end + 1] == [1, *batch["target_out"][:end]]
    assert not {1, 2} & {*batch["source"][1:], *batch["target_out"][:end]}
    assert training.run(experiment.build(cfg, tmp_path / "tuned", data_root=tmp_path))
    capsys.readouterr()
    flags = ["--run", str(tmp_path / "tuned"), "--max-new-tokens", "4"]
    translate.main([*flags, "--strategy", "greedy", "the cat"])
    tuned = tj.load(tmp_path / "tuned")
    printed = capsys.readouterr().out.splitlines()[0]
    assert [printed] == tuned.translate(["the cat"], strategy="greedy", max_new_tokens=4)
    evaluate.main([*flags, "--data", str(tmp_path), "--split", "validation"])
    export_hf.main(["--run", str(tmp_path / "tuned"), str(tmp_path / "out")])
    back = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert back.config.decoder.bos_token_id == 1
    with torch.no_grad():
        inputs = {"input_ids": row["source"], "decoder_input_ids": row["target_in"]}
        theirs = back(**{name: torch.tensor([value]) for name, value in inputs.items()}).logits.numpy()
    assert_close(logits(tuned, {name: np.array([value], np.int32) for name, value in row.items()}), theirs, 1e-5)
