"""Corpora that are not part of the package: a format of files, which the README shows, and a generated one."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import tformer_jax as tj
from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, prepare_data, train
from tformer_jax.config import Config, DataConfig, ModelConfig, kinds
from tformer_jax.data.corpora import load_corpus
from tformer_jax.data.corpora.files import FileSource
from tformer_jax.lab.commands.machine_checks import check_data

OUTSIDE = Path(__file__).resolve().parents[1] / "outside"
MODULES = {"csv_files": "csv", "sums": "sums"}
FLAGS = {
    "csv_files": ["source=csv", "train=pairs.csv"],
    "sums": ["source=sums", "train=()", "heldout_examples=20"],
}
WORDS = [f"{'ab' * (number % 5)}{number}" for number in range(40)]
CONFIG = """
from tests.runs.conftest import small_config
from tformer_jax.config import to_config_dict


def get_config():
    return to_config_dict(small_config(steps=2))
"""


def forget() -> None:
    """Removes the modules and their kinds, as in a new process."""
    for module, name in MODULES.items():
        sys.modules.pop(module, None)
        kinds.CORPORA.pop(name, None)


@pytest.fixture
def outside(monkeypatch):
    """Makes the modules importable during one test."""
    monkeypatch.syspath_prepend(OUTSIDE)
    yield
    forget()


@pytest.fixture
def registered(outside):
    kinds.import_modules(MODULES)


def write(folder: Path) -> None:
    rows = [f'{word.upper()},"{word}, and {word}"\n' for word in WORDS]
    (folder / "pairs.csv").write_text("target,source\n" + "".join(rows), encoding="utf-8")


@pytest.mark.usefixtures("registered")
def test_its_examples_are_split_and_filtered_like_others(tmp_path):
    write(tmp_path)
    data = DataConfig(source="csv", train="pairs.csv", filters={"duplicates": True}, validation_fraction=0.2)
    corpus = load_corpus(Config(data=data), tmp_path)
    assert (len(corpus.train), len(corpus.validation)) == (32, 8)
    assert corpus.validation[-1] == {"source": f"{WORDS[-1]}, and {WORDS[-1]}", "target": WORDS[-1].upper()}


@pytest.mark.usefixtures("registered")
def test_malformed_files_are_named_or_skipped(tmp_path):
    """Regression test: they were tracebacks of Python's, or lost cells."""
    content = "\ufeffsource,target\na,b\nc\nd,e,f\n\xe4\n".encode("utf-8-sig").replace(b"\xc3\xa4", b"\xe4")
    (tmp_path / "pairs.csv").write_bytes(content.removeprefix(b"\xef\xbb\xbf"))
    data = DataConfig(source="csv", train="pairs.csv", validation="pairs.csv", on_bad_line="skip")
    corpus = load_corpus(Config(data=data), tmp_path)
    assert corpus.train == [{"source": "a", "target": "b"}]
    left_out = {"has more or fewer cells than the first line": 2}
    assert left_out.items() <= corpus.left_out["train"].items() and len(corpus.left_out["train"]) == 2
    with pytest.raises(UserError, match="pairs.csv, line 3: has more or fewer cells than the first line"):
        load_corpus(Config(data=dataclasses.replace(data, on_bad_line="stop")), tmp_path)
    (tmp_path / "pairs.csv").write_text("source,other\na,b\n")
    with pytest.raises(
        UserError, match="pairs.csv: Csv.read_file yields {'source': 'a', 'target': None}: it must yield"
    ):
        load_corpus(Config(data=data), tmp_path)


@pytest.mark.parametrize(
    "example", [("a", "b"), {"source": "a", "target": 3}, {"source": "a", "target": "b", "id": "c"}]
)
def test_examples_of_another_form_are_refused(example, tmp_path, monkeypatch):
    class Own(FileSource):
        def read_file(self, path):
            yield example

    monkeypatch.setitem(kinds.CORPORA, "own", Own)
    (tmp_path / "a").write_text("a")
    data = DataConfig(source="own", train="a", validation="a")
    with pytest.raises(
        UserError, match="a: Own.read_file yields .*: it must yield dictionaries with the texts source, ta"
    ):
        load_corpus(Config(data=data), tmp_path)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "csv"}, r"data.train=\(\): must say what data.source='csv' reads, such as 'train.csv'"),
        ({"source": "csv", "train": "a", "header": True}, "data.header=True: is used only by data.source='parallel_"),
        ({"source": "sums", "train": "a"}, "data.train=.*is used only by .* or 'csv', not 'sums'"),
        ({"source": "sums"}, "data.heldout_examples=2000: must be at most 1000 for data.source='sums'"),
        ({"source": "sum"}, "data.source='sum': is not a known value; did you mean 'sums'.*--import MODULE registers"),
    ],
)
def test_its_settings_are_checked(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        DataConfig(**settings)


@pytest.mark.usefixtures("registered")
def test_it_must_have_the_examples_of_the_task():
    data = DataConfig(source="sums", heldout_examples=9, batching="windows")
    with pytest.raises(UserError, match="does not fit model.family='decoder_lm'; write one of .*'python', 'csv'"):
        Config(model=ModelConfig(family="decoder_lm"), data=data)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("module", rest_slow([*FLAGS], 1))
@pytest.mark.slow
def test_commands_train_on_it_evaluate_and_prepare_it(module, tmp_path, capsys):
    write(tmp_path)
    (tmp_path / "own.py").write_text(CONFIG)
    overrides = [f"--config.data.{flag}" for flag in FLAGS[module]]
    command = ["--config", f"{tmp_path}/own.py", "--data", str(tmp_path), f"--import={module}", *overrides]
    train.main([*command, "--run", f"{tmp_path}/run"])
    prepare_data.main([*command, "--output", f"{tmp_path}/prepared"])
    prepared = json.loads((tmp_path / "prepared" / "dataset.json").read_text())
    forget()
    run = tj.load(tmp_path / "run")
    assert run.config.imports == (module,)
    evaluate.main(["--run", str(tmp_path / "run"), "--data", str(tmp_path)])
    assert "perplexity" in capsys.readouterr().out
    read = dataclasses.replace(run.config.data, source="prepared", train=(str(tmp_path / "prepared"),))
    read = dataclasses.replace(read, validation=(), heldout_examples=2000)
    corpora = [load_corpus(dataclasses.replace(run.config, data=data), tmp_path) for data in (run.config.data, read)]
    assert len(corpora[0].train) == prepared["splits"]["train"]["examples"]
    for split in ("train", "validation", "test"):
        assert [*getattr(corpora[0], split)] == [*getattr(corpora[1], split)]
    assert not list(check_data(run.config, tmp_path))


def test_the_readme_shows_the_format():
    text = (OUTSIDE.parents[1] / "tformer_jax" / "README.md").read_text(encoding="utf-8")
    assert f"```python\n{(OUTSIDE / 'csv_files.py').read_text(encoding='utf-8')}```" in text
