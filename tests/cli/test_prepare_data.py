"""The commands that prepare a corpus and measure how fast it is read."""

import json
from pathlib import Path

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import prepare_data
from tformer_jax.lab.commands import benchmark
from tformer_jax.runs.guards import FolderLock


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = [f"word{number} zwölf {'x' * (number % 7)}" for number in range(90)]
    (folder / "seq2seq.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in words), encoding="utf-8")
    return folder


def test_the_benchmark_measures_text_and_prepared_data(corpus_folder, tmp_path, capsys):
    file = tmp_path / "config.py"
    file.write_text(
        "from tformer_jax.config import *\n"
        "def get_config():\n"
        "    data = DataConfig(source='tsv', train='seq2seq.tsv', tokenizer='characters', bucket_lengths=(64,))\n"
        "    return to_config_dict(Config(data=data))\n"
    )
    record = tmp_path / "record.json"
    arguments = ["data", "--config", str(file), "--data", str(corpus_folder), "--workers", "0", "--seconds", "0.1"]
    arguments.append("--config.data.workers=2")
    benchmark.main([*arguments, "--record", str(record)])
    assert "prepared, 0 workers: " in capsys.readouterr().out
    cases = json.loads(record.read_text())["cases"]
    assert [case["source"] for case in cases] == ["text", "prepared"]
    assert all(case["tokens_per_second"] > 0 and 0 < case["padding_percent"] < 100 for case in cases)
    with pytest.raises(UserError, match="unexpected argument '--config.seed=1'"):
        benchmark.main(["attention", "--config.seed=1"])


def check_resuming(file, arguments, capsys):
    """Checks that a command which continues does nothing, unless a setting or a file of the data changed."""
    for more in ([], ["--config.data.batch_tokens=640"]):
        prepare_data.main([*arguments, *more])
        assert capsys.readouterr().out.endswith("p is complete\n")
    for change, more in (
        ("data.tokenizer: .characters. -> .words.", ["--config.data.tokenizer=words"]),
        ("options.seed: 0 -> 1", ["--config.seed=1"]),
        ("options.shards: 1 -> 2", ["--shards", "2"]),
        ("options.tokenizers: None -> ", ["--tokenizers", f"{arguments[5]}/tokenizers"]),
    ):
        with pytest.raises(UserError, match=rf"was prepared otherwise \(.*{change}.*\): restore this, or add"):
            prepare_data.main([*arguments, *more])
    (lost,) = Path(arguments[5]).glob("train-*")
    lost.unlink()
    with pytest.raises(UserError, match=f"{lost.name} does not exist: restore this, or add --overwrite to prepare it"):
        prepare_data.main(arguments)
    prepare_data.main([*arguments, "--overwrite"])
    assert lost.exists()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("word1", "word_"), encoding="utf-8")
    with pytest.raises(UserError, match=r"was prepared otherwise \(files.seq2seq.tsv: .*\): restore this"):
        prepare_data.main(arguments)
    prepare_data.main([*arguments, "--overwrite"])
    assert "81" in capsys.readouterr().out
    prepare_data.main([*arguments, "--overwrite"])
    assert capsys.readouterr().out.endswith("p is complete\n")


@pytest.mark.long
def test_the_command(corpus_folder, tmp_path, capsys):
    file = tmp_path / "config.py"
    file.write_text(
        "from tformer_jax.config import *\n"
        "def get_config():\n"
        "    data = DataConfig(source='tsv', train='seq2seq.tsv', tokenizer='characters')\n"
        "    return to_config_dict(Config(data=data))\n"
    )
    arguments = ["--config", str(file), "--data", str(corpus_folder), "--output", str(tmp_path / "p")]
    prepare_data.main(arguments)
    assert "81" in capsys.readouterr().out
    with pytest.raises(UserError, match="already holds prepared data: add --overwrite"):
        prepare_data.main(arguments)
    check_resuming(corpus_folder / "seq2seq.tsv", [*arguments, "--resume"], capsys)
    lock = FolderLock(tmp_path / "p")
    with pytest.raises(UserError, match="p is in use by process .*, or choose another --output"):
        prepare_data.main([*arguments, "--overwrite"])
    lock.release()
    for tokenizers in ("p/tokenizers", "p"):  # as of a run folder
        prepare_data.main([*arguments, "--overwrite", "--tokenizers", str(tmp_path / tokenizers)])
    with pytest.raises(UserError, match="contains files other than prepared data"):
        prepare_data.main([*arguments[:-1], str(corpus_folder)])
    (tmp_path / "p" / "notes.txt").touch()
    with pytest.raises(UserError, match="contains files other than prepared data"):
        prepare_data.main([*arguments, "--overwrite"])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "dataset.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match="contains files other than prepared data"):
        prepare_data.main([*arguments[:-1], str(tmp_path / "own"), "--overwrite"])
    with pytest.raises(UserError, match=r"--output .*config.py/p: cannot be written \(.*config.py is a file\); "):
        prepare_data.main([*arguments[:-1], str(file / "p")])
    with pytest.raises(UserError, match="config.py is a file; name a folder with --output"):
        prepare_data.main([*arguments[:-1], str(file)])
    with pytest.raises(UserError, match="--manual needs --download"):
        prepare_data.main([*arguments[:-1], str(tmp_path / "new"), "--manual", str(tmp_path)])
    with pytest.raises(UserError, match="--tokenizers .*missing: is not a folder"):
        prepare_data.main([*arguments[:-1], str(tmp_path / "new"), "--tokenizers", str(tmp_path / "missing")])
    output = ["--output", str(tmp_path / "new")]
    for flags, sentence in (
        (["--show", "1", "--shards", "2"], "--shards needs --output DIR"),
        (["--show", "1", "--overwrite"], "--overwrite needs --output DIR"),
        (["--download", "--tokenizers", str(tmp_path)], "--tokenizers needs --output DIR"),
        (["--download", "--teacher", str(tmp_path)], "--download is for examples: leave it out with --teacher"),
        ([*output, "--teacher", str(tmp_path), "--show", "1"], "--show is for examples: leave it out with --teacher"),
        ([*output, "--teacher", str(tmp_path), "--shards", "2"], "--shards is for examples: leave it out"),
    ):
        with pytest.raises(UserError, match=sentence):
            prepare_data.main([*arguments[:-2], *flags])
    shown = [*arguments[:-2], "--config.data.transforms=('case',)", "--show", "1"]
    with pytest.raises(UserError, match="--tokenizers .*missing: is not a folder"):
        prepare_data.main([*shown, "--tokenizers", str(tmp_path / "missing")])
    prepare_data.main([*shown, "--tokenizers", str(tmp_path / "p")])
    with pytest.raises(UserError, match="cannot be downloaded"):
        prepare_data.main([*arguments[:-2], "--download"])
    with pytest.raises(UserError, match="add --output DIR, the folder to which"):
        prepare_data.main(arguments[:-2])
