"""What generate.py reports besides its outputs."""

from pathlib import Path

import pytest

from tests.cli.finished_runs import finish
from tformer_jax.cli import generate
from tformer_jax.config import DataConfig

TO_THE_END = ["--min-new-tokens", "99", "--max-new-tokens", "99"]
"""More tokens than the model has positions."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("abc bca cabb ac bb cc aabb b ca acab " * 5)
    options = {"tokenizer": "characters", "batching": "windows", "window": 8, "batch_size": 2}
    return finish("decoder_lm", folder, DataConfig(source="text", train="text.txt", **options))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["abc", *TO_THE_END], "1 output ends at the maximum length of the model (16 tokens)\n"),
        (["abc", "a", *TO_THE_END, "--samples", "2"], "4 outputs end at the maximum length of the model (16 tokens)\n"),
        (["--input", "in.txt", *TO_THE_END], "2 outputs end at the maximum length of the model (16 tokens)\n"),
        (["abc", "--min-new-tokens", "13", "--max-new-tokens", "13"], ""),  # the positions suffice
        (["abc", "--max-new-tokens", "2"], ""),
    ],
)
def test_outputs_that_end_at_the_maximum_length_of_the_model(run, flags, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("abc\nb\n")
    generate.main(["--run", str(run), *flags])
    assert capsys.readouterr().err == told
