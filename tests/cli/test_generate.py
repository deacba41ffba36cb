"""What generate.py reports besides its outputs."""

import json
from pathlib import Path

import pytest

from tformer_jax.cli import generate, generation

TO_THE_END = ["--min-new-tokens", "99", "--max-new-tokens", "99"]
"""More tokens than the model has positions."""


@pytest.fixture(scope="module")
def run(runs) -> Path:
    return runs["decoder_lm"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(
            ["abc", *TO_THE_END],
            "1 output ends at model.max_length=16 and may be incomplete\n",
            marks=pytest.mark.slow,
        ),
        (["abc", "a", *TO_THE_END, "--samples", "2"], "4 outputs end at model.max_length=16 and may be incomplete\n"),
        (["--input", "in.txt", *TO_THE_END], "2 outputs end at model.max_length=16 and may be incomplete\n"),
        (
            ["abc", "abcabcabca", "--min-new-tokens", "9", "--max-new-tokens", "9"],
            "1 output ends at decode.max_new_tokens=9 and may be incomplete\n"
            "1 output ends at model.max_length=16 and may be incomplete\n",
        ),
        (["abc", "--stop", "a", "--stop", "b", "--stop", "c", "--stop", " "], ""),
    ],
)
def test_outputs_that_a_limit_ended_are_counted(run, flags, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("abc\nb\n")
    generate.main(["--run", str(run), *flags])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert "".join(line for line in lines if "unknown tokens" not in line) == told


@pytest.mark.slow
def test_records_say_how_outputs_ended(run, tmp_path):
    """Outputs are as long as the model can be, since nothing else limits them, and this model never stops."""
    written = tmp_path / "out.jsonl"
    flags = ["--run", str(run), "--max-new-tokens", "3", "--output", str(written), "--samples", "2"]
    generate.main([*flags, "abc", "--min-new-tokens", "3"])
    record = json.loads(written.read_text())
    assert record["finish_reasons"] == ["length", "length"]
    assert [len(text) for text in record["outputs"]] == [3, 3]
    generate.main([*flags, "abc", "--stop", "a", "--stop", "b", "--stop", "c", "--stop", " "])
    assert json.loads(written.read_text())["finish_reasons"] == ["stop", "stop"]


@pytest.mark.long
def test_a_resumed_command_says_that_it_counts_only_its_own_outputs(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("abc\nb\nc\n")
    flags = ["--run", str(run), "--input", "in.txt", "--output", "out.txt", *TO_THE_END]
    written, write = [], generation.Generation.stream

    def interrupted(self, *args, **options):
        for outputs in write(self, *args, **options):
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(outputs)
            yield outputs

    with monkeypatch.context() as patch:
        patch.setattr(generation.Generation, "stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate.main(flags)
    generate.main([*flags, "--resume"])
    told = "1 output ends at model.max_length=16 and may be incomplete, after 2 texts of the interrupted command\n"
    assert told in capsys.readouterr().err
