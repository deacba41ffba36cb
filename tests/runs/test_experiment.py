"""What is checked when a run is built: other processes in its folder, the run that it starts from, and its data."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers import tiny
from tests.runs.conftest import small_config, write_pairs
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, ParallelConfig, TrainConfig
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.pipeline import check_predictable
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.tokenizers.standalone import character_tokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.parallel.multihost import ProcessGroup
from tformer_jax.runs import announcement, experiment, initial_state, run_folder, start_from
from tformer_jax.runs.start_from import Report, check_tokenizers
from tformer_jax.tasks.translation import TRANSLATION


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_creates_meanwhile_is_kept(corpus_folder, tmp_path, monkeypatch, resume):
    """The other process starts and ends while this one reads its corpus, before it takes the lock."""
    folder, load, ids = tmp_path / "run", experiment.load_corpus, []

    def load_after_another(*args):
        monkeypatch.setattr(experiment, "load_corpus", load)
        experiment.build(small_config(), folder, data_root=corpus_folder).close()
        ids.append(run_folder.run_id(folder))
        return load(*args)

    monkeypatch.setattr(experiment, "load_corpus", load_after_another)
    with pytest.raises(UserError, match="another process has created or removed .*run since this one started: start"):
        experiment.build(small_config(), folder, data_root=corpus_folder, resume=resume)
    assert [run_folder.run_id(folder)] == ids


@pytest.mark.parametrize("workers", [0, 2])
def test_dropped_pairs_are_told_once(corpus_folder, tmp_path, capfd, workers):
    """Regression test: the loader warned of what the summary says, in each of its processes."""
    cfg = small_config(bucket_lengths=(6,))
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, workers=workers))
    with contextlib.closing(experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)) as built:
        for _ in range(20):
            next(built.batches)
        told = " ".join([*announcement.data_lines(built), *capfd.readouterr()])
    assert (told.count("too long for their row and dropped"), told.count("dropping pairs")) == (1, 0)


@pytest.mark.parametrize("name", [".", ".."])
def test_the_working_directory_is_resumed_but_not_replaced(corpus_folder, tmp_path, monkeypatch, name):
    folder = tmp_path / "run"
    experiment.build(small_config(), folder, data_root=corpus_folder).close()
    (folder / "checkpoints").mkdir()
    monkeypatch.chdir(folder if name == "." else folder / "checkpoints")
    built = experiment.build(small_config(), Path(name), data_root=corpus_folder, resume=True)
    built.close()
    assert built.folder == folder
    with pytest.raises(
        UserError, match="run contains the working directory, which would be replaced: choose another folder"
    ):
        experiment.build(small_config(), Path(name), data_root=corpus_folder, overwrite=True)
    assert run_folder.holds_run(folder)


@pytest.fixture
def started_from_a_lost_run(corpus_folder, tmp_path) -> tuple[Config, Path]:
    """A run without checkpoints, with `train.start_from` naming a folder that no longer exists, and its config."""
    first, folder = tmp_path / "first", tmp_path / "run"
    experiment.build(small_config(), first, data_root=corpus_folder).close()
    (first / "checkpoints" / "1").mkdir(parents=True)
    cfg = small_config(start_from=str(first))
    experiment.build(cfg, folder, data_root=corpus_folder).close()
    shutil.rmtree(first)
    return cfg, folder


def test_a_resumed_run_without_a_checkpoint_requires_the_run_that_it_starts_from(
    corpus_folder, started_from_a_lost_run
):
    cfg, folder = started_from_a_lost_run
    (folder / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(UserError, match="train.start_from=.*first': is not the folder of a trained run"):
        experiment.build(cfg, folder, data_root=corpus_folder, resume=True)


@pytest.mark.parametrize("left", ["checkpoints/2/state", "result.json"])
def test_a_resumed_run_reads_its_own_checkpoint_or_result(corpus_folder, started_from_a_lost_run, left):
    cfg, folder = started_from_a_lost_run
    path = folder / left
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"test": {}}')
    built = experiment.build(cfg, folder, data_root=corpus_folder, resume=True)
    built.close()
    assert (built.finished is not None) == (left == "result.json")


@pytest.mark.parametrize("changes", [{"steps": 9}, {}])
def test_final_weights_without_a_checkpoint_are_not_trained_from_the_start(tmp_path, changes):
    """A run may be copied without its checkpoints; its result and metrics stay."""
    config.save(small_config(), tmp_path / "config.json")
    remaining = ["weights.json", *(["result.json"] if changes else [])]
    for name in remaining:
        (tmp_path / name).write_text("{}")
    cfg = small_config(**changes)
    with pytest.raises(UserError, match=f"no checkpoint to continue from; .*train.start_from='{tmp_path}'"):
        run_folder.check_resumable(tmp_path, cfg, {})
    assert config.load(tmp_path / "config.json") == small_config()
    assert all((tmp_path / name).exists() for name in remaining)
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    run_folder.check_resumable(tmp_path, cfg, {})


def test_a_run_does_not_end_before_its_last_checkpoint(tmp_path):
    """Regression test: its result had the smaller number of steps in the config, and the metrics of more steps."""
    config.save(small_config(steps=8), tmp_path / "config.json")
    (tmp_path / "checkpoints" / "6").mkdir(parents=True)
    with pytest.raises(UserError, match="train.steps=4: .* is already at step 6; write at least 6"):
        run_folder.check_resumable(tmp_path, small_config(steps=4), {})
    run_folder.check_resumable(tmp_path, small_config(steps=6), {})


@pytest.mark.parametrize(
    ("fact", "sentence"),
    [
        (run_folder.MIXTURE, "mixes data.weights in another order: finish it with revision bc1b2c8"),
        (run_folder.TRANSFORMS, "draws BPE-dropout in another way: finish it with revision f3bf8a7"),
    ],
)
def test_data_of_an_earlier_version_is_not_resumed_in_another_order(fact, sentence, tmp_path):
    config.save(small_config(), tmp_path / "config.json")
    facts = {"the number of train examples": 5}
    (tmp_path / run_folder.CORPUS).write_text(json.dumps(facts))
    run_folder.check_resumable(tmp_path, small_config(), facts)
    present = facts | {fact: 2}
    with pytest.raises(UserError, match=sentence):
        run_folder.check_resumable(tmp_path, small_config(), present)
    (tmp_path / run_folder.CORPUS).write_text(json.dumps(present))
    run_folder.check_resumable(tmp_path, small_config(), present)


def test_a_resumed_run_may_save_memory(tmp_path):
    """As the message about a lack of memory advises."""
    config.save(small_config(), tmp_path / "config.json")
    saving = small_config(loss_chunk=8)
    saving = dataclasses.replace(saving, model=dataclasses.replace(saving.model, remat="nothing_saveable"))
    run_folder.check_resumable(tmp_path, saving, {})
    run_folder.adopt(tmp_path, saving)
    assert config.load(tmp_path / "config.json") == saving


@pytest.mark.parametrize("given", [False, True])
def test_prepared_data_that_changed_cannot_resume(corpus_folder, tmp_path, given):
    """Also in the middle, with the tokenizers of the run."""
    tokenizers = Tokenizers(*[ByteTokenizer()] * 2) if given else None
    cfg, data, prepared = small_config(), tmp_path / "data", tmp_path / "prepared"
    shutil.copytree(corpus_folder, data)
    prepare(cfg, data, prepared, tokenizers=tokenizers)
    of_prepared = dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, source="prepared", train=(str(prepared),))
    )
    experiment.build(of_prepared, tmp_path / "run", data_root=data).close()
    lines = (data / "pairs.tsv").read_text().splitlines(keepends=True)
    left, right = lines[3].rstrip("\n").split("\t")
    (data / "pairs.tsv").write_text("".join([*lines[:3], f"{left[::-1]}\t{right[::-1]}\n", *lines[4:]]))
    prepare(cfg, data, prepared, tokenizers=tokenizers)
    with pytest.raises(UserError, match=r"the data of .*run changed \(the checksum of the train examples is"):
        experiment.build(of_prepared, tmp_path / "run", data_root=data, resume=True)


EXAMPLES = {"eval": {"examples": 4}}


@pytest.mark.parametrize(
    ("train", "changes", "refused"),
    [
        ({"patience": 2}, EXAMPLES, "eval.examples: 8 -> 4"),
        ({"keep_best": 1}, EXAMPLES, "eval.examples: 8 -> 4"),
        ({"keep_best": 1, "metric": "bleu"}, {"decode": {"max_new_tokens": 3}}, "decode.max_new_tokens: 10 -> 3"),
        ({"keep_best": 1, "ema_decay": 0.9}, {"train": {"weights": "ema"}}, "train.weights: 'last' -> 'ema'"),
        ({"keep_best": 1}, {"decode": {"max_new_tokens": 3}}, None),
        ({"keep_best": 1}, {"eval": {"batch_size": 4}, "train": {"weights": "best"}}, None),
        ({}, EXAMPLES, None),
    ],
)
def test_scores_of_two_evaluations_are_not_mixed(tmp_path, train, changes, refused):
    cfg = small_config(**train)
    config.save(cfg, tmp_path / "config.json")
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "result.json").write_text("{}")  # a finished run may be resumed with more steps later
    sections = {name: dataclasses.replace(getattr(cfg, name), **values) for name, values in changes.items()}
    changed = dataclasses.replace(cfg, **sections)
    same = changes is not EXAMPLES and refused is None
    assert (run_folder.score_fingerprint(cfg) == run_folder.score_fingerprint(changed)) == same
    if refused is None:
        run_folder.check_resumable(tmp_path, changed, {})
        return
    with pytest.raises(UserError, match=f"used another setting .{refused}., so that train.keep_best"):
        run_folder.check_resumable(tmp_path, changed, {})


@pytest.fixture
def other_letters(tmp_path) -> Path:
    """The corpus in other letters, of equal number."""
    write_pairs(tmp_path)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text(pairs.read_text().translate(str.maketrans("abcdefghABCDEFGH", "ijklmnopIJKLMNOP")))
    return tmp_path


def test_loaded_embeddings_of_other_tokens_are_reported(corpus_folder, other_letters, tmp_path):
    first, folder = tmp_path / "first", tmp_path / "run"
    built = experiment.build(small_config(), first, data_root=corpus_folder)
    built.close()
    cfg, same = built.cfg, built.tokenizers
    (first / "checkpoints" / "1").mkdir(parents=True)
    remedy = f"set data.tokenizer='file' and data.tokenizer_file='{first}'"
    sentence = f"source_embedding/embedding is for another vocabulary than this run's, and train.lora_.*: {remedy}"
    with pytest.raises(UserError, match=sentence):
        experiment.build(small_config(start_from=str(first), lora_rank=2), folder, data_root=other_letters)
    assert not folder.exists()
    other = train_tokenizers(cfg.data, load_corpus(cfg, other_letters).train)
    assert check_tokenizers(cfg.train, cfg.model, same, first) is None
    names = "source_embedding/embedding, target_embedding/embedding"
    expected = f"{names} of {first} are for another vocabulary than this run's: {remedy}"
    assert check_tokenizers(cfg.train, cfg.model, other, first) == expected
    lora = small_config(start_from=str(first), lora_rank=2, lora_whole=("*_embedding/*",)).train
    assert "are for another vocabulary" in check_tokenizers(lora, cfg.model, other, first)
    assert said(dataclasses.replace(built, tokenizers=other), first)[1:] == [expected]
    assert len(said(built, first)) == 1


@pytest.mark.parametrize(
    ("there", "here", "names"),
    [
        ("none", "output", ["target_embedding/embedding"]),
        ("output", "none", ["head/kernel", "target_embedding/embedding"]),
        ("all", "output", ["source_embedding/embedding", "target_embedding/embedding"]),
    ],
)
def test_embeddings_that_another_layout_has_are_of_the_other_tokens(
    corpus_folder, other_letters, tmp_path, there, here, names
):
    """Regression test: only parameters that had the same names in both runs were checked."""
    built = experiment.build(
        with_model(small_config(), tie_embeddings=there), tmp_path / "first", data_root=corpus_folder
    )
    built.close()
    tokenizers = train_tokenizers(built.cfg.data, load_corpus(built.cfg, other_letters).train)
    model = dataclasses.replace(built.cfg.model, tie_embeddings=here)
    actual = check_tokenizers(built.cfg.train, model, tokenizers, tmp_path / "first")
    assert all(name in actual for name in names)
    assert check_tokenizers(built.cfg.train, model, built.tokenizers, tmp_path / "first") is None


@pytest.fixture
def first(corpus_folder, tmp_path) -> Path:
    """A run folder of `small_config` that passes for that of a trained run."""
    experiment.build(small_config(), tmp_path / "first", data_root=corpus_folder).close()
    (tmp_path / "first" / "checkpoints" / "1").mkdir(parents=True)
    return tmp_path / "first"


def with_model(cfg: Config, **changes) -> Config:
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **changes))


def test_lora_freezes_no_new_parameter(corpus_folder, first, tmp_path):
    """A new layer is trained as a whole: its kernels, too, which would be random but for a low rank."""
    cfg = with_model(small_config(start_from=str(first), lora_rank=2), decoder_layers=2)
    names = "'decoder/layers_1/cross_attention/key/bias', 'decoder/layers_1/cross_attention/key/kernel', .* and 22 more"
    with pytest.raises(UserError, match=f"train.lora_whole=.*: must include {names}: not found in .*first"):
        experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)
    assert not (tmp_path / "run").exists()
    train = dataclasses.replace(cfg.train, lora_whole=("decoder/layers_1/*",))
    experiment.build(dataclasses.replace(cfg, train=train), tmp_path / "run", data_root=corpus_folder).close()


def test_a_run_is_kept_if_its_replacement_does_not_fit(corpus_folder, first, tmp_path):
    folder = Path(shutil.copytree(first, tmp_path / "run"))
    cfg = with_model(small_config(start_from=str(first)), dim=32, ffn_dim=32, max_length=24)
    with pytest.raises(UserError, match="train.start_from=.*first': no parameter matches this model"):
        experiment.build(cfg, folder, data_root=corpus_folder, overwrite=True)
    assert run_folder.holds_run(folder)


def test_a_run_is_kept_if_another_process_refuses_its_replacement(corpus_folder, first, monkeypatch):
    """The other process lacks a package."""
    checked = []
    monkeypatch.setattr(TRANSLATION, "check_installed", checked.append)

    class OtherRefuses(ProcessGroup):
        def run(self, action):
            result = action()
            if checked:
                raise UserError("process 1 (host b): sacrebleu is missing")
            return result

    before = run_folder.run_id(first)
    with pytest.raises(UserError, match="process 1 .host b.: sacrebleu is missing"):
        experiment.build(small_config(), first, data_root=corpus_folder, overwrite=True, group=OtherRefuses())
    assert run_folder.run_id(first) == before


def said(built: experiment.Experiment, run: Path) -> list[str]:
    """Returns what a run prints when it starts from the parameters of another, none of which is really loaded."""
    lines: list[str] = []
    with mock.patch.object(start_from, "load_matching", return_value=({}, Report((), (), (), ()))):
        initial_state.load_initial(dataclasses.replace(built, start_from=run), lines.append)
    return lines


def test_embeddings_of_another_width_need_no_tokenizers(corpus_folder, tmp_path):
    built = experiment.build(small_config(), tmp_path / "first", data_root=corpus_folder)
    built.close()
    shutil.rmtree(tmp_path / "first" / "tokenizers")
    model = dataclasses.replace(built.cfg.model, dim=32)
    assert check_tokenizers(built.cfg.train, model, built.tokenizers, tmp_path / "first") is None


def test_appended_tokens_are_not_other_tokens(corpus_folder, tmp_path):
    """Of embeddings with more rows than tokens, those of appended tokens were unused."""
    values = config.to_dict(small_config())
    values["model"]["vocab_size"] = values["model"]["source_vocab_size"] = 25
    built = experiment.build(Config.from_dict(values), tmp_path / "first", data_root=corpus_folder)
    built.close()
    more = built.tokenizers.target.extended(["<mask>"])
    assert check_tokenizers(built.cfg.train, built.cfg.model, Tokenizers(more, more), tmp_path / "first") is None


def test_a_prefix_that_fills_the_outputs_is_rejected_before_training(corpus_folder, tmp_path):
    """Regression test: a translator's was refused by its first evaluation."""
    cfg = dataclasses.replace(small_config(), decode=DecodeConfig(prefix="ab" * 12))
    with pytest.raises(UserError, match="decode.prefix='abab.*leaves no token of model.max_length=16 for other tok"):
        experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)
    assert not (tmp_path / "run").exists()


def test_a_metric_of_a_direction_without_held_out_pairs_is_rejected_before_training(tmp_path):
    (tmp_path / "pairs.tsv").write_text("en\tde\ta\tb\n")
    data = DataConfig(
        source="tsv", train="pairs.tsv", validation="pairs.tsv", language_fields=("1", "2"), fields=("3", "4")
    )
    model, train = ModelConfig(dim=8, num_heads=2, ffn_dim=8), TrainConfig(metric="chrf:de-en")
    with pytest.raises(UserError, match="train.metric='chrf:de-en': the validation split has no direction or group"):
        experiment.build(Config(model=model, data=data, train=train), tmp_path / "run", data_root=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_decoding_rule_that_the_vocabulary_cannot_represent_is_rejected_before_training(corpus_folder, tmp_path):
    cfg = dataclasses.replace(small_config(), decode=DecodeConfig(forbidden=("§",)))
    with pytest.raises(UserError, match="decode.forbidden=.*§"):
        experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_held_out_text_of_one_token_is_refused_before_training(tmp_path, split):
    for name, text in (("train", "abc " * 20), ("validation", "ab"), ("test", "ab"), (split, "a")):
        (tmp_path / f"{name}.txt").write_text(text)
    files = {name: f"{name}.txt" for name in ("train", "validation", "test")}
    data = DataConfig(source="text", **files, tokenizer="bytes", batching="windows", window=8, batch_size=2)
    cfg = Config(model=tiny("decoder_lm"), data=data, parallel=ParallelConfig(data=1))
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=None))
    with pytest.raises(DataError, match=f"needs at least 2 tokens, and split {split} has"):
        experiment.build(cfg, tmp_path / "run", data_root=tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_of_empty_documents_is_refused_before_training(tmp_path, split):
    for name in ("train", "validation"):
        text = "" if name == split else "abc"
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n' * 9)
    files = {name: f"{name}.jsonl" for name in ("train", "validation")}
    data = DataConfig(source="jsonl", **files, tokenizer="bytes", batching="packed", window=8, batch_size=2)
    cfg = Config(model=ModelConfig(family="decoder_lm", max_length=8), data=data, parallel=ParallelConfig(data=1))
    with pytest.raises(DataError, match=f"split {split} has no valid example; dropped: 9 blank texts"):
        experiment.build(cfg, tmp_path / "run", data_root=tmp_path)


def test_documents_of_which_no_character_is_a_token_are_refused_before_training(tmp_path):
    """Regression test: batches of packed documents were never full."""
    (tmp_path / "a.txt").write_text("xyz" * 99)
    data = DataConfig(source="lines", train="a.txt", validation="a.txt", batching="packed", window=8, batch_size=2)
    cfg = Config(model=ModelConfig(family="decoder_lm", max_length=8), data=data, parallel=ParallelConfig(data=1))
    corpus, tokenizer = load_corpus(cfg, tmp_path), character_tokenizer("abc")
    with pytest.raises(DataError, match="all examples of split train are empty or have no token"):
        check_predictable(cfg, corpus, Tokenizers(tokenizer, tokenizer))
