"""Sweeps: their runs, how they are resumed, and their output."""

import dataclasses
import json
import os
import shutil
import signal

import pytest

from tests.helpers import rest_slow
from tests.runs.conftest import small_config
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.cli import sweep
from tformer_jax.config import Config, save
from tformer_jax.runs.guards import FolderLock, locked
from tformer_jax.train import non_finite

CONFIG = """
from tests.runs.conftest import small_config
from tformer_jax.config import to_config_dict

def get_config():
    return to_config_dict(small_config(steps=2, eval_every=2))
"""


@pytest.fixture
def corpus_folder(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in ("ab", "cd", "ef", "abc") * 8))
    return tmp_path


def flags(tmp_path, corpus_folder, folder) -> list[str]:
    """Writes a config; returns the flags of a sweep over it, except `--sweep`."""
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return ["--config", str(path), "--data", str(corpus_folder), "--output", str(folder)]


TRAINER = """
import json, os, pathlib, sys
run = pathlib.Path(next(flag for flag in sys.argv if flag.startswith("--run=")).removeprefix("--run="))
assert "--resume" in sys.argv
run.mkdir()
seed = int(run.name.rpartition("seed=")[2])
rate = float(run.name.partition("learning_rate=")[2].partition(",")[0] or 1)
test = {"loss": 1.5 + seed, "bleu": 10.0 * seed}
(run / "result.json").write_text(json.dumps({"parameters": 8, "test": test}))
losses = 9.0, None if rate == 9 else (rate - 2) ** 2
(run / "metrics.jsonl").write_text("".join(
    json.dumps({"step": step, "group": "train", "tokens_per_second": 10.0 ** (seed + step)}) + "\\n"
    + json.dumps({"step": step, "group": "validation", "loss": loss}) + "\\n" for step, loss in enumerate(losses)
))
(run / "started.json").write_text(json.dumps([*sys.argv, os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")]))
"""
"""A substitute for the training of a run."""


def test_a_setting_that_the_sweep_and_a_flag_set_is_refused(tmp_path, corpus_folder):
    given = [*flags(tmp_path, corpus_folder, tmp_path / "out"), "--config.seed=3"]
    with pytest.raises(UserError, match="--sweep and --config.seed both set seed: leave one of them out"):
        sweep.main([*given, "--sweep", "train.steps=1,2; seed=0"])


def test_every_combination_the_last_name_fastest():
    assert sweep.expand_settings("optim.learning_rate=1e-3,3e-3; seed=0,1") == [
        ("optim.learning_rate=1e-3", "seed=0"),
        ("optim.learning_rate=1e-3", "seed=1"),
        ("optim.learning_rate=3e-3", "seed=0"),
        ("optim.learning_rate=3e-3", "seed=1"),
    ]
    assert sweep.expand_settings("data.bucket_lengths=(8,16),(12,)") == [
        ("data.bucket_lengths=(8,16)",),
        ("data.bucket_lengths=(12,)",),
    ]


@pytest.mark.parametrize("text", ["", " ; ", "seed", "seed=", "seed=1,,2", "=3", "seed=1; seed=2"])
def test_invalid_sweeps(text):
    with pytest.raises(UserError, match="--sweep"):
        sweep.expand_settings(text)


@pytest.mark.parametrize(
    ("config", "name"),
    [("configs/transfer.py", "transfer"), ("configs/ladder.py:shakespeare", "ladder_shakespeare")],
)
def test_a_sweep_over_variants_has_the_name_of_its_file(config, name):
    assert sweep.sweep_name(config, [], [("variant=a", "seed=0"), ("variant=b", "seed=0")]) == name
    assert sweep.sweep_name("configs/translate_cldr.py", [], [("seed=0",)]) == "translate_cldr_en_de"


@pytest.mark.long
def test_runs_are_trained_once_and_compared(corpus_folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "sweep"
    arguments = flags(tmp_path, corpus_folder, folder)
    with pytest.raises(UserError, match="unknown setting 'train.steeps'"):
        sweep.main([*arguments, "--sweep", "train.steeps=1"])
    assert not folder.exists()
    sweep.main([*arguments, "--sweep", "seed=0,1"])
    output = capfd.readouterr().out
    assert output.count("training") == 2
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["", "2", "8", "30", "2 ± 6.4", "5 ± 64"],  # 12.706 / sqrt(2) standard deviations
    ]
    shutil.rmtree(folder / "seed=1")
    record = tmp_path / "record.json"
    sweep.main([*arguments, "--sweep", "seed=1,0", "--record", str(record)])
    (group,) = json.loads(record.read_text())["groups"]
    assert group["settings"] == [] and group["seeds"] == 2
    assert group["mean"] == {"loss": 2.0, "bleu": 5.0}
    assert group["deviation"] == pytest.approx({"loss": 0.5**0.5, "bleu": 50**0.5})
    assert group["interval"] == pytest.approx({"loss": 6.353, "bleu": 63.53}, rel=1e-4)
    output = capfd.readouterr().out
    assert output.count("training") == 1
    actual = json.loads((folder / "results.json").read_text())
    assert [result["settings"] for result in actual] == [["seed=1"], ["seed=0"]]
    with pytest.raises(UserError, match=r"is a sweep of another config \(model.dim: 16 -> 32\): choose "):
        sweep.main([*arguments, "--sweep", "seed=0", "--config.model.dim=32"])
    saved = json.loads((folder / "sweep.json").read_text())
    del saved["seed=0"]["train"]["report"]  # as of a version without this setting
    (folder / "sweep.json").write_text(json.dumps(saved))
    sweep.main([*arguments, "--sweep", "seed=0"])
    saved["seed=0"]["train"]["unknown"] = 1
    (folder / "sweep.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"is a sweep of another config \(.*unknown.*\): choose another --output, or"):
        sweep.main([*arguments, "--sweep", "seed=0"])
    for seed in (7, 8):  # the config of a run that has not started may be corrected
        sweep.check_same_sweep(folder, [Config(seed=seed)], [("name=x",)])
    for damaged in ("{", "[]", "3"):
        (folder / "sweep.json").write_text(damaged)
        with pytest.raises(UserError, match="sweep.json is damaged .*: remove it, and the sweep writes it again"):
            sweep.main([*arguments, "--sweep", "seed=0"])


def test_a_sweep_outlives_the_reader_of_its_output(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        sweep.main([*flags(tmp_path, corpus_folder, tmp_path / "sweep"), "--sweep", "seed=0,1"])
    assert len(json.loads((tmp_path / "sweep" / "results.json").read_text())) == 2


def test_runs_of_another_config_are_not_results(corpus_folder, tmp_path, monkeypatch):
    """Regression test: without sweep.json, their results were those of this sweep. Sizes are those of the data."""
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    folder = tmp_path / "sweep"
    arguments = [*flags(tmp_path, corpus_folder, folder), "--sweep", "seed=0"]
    sweep.main(arguments)
    (folder / "sweep.json").unlink()
    cfg = dataclasses.replace(small_config(steps=2, eval_every=2), seed=0)
    resolved = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=12, source_vocab_size=12))
    save(resolved, folder / "seed=0" / "config.json")
    sweep.main(arguments)
    save(dataclasses.replace(resolved, seed=4), folder / "seed=0" / "config.json")
    with pytest.raises(UserError, match=r"is a sweep of another config \(seed: 4 -> 0\): choose another --output"):
        sweep.main(arguments)


@pytest.mark.slow
def test_results_with_other_metrics_are_not_compared(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    folder = tmp_path / "sweep"
    arguments = flags(tmp_path, corpus_folder, folder)
    with pytest.raises(UserError, match="--sweep: train.metric=loss and train.metric=bleu are not comparable"):
        sweep.main([*arguments, "--sweep", "train.metric=loss,bleu"])
    with pytest.raises(
        UserError, match="bytes are not comparable: the kind of the target tokenizer differs, and with it the labels"
    ):
        sweep.main([*arguments, "--sweep", "data.tokenizer=bpe,bytes"])
    for settings in ("data.tokenizer_examples=5,9", "data.train=pairs.tsv,other.tsv", "data.target_language=de,fr"):
        with pytest.raises(UserError, match="are not comparable: data.* differs, and with it the "):
            sweep.main([*arguments, "--sweep", settings])
    assert not folder.exists()
    sweep.main([*arguments, "--sweep", "data.tokenizer=bpe,bytes; seed=3", "--config.train.metric=bleu"])
    elsewhere = flags(tmp_path, corpus_folder, tmp_path / "other")
    sweep.main([*elsewhere, "--config.data.tokenizer=bytes", "--sweep", "data.tokenizer_examples=5,9; seed=3"])


def test_a_seed_counts_once(corpus_folder, tmp_path, monkeypatch):
    """The interval of a mean over seeds would be too small."""
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    with pytest.raises(UserError, match="--sweep: seed=0 and seed=00 are the same run; leave out one"):
        sweep.main([*flags(tmp_path, corpus_folder, tmp_path / "sweep"), "--sweep", "seed=0,1,00"])
    assert not (tmp_path / "sweep").exists()


def test_names_of_runs_have_a_maximum(corpus_folder, tmp_path):
    arguments = flags(tmp_path, corpus_folder, tmp_path / "sweep")
    with pytest.raises(UserError, match="has more than 240 bytes; pass settings that all runs share"):
        sweep.main([*arguments, "--sweep", f"data.train={'x' * 240}"])


@pytest.mark.long
def test_diverged_runs_have_no_mean(corpus_folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sweep, "TRAIN", TRAINER.replace("1.5 + seed", "1.5 if rate < 9 else None"))
    folder, plot = tmp_path / "sweep", tmp_path / "plot.svg"
    arguments = flags(tmp_path, corpus_folder, folder)
    settings = "optim.learning_rate=1.5,9; seed=0,1"
    sweep.main([*arguments, "--sweep", settings, "--record", str(tmp_path / "it.json"), "--plot", str(plot)])
    assert [group["mean"]["loss"] for group in json.loads((tmp_path / "it.json").read_text())["groups"]] == [1.5, None]
    assert "no value" in capfd.readouterr().out
    sweep.main([*arguments, "--sweep", "optim.learning_rate=2.5; seed=0"])
    assert len(json.loads((folder / "results.json").read_text())) == 5, "those of both commands"


def test_values_may_be_paths(corpus_folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    folder = tmp_path / "sweep"
    arguments = [
        *flags(tmp_path, corpus_folder, folder),
        "--config.data.validation=v.tsv",
        "--config.train.metric=bleu",
    ]
    for _ in range(2):
        sweep.main([*arguments, "--sweep", "data.train=a/b.tsv,a%2Fb.tsv; seed=3"])
    assert capfd.readouterr().out.count("training") == 2
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "data.train=a%252Fb.tsv,seed=3",
        "data.train=a%2Fb.tsv,seed=3",
    ]
    actual = json.loads((folder / "results.json").read_text())
    assert [result["settings"][0] for result in actual] == ["data.train=a/b.tsv", "data.train=a%2Fb.tsv"]


@pytest.mark.long
def test_other_seeds_train_only_with_the_chosen_value(corpus_folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    path, folder, record = tmp_path / "small.py", tmp_path / "sweep", tmp_path / "record.json"
    named = "    result.name = variant\n    return result\n"
    path.write_text(CONFIG.replace("get_config()", "get_config(variant)").replace("return ", "result = ") + named)
    settings = "variant=x,y; optim.learning_rate=1.5,2.5,9,1; seed=0,1"
    arguments = ["--config", f"{path}:z", "--data", str(corpus_folder), "--output", str(folder), "--jobs", "4"]
    with pytest.raises(UserError, match="--choose seed: must be a setting of --sweep other than seed"):
        sweep.main([*arguments, "--sweep", settings, "--choose", "seed"])
    with pytest.raises(SystemExit):
        sweep.main([*arguments, "--sweep", settings, "--jobs", "0"])
    assert "--jobs: 0 is not an integer of at least 1" in capfd.readouterr().err
    sweep.main([*arguments, "--sweep", settings, "--choose", "optim.learning_rate", "--record", str(record)])
    actual = json.loads(record.read_text())
    assert [(group["settings"], group["seeds"]) for group in actual["groups"]] == [
        (["variant=x", "optim.learning_rate=1.5"], 2),
        (["variant=y", "optim.learning_rate=1.5"], 2),
    ]
    assert len(actual["runs"]) == 2 * 4 + 2  # all values with the first seed
    assert actual["runs"][2]["settings"][1] == "optim.learning_rate=2.5" and actual["runs"][2]["validation"] == {
        "loss": 0.25
    }
    started = json.loads((folder / "variant=y,optim.learning_rate=1.5,seed=1" / "started.json").read_text())
    assert f"--config={path}:z:y" in started and not any(
        "variant" in flag for flag in started[:-1] if "--config." in flag
    )
    assert started[-1] == "false"


STOPPED = """
import os, pathlib, signal, sys, time
run = pathlib.Path(next(flag for flag in sys.argv if flag.startswith("--run=")).removeprefix("--run="))
def save(*_):
    run.with_name(run.name + ".saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), NUMBER)
for _ in range(600): time.sleep(0.1)
"""
"""A substitute for the training of a run that stops its sweep, and saves when it is stopped itself."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_and_waits_for_them(corpus_folder, tmp_path, monkeypatch, capfd, number):
    monkeypatch.setattr(sweep, "TRAIN", STOPPED.replace("NUMBER", str(int(number))))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        sweep.main([*flags(tmp_path, corpus_folder, tmp_path / "sweep"), "--sweep", "seed=0,1"])
    assert caught.value.code == 128 + number
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["seed=0.log", "seed=0.saved", "sweep.json"]
    assert capfd.readouterr().err == "stopped: the same command continues the sweep\n"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    "file", ["--record=runs/small_sweep/results.json", "--record=runs/../runs/small_sweep/sweep.json"]
)
def test_the_files_of_a_sweep_are_not_replaced(file, corpus_folder, tmp_path, monkeypatch):
    """Regression test: in the default folder, `--record` replaced the results of all combinations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    with pytest.raises(UserError, match=f"{file.replace('=', ' ')}: is a file that the sweep writes itself"):
        sweep.main([*flags(tmp_path, corpus_folder, "runs")[:-2], "--sweep", "seed=0,1", file])
    assert not (tmp_path / "runs").exists()


FAILING = "import sys; sys.exit('error: pairs.tsv is missing')"


@pytest.mark.parametrize("program", rest_slow({"substitute": FAILING, "train.py": sweep.TRAIN}, 1))
def test_a_run_that_fails_does_not_stop_the_others(program, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", program)
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    with pytest.raises(RunError, match="1 of 1 run failed; the first: .*seed=0: error: .*pairs.tsv"):
        folders = ["--output", str(tmp_path / "sweep"), "--data", str(tmp_path)]
        sweep.main(["--config", str(path), *folders, "--sweep", "seed=0"])
    assert "seed=0: failed: error:" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("status", "output", "problem"),
    [
        (1, "error: data.train: one\nerror: two\n", "error: two"),
        (1, "error: two\nTraceback\n", "error: two"),
        (-9, "step 300/550  loss 0.1577\n", "killed by SIGKILL after: step 300/550  loss 0.1577"),
        (4, "", "exit status 4 after: no output"),
    ],
)
def test_the_reason_of_a_failure(status, output, problem):
    assert sweep.describe_failure(status, output) == problem


@pytest.mark.parametrize(
    "advice",
    [
        f"; {non_finite.advice(Config())}",
        "; the same command with --resume continues from the last checkpoint. Stack traces of all threads:",
        ", then repeat the command with --resume",
        ", then the same command with --resume continues from the last checkpoint",
    ],
)
def test_the_advice_to_resume_is_left_out(advice):
    """The command that it would repeat is not the one that the user typed, and has no such flag."""
    assert sweep.describe_failure(1, f"error: the disk is full{advice}\n") == "error: the disk is full"


def test_a_run_in_use_is_to_be_awaited(tmp_path):
    """Its folder cannot be chosen; it is in use if the sweep was killed, until its last run ends."""
    with locked(tmp_path), pytest.raises(UserError) as raised:
        FolderLock(tmp_path)
    problem = sweep.describe_failure(2, f"error: {raised.value}\n")
    assert problem.endswith(f"is in use by process {os.getpid()}: wait for it to end, then repeat the command")


def test_only_the_output_of_the_last_start_is_searched(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "seed=0.log").write_text("error: of an earlier start\n")
    with pytest.raises(RunError, match="seed=0: killed by SIGKILL after: no output"):
        sweep.main([*flags(tmp_path, corpus_folder, folder), "--sweep", "seed=0"])


def test_nothing_is_chosen_if_no_trial_has_a_result(corpus_folder, tmp_path, monkeypatch):
    folder, rates = tmp_path / "sweep", "optim.learning_rate=1,2"
    arguments = flags(tmp_path, corpus_folder, folder)
    monkeypatch.setattr(sweep, "TRAIN", TRAINER)
    sweep.main([*arguments, "--sweep", f"{rates}; seed=1"])
    monkeypatch.setattr(sweep, "TRAIN", "raise SystemExit(1)")
    with pytest.raises(RunError, match="2 of 4 runs failed"):
        sweep.main([*arguments, "--sweep", f"{rates}; seed=0,1", "--choose", "optim.learning_rate"])


@pytest.mark.parametrize("devices", ["", ",", "0,", "0, ,1", "0,0"])
def test_each_device_is_listed_once(devices, corpus_folder, tmp_path):
    flags = ["--config", "configs/translate_cldr.py", "--sweep", "seed=0,1", "--output", str(tmp_path / "s")]
    with pytest.raises(UserError, match=r"--devices .*: must be different GPUs, such as 0,1"):
        sweep.main([*flags, f"--devices={devices}"])
    assert not (tmp_path / "s").exists()
