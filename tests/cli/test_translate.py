"""What translate.py writes for unknown tokens, and says about them."""

import json
from pathlib import Path

import pytest

import tformer_jax as tj
from tests.cli.finished_runs import finish
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, translate
from tformer_jax.config import DataConfig

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
pytestmark = pytest.mark.slow
SAMPLES = ["--strategy", "sample", "--temperature", "9", "--n-best", "8", "--max-new-tokens", "8", "--seed", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    rows = (f"{word} {word}\t{word.upper()} {word.upper()}" for word in WORDS)
    (folder / "pairs.tsv").write_text("".join(f"{row}\n" for row in rows))
    data = {"tokenizer": "words", "vocab_size": 8, "shared_vocab": False}
    sizes = {"bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
    return finish("seq2seq", folder, DataConfig(source="tsv", train="pairs.tsv", **data, **sizes))


def translations(run: Path, capsys, *flags: str) -> tuple[list[str], str]:
    translate.main(["--run", str(run), "one zebra", "six", *SAMPLES, *flags])
    written = capsys.readouterr()
    return written.out.splitlines(), written.err


def test_unknown_tokens_are_written_and_counted(run, capsys):
    shown, told = translations(run, capsys)
    count = sum("<unk>" in line for line in shown)
    assert 0 < count < len(shown) == 16
    assert f"{count} of 16 outputs have unknown tokens, shown by name (decode.unknown='show')\n" in told
    omitted, told = translations(run, capsys, "--unknown", "omit")
    assert omitted == [" ".join(line.replace("<unk>", "").split()) for line in shown]
    assert f"{count} of 16 outputs have unknown tokens, left out (decode.unknown='omit')\n" in told
    copied, told = translations(run, capsys, "--unknown", "copy")
    assert f"{count} of 16 outputs have unknown tokens, replaced by words of the source" in told
    for number, (line, with_names) in enumerate(zip(copied, shown, strict=True)):
        source = ["one", "zebra"] if number < 8 else ["six"]
        pairs = list(zip(line.split(), with_names.split(), strict=True))
        assert all(word in source if name == "<unk>" else word == name for word, name in pairs)
    assert any("zebra" in line for line in copied[:8])


def test_an_evaluation_has_the_share_of_outputs_with_unknown_tokens(run, tmp_path, capsys):
    record = tmp_path / "found.json"
    evaluate.main(["--run", str(run), "--data", str(run.parent), "--record", str(record), "--unknown", "copy"])
    actual = json.loads(record.read_text())
    assert 0 <= actual["metrics"]["unknown_outputs"] <= 100
    assert actual["decode"]["unknown"] == "copy"
    assert "unknown_outputs" in capsys.readouterr().out


def test_an_ensemble_of_a_run_with_itself_is_the_run(run, tmp_path, capsys):
    alone, _ = translations(run, capsys)
    together, _ = translations(run, capsys, "--ensemble", str(run))
    assert together == alone
    metrics = []
    for flags in ([], ["--ensemble", str(run)]):
        record = tmp_path / "found.json"
        evaluate.main(["--run", str(run), "--data", str(run.parent), "--record", str(record), *flags])
        metrics.append(json.loads(record.read_text()))
    assert metrics[1]["metrics"] == pytest.approx(metrics[0]["metrics"], rel=1e-5)
    assert list(metrics[1]["ensemble"]) == [str(run)]
    assert "with 1 other run" in capsys.readouterr().out


def test_an_ensemble_needs_the_same_vocabulary(run, tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}x\t{word}y\n" for word in WORDS))
    sizes = {"bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
    data = {"tokenizer": "words", "vocab_size": 8, "shared_vocab": False}
    other = finish("seq2seq", tmp_path, DataConfig(source="tsv", train="pairs.tsv", **data, **sizes))
    with pytest.raises(UserError, match=r"has another vocabulary than .*: train it with data.tokenizer='file'"):
        translate.main(["--run", str(run), "--ensemble", str(other), "one"])


def test_a_mean_needs_an_ensemble(run):
    with pytest.raises(UserError, match="--mean is for an ensemble: add --ensemble DIR"):
        translate.main(["--run", str(run), "--mean", "log_probabilities", "one"])
    with pytest.raises(UserError, match="mean='sum': must be 'probabilities' or 'log_probabilities'"):
        tj.load(run, ensemble=[run], mean="sum")
    with pytest.raises(UserError, match="nowhere does not exist"):
        translate.main(["--run", str(run), "--ensemble", "nowhere", "one"])
