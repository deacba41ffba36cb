"""The initial parameters of fine-tuning: those of another run that match."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from tests.helpers import apply, assert_close, load_into, randomized, rest_slow
from tests.runs.conftest import small_config
from tests.runs.test_weights import run
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig, ParallelConfig
from tformer_jax.data.tokenizers import FIRST, Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.models import conversions, registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.parallel.multihost import ProcessGroup
from tformer_jax.runs import experiment, start_from, training
from tformer_jax.runs.trained import load_trained
from tformer_jax.train import optimizers

pytestmark = pytest.mark.usefixtures("compiled_by_the_first_step")

UNTIED = {"tie_embeddings": "none"}


def wider(cfg: Config) -> Config:
    return dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, ffn_dim=24, decoder_layers=2, output_bias=True)
    )


@pytest.mark.long
def test_matching_parameters_of_another_run_are_loaded(first, corpus_folder, tmp_path):
    loaded = load_trained(first).params
    built = experiment.build(wider(small_config()), tmp_path / "second", data_root=corpus_folder)
    fresh = randomized(registry.shapes(built.model))
    params, report = load_into(fresh, built.cfg.model, first)
    built.close()
    same = params["decoder"]["layers_0"]["self_attention"], loaded["decoder"]["layers_0"]["self_attention"]
    jax.tree.map(np.testing.assert_array_equal, *same)
    assert "decoder/layers_0/ffn/expand/kernel (16, 16), not (16, 24)" in report.other_shape
    assert "head/bias" in report.missing
    assert any(name.startswith("decoder/layers_1/") for name in report.missing)
    assert not report.unused
    kernel = params["decoder"]["layers_0"]["ffn"]["expand"]["kernel"]
    np.testing.assert_array_equal(kernel, fresh["decoder"]["layers_0"]["ffn"]["expand"]["kernel"])


LAYOUTS = [UNTIED, {"scan_layers": True}, {"attention_projections": "fused_qkv"}]


@pytest.mark.long
@pytest.mark.parametrize("layout", rest_slow(LAYOUTS, 1))
def test_parameters_in_another_layout_are_converted(first, layout):
    """The logits are those of the other run; regression test: such parameters were newly initialized."""
    other = load_trained(first)
    cfg = dataclasses.replace(other.model.cfg, **layout)
    model = registry.build(cfg)
    fresh = randomized(registry.shapes(model))
    params, report = load_into(fresh, cfg, first)
    assert not report.new and (layout is UNTIED or not report.unused)
    tokens = np.array([[5, 6, 7]], np.int32)
    assert_close(apply(model, params, tokens, tokens), apply(other.model, other.params, tokens, tokens), 1e-6)
    start_from.check(small_config().train, cfg, other.tokenizers, first)


@pytest.mark.slow
def test_layers_of_a_scan_correspond_to_those_of_a_loop_by_number(first):
    """Regression test: with another depth, no layer of a scan was loaded, or the first one into the last."""
    other = load_trained(first)
    cfg = dataclasses.replace(
        other.model.cfg, scan_layers=True, decoder_layers=3, layer_pattern=("full", "window"), window=4
    )
    model, mesh = registry.build(cfg), make_mesh(ParallelConfig(data=1, fsdp=2), jax.devices()[:2])
    where = jax.tree.map(lambda leaf: leaf.sharding, registry.sharded_shapes(model, mesh))
    fresh = jax.device_put(randomized(registry.shapes(model)), where)
    params, report = load_into(fresh, cfg, first)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == where
    assert {name.split("/")[1] for name in report.missing if name.startswith("decoder/")} == {"layers_1", "layers_2"}
    stack, loaded, random = (tree["decoder"] for tree in (params, other.params, fresh))
    for actual, expected in (
        (jax.tree.map(lambda leaf: leaf[0], stack["periods"]["layers_0"]), loaded["layers_0"]),
        (stack["periods"]["layers_1"], random["periods"]["layers_1"]),
        (stack["layers_2"], random["layers_2"]),
    ):
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    with pytest.raises(UserError, match="must include 'decoder/layers_1/.*LoRA would keep their random values"):
        start_from.check(small_config(lora_rank=2, start_from=str(first)).train, cfg, other.tokenizers, first)


@pytest.mark.slow
def test_new_parameters_are_those_of_a_run_that_starts_from_none():
    cfg = small_config().model
    model = registry.build(dataclasses.replace(cfg, vocab_size=9, source_vocab_size=9, scan_layers=True))
    mesh = make_mesh(ParallelConfig(data=1, fsdp=2), jax.devices()[:2])
    names = ("decoder/layers_0/ffn/expand/kernel", "target_embedding/embedding")
    drawn = start_from.initial_params(model, 3, mesh, names)
    every = jax.jit(lambda: nn.unbox(registry.init(model, jax.random.key(3))))()
    expected = flatten_dict(conversions.unrolled(model.cfg, every)[1], sep="/")
    jax.tree.map(np.testing.assert_array_equal, drawn, {name: expected[name] for name in names})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The config of a classifier, and the folder of a run of it with the classes a and b."""
    folder = tmp_path_factory.mktemp("classes")
    for name in ("ab", "bc"):
        (folder / f"{name}.tsv").write_text("".join(f"{name[n % 2]}\tword{n % 7}\n" for n in range(40)))
    base = small_config(steps=1)
    model = ModelConfig(family="classifier", dim=16, encoder_layers=1, num_heads=2, ffn_dim=16, max_length=16)
    cfg = dataclasses.replace(base, model=model, data=dataclasses.replace(base.data, train="ab.tsv"))
    built = experiment.build(cfg, folder / "run", data_root=folder)
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        started.save()
    return cfg, folder / "run"


@pytest.mark.parametrize(("words", "new"), [("ab", set()), ("bc", {"head/bias", "head/kernel"})])
def test_a_head_of_other_classes_is_not_loaded(classifier, tmp_path, words, new):
    """Regression test: it was, without a word, and LoRA froze it."""
    cfg, run = classifier
    data = dataclasses.replace(cfg.data, train=f"{words}.tsv")
    built = experiment.build(dataclasses.replace(cfg, data=data), tmp_path / "run", data_root=run.parent)
    built.close()
    fresh = randomized(registry.shapes(built.model))
    _, report = load_into(fresh, built.cfg.model, run, labels=built.corpus.labels)
    assert set(report.new) == new
    train = dataclasses.replace(cfg.train, lora_rank=2, start_from=str(run))
    arguments = train, built.cfg.model, built.tokenizers, run
    if not new:
        return
    with pytest.raises(UserError, match="lora_whole=.*: must include 'head/bias', 'head/kernel': not found in"):
        start_from.check(*arguments, labels=built.corpus.labels)


def test_the_rows_of_classes_that_both_know_are_loaded(classifier):
    run = classifier[1]
    other = load_trained(run)
    model = dataclasses.replace(other.model.cfg, num_classes=3)
    fresh = randomized(registry.shapes(registry.build(model)))
    labels = ("c", "b", "d")
    params, report = load_into(fresh, model, run, labels=labels, tokenizers=other.tokenizers)
    assert set(report.rows) == {f"head/{name}: 1 of 2 rows kept, 2 new" for name in ("bias", "kernel")}
    for name in ("bias", "kernel"):
        expected = np.array(fresh["head"][name])
        expected[..., 1] = other.params["head"][name][..., 1]
        np.testing.assert_array_equal(params["head"][name], expected)


def with_letters(other, letters: str) -> tuple[Tokenizers, ModelConfig]:
    """Returns tokenizers of the pieces of a run's tokenizers and `letters`, in another order, and a padded model."""
    source, target = (
        CharacterTokenizer([*letters, *reversed(side.pieces)])
        for side in (other.tokenizers.source, other.tokenizers.target)
    )
    sizes = {"vocab_size": target.vocab_size + 2, "source_vocab_size": source.vocab_size + 2}
    return Tokenizers(source, target), dataclasses.replace(other.model.cfg, **sizes)


SPLIT = [("none", {"tensor": 2}), ("output", {"fsdp": 2}), ("none", {}), ("none", {"fsdp": 2})]


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow([*SPLIT, ("output", {}), ("output", {"tensor": 2})], 2))
def test_the_rows_of_tokens_that_both_know_are_loaded(first, case):
    """Regression test: a larger vocabulary lost all embeddings."""
    tied, mesh = case
    other = load_trained(first)
    tokenizers, model = with_letters(other, "éß")
    model = dataclasses.replace(model, tie_embeddings=tied, output_bias=True)
    built = registry.build(model)
    fresh = randomized(registry.shapes(built))
    devices = jax.devices()[: 2 if mesh else 1]
    where = registry.sharded_shapes(built, make_mesh(ParallelConfig(data=1, **mesh), devices))
    fresh = jax.device_put(fresh, jax.tree.map(lambda leaf: leaf.sharding, where))
    params, report = load_into(fresh, model, first, tokenizers=tokenizers)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == jax.tree.map(lambda leaf: leaf.sharding, fresh)
    tables = {"source_embedding/embedding": ("source", 0), "target_embedding/embedding": ("target", 0)}
    tables |= {"head/kernel": ("target", 1)} if tied == "none" else {}
    for path, (side, axis) in tables.items():
        module, leaf = path.split("/")
        there = getattr(other.tokenizers, side)
        rows = {there.decode([i]): i for i in range(FIRST, there.vocab_size)}
        table = other.params["target_embedding"]["embedding"].T if axis else other.params[module][leaf]
        arrays = params[module][leaf], fresh[module][leaf], table
        new, random, old = (np.moveaxis(np.array(x), axis, 0) for x in arrays)
        for i in range(len(new)):
            text = getattr(tokenizers, side).decode([i])
            expected = old[i] if i < FIRST else old[rows[text]] if text in rows else random[i]
            np.testing.assert_array_equal(new[i], expected)
        assert f"{path}: {len(rows) + FIRST} of {len(rows) + FIRST} rows kept, 4 new" in report.rows
    assert "loaded by row: " in str(report) and not report.other_shape
    assert start_from.check_tokenizers(small_config().train, model, tokenizers, first) is None
    train = small_config(lora_rank=2, start_from=str(first)).train
    with pytest.raises(UserError, match="must include .*'source_embedding/embedding'.*LoRA would keep"):
        start_from.check(train, model, tokenizers, first)


def test_lost_tokens_are_reported_for_vocabularies_of_another_size(first):
    """Regression test: embeddings of another shape were new without a word about the tokenizer."""
    other = load_trained(first)
    few = CharacterTokenizer("abcx")
    model = dataclasses.replace(other.model.cfg, vocab_size=few.vocab_size, source_vocab_size=few.vocab_size)
    warning = start_from.check_tokenizers(small_config().train, model, Tokenizers(few, few), first)
    assert warning.startswith("source_embedding/embedding, target_embedding/embedding of ")
    assert warning.endswith(f"set data.tokenizer='file' and data.tokenizer_file={str(first)!r}")


class OtherFails(ProcessGroup):
    """A group in which another process cannot read its shards."""

    def run(self, action):
        action()
        raise UserError("process 1 (host b): checkpoints/1 is damaged")


@pytest.mark.long
def test_all_processes_load_the_same_checkpoint_of_another_run(first, tmp_path):
    other = Path(shutil.copytree(first, tmp_path / "other"))
    (other / "weights.json").unlink()
    trained = load_trained(other)
    with pytest.raises(UserError, match="process 1 .host b.: checkpoints/1 is damaged"):
        load_into(trained.params, trained.model.cfg, other, OtherFails())


@pytest.mark.slow
def test_fine_tuning_starts_from_loaded_parameters_and_reports_them(first, corpus_folder, tmp_path, capsys):
    tuned = small_config(steps=1, start_from=str(first), ema_decay=0.9)
    tuned = dataclasses.replace(tuned, optim=dataclasses.replace(tuned.optim, learning_rate=0.0))
    run(tuned, tmp_path / "second", corpus_folder)
    jax.tree.map(np.testing.assert_array_equal, load_trained(tmp_path / "second").params, load_trained(first).params)
    assert "parameters loaded" in capsys.readouterr().out
    report = json.loads((tmp_path / "second" / "start_from.json").read_text())
    assert report["loaded"]
    assert report["missing"] == report["unused"] == report["other_shape"] == []


def test_settings_that_change_the_meaning_of_loaded_parameters_are_reported(first):
    cfg, tokenizers = config.load(first / "config.json"), Tokenizers.load(first / "tokenizers")
    free = dataclasses.replace(cfg.model, dropout=0.5, dtype="bfloat16", max_length=12)
    other = dataclasses.replace(free, norm_unit_offset=True, activation="gelu")
    assert start_from.find_mismatches(cfg.train, free, tokenizers, first) == []
    assert start_from.find_mismatches(cfg.train, other, tokenizers, first) == [
        "the loaded parameters were trained with other settings: model.activation ('relu' there, 'gelu' here), "
        "model.norm_unit_offset (False there, True here)"
    ]


@pytest.mark.long
def test_the_optimizer_starts_from_the_loaded_parameters(first, corpus_folder, tmp_path):
    """The averages of a schedule-free optimizer and the EMA start from the loaded parameters, too."""
    loaded = load_trained(first).params
    cfg = small_config(start_from=str(first), ema_decay=0.9)
    free = dataclasses.replace(cfg, seed=3, optim=dataclasses.replace(cfg.optim, optimizer="schedule_free_adamw"))
    built = experiment.build(free, tmp_path / "second", data_root=corpus_folder)
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        initial = started.trainer.state
        jax.tree.map(np.testing.assert_array_equal, initial.params, loaded)
        jax.tree.map(np.testing.assert_array_equal, initial.ema, loaded)
        averages = jax.jit(optimizers.evaluation_params)(initial.opt_state, initial.params)
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), averages, loaded)


def test_starting_from_a_folder_without_a_run(corpus_folder, tmp_path):
    with pytest.raises(UserError, match="train.start_from=.*nowhere'.* is not the folder of a trained run"):
        cfg = small_config(start_from=str(tmp_path / "nowhere"))
        experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_to_start_from_replace_no_run(first, corpus_folder, tmp_path):
    damaged, remaining = shutil.copytree(first, tmp_path / "damaged"), shutil.copytree(first, tmp_path / "kept")
    path = max((path for path in (damaged / "weights").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged/weights is damaged"):
        experiment.build(small_config(start_from=str(damaged)), remaining, data_root=corpus_folder, overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, load_trained(remaining).params, load_trained(first).params)


def test_a_run_without_a_checkpoint_to_start_from_replaces_no_run(first, corpus_folder, tmp_path):
    """A run that is killed before its first checkpoint has an empty folder of checkpoints."""
    remaining = shutil.copytree(first, tmp_path / "kept")
    (tmp_path / "killed" / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "tokenizers"):
        copy = shutil.copytree if (first / name).is_dir() else shutil.copy
        copy(first / name, tmp_path / "killed" / name)
    cfg = small_config(start_from=str(tmp_path / "killed"))
    with pytest.raises(UserError, match="killed': holds no checkpoint: it was stopped before its first one; train"):
        experiment.build(cfg, remaining, data_root=corpus_folder, overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, load_trained(remaining).params, load_trained(first).params)
