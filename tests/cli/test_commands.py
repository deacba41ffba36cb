"""The commands that use a trained model: translate, generate, classify."""

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from tformer_jax.cli import classify, common, generate, translate
from tformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from tformer_jax.inference.text import Translator
from tformer_jax.train import experiment, loop
from tformer_jax.train.trained import load_trained

SMALL = {"dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "ffn_dim": 8, "max_length": 16}


def train(family: str, folder: Path, data: DataConfig) -> Path:
    cfg = Config(
        model=ModelConfig(family=family, **SMALL),
        data=data,
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=1),
        train=TrainConfig(steps=1),
        parallel=ParallelConfig(data=1),
        decode=DecodeConfig(max_new_tokens=6),
        eval=EvalConfig(batch_size=4, samples=1),
    )
    loop.run(experiment.build(cfg, folder / family, data_root=folder))
    return folder / family


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run of one step of each family."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["abc", "bca", "cabb", "ac", "bb", "cc", "aabb", "b", "ca", "acab"]
    (folder / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    (folder / "labels.tsv").write_text("".join(f"{'xy'[n % 2]}\t{word}\n" for n, word in enumerate(words)))
    (folder / "text.txt").write_text(" ".join(words * 5))
    lengths = {"tokenizer": "characters", "bucket_lengths": (8,), "batch_tokens": 32, "batch_multiple": 1}
    windows = {"tokenizer": "characters", "batching": "windows", "window": 8, "batch_size": 2}
    return {
        "seq2seq": train("seq2seq", folder, DataConfig(source="tsv", train="pairs.tsv", **lengths)),
        "classifier": train("classifier", folder, DataConfig(source="tsv", train="labels.tsv", **lengths)),
        "decoder_lm": train("decoder_lm", folder, DataConfig(source="text", train="text.txt", **windows)),
    }


def translated(run: Path, texts: list[str]) -> list[str]:
    trained = load_trained(run)
    return Translator(trained.cfg, trained.model, trained.tokenizers)(trained.params, texts)


def test_translate_arguments_in_order(runs, capsys):
    translate.main(["--run", str(runs["seq2seq"]), "abc", "b"])
    assert capsys.readouterr().out.splitlines() == translated(runs["seq2seq"], ["abc", "b"])


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz"])
def test_translate_a_file_into_a_file(runs, tmp_path, name):
    lines = b"abc\n\nb\n"
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    arguments = ["--input", str(tmp_path / name), "--output", str(tmp_path / "out.txt")]
    translate.main(["--run", str(runs["seq2seq"]), *arguments])
    first, last = translated(runs["seq2seq"], ["abc", "b"])
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == f"{first}\n\n{last}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "out.txt"])


def test_translate_with_several_outputs_and_their_scores(runs, capsys):
    run = runs["seq2seq"]
    translate.main(["--run", str(run), "--n-best", "3", "--scores", "abc", "", "b"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:6] == [""] * 3
    found = [line.split("\t") for line in (*lines[:3], *lines[6:])]
    for scores in ([float(score) for score, _ in part] for part in (found[:3], found[3:])):
        assert scores == sorted(scores, reverse=True)
    translate.main(["--run", str(run), "--beams", "3", "abc", "b"])
    assert capsys.readouterr().out.splitlines() == [found[0][1], found[3][1]]
    translate.main(["--run", str(run), "--beams", "1", "abc", "b"])
    assert capsys.readouterr().out.splitlines() == translated(run, ["abc", "b"])


def test_translate_standard_input(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\r\nb")))
    translate.main(["--run", str(runs["seq2seq"])])
    assert capsys.readouterr().out.splitlines() == translated(runs["seq2seq"], ["abc", "b"])


def test_classify_prints_label_probability_and_text(runs, capsys):
    classify.main(["--run", str(runs["classifier"]), "abc", "bb"])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in lines] == ["abc", "bb"]
    assert all(line[0] in ("x", "y") and 0.5 <= float(line[1]) <= 1 for line in lines)
    assert json.loads((runs["classifier"] / "labels.json").read_text()) == ["x", "y"]


def test_generate_repeats_the_prompt_and_follows_the_seed(runs, capsys):
    def output(*arguments: str) -> str:
        generate.main(["--run", str(runs["decoder_lm"]), "--prompt", "abc", *arguments])
        return capsys.readouterr().out

    greedy = output()
    assert greedy.startswith("abc")
    assert len(greedy) <= 3 + 6 + 1
    assert output("--max-new-tokens", "2") == greedy[:5] + "\n"
    sampled = output("--samples", "3", "--temperature", "2", "--seed", "4")
    assert sampled.count("abc") >= 3
    assert sampled == output("--samples", "3", "--temperature", "2", "--seed", "4")
    assert sampled != output("--samples", "3", "--temperature", "2", "--seed", "5")
    assert output("--top-k", "1") == greedy


@pytest.mark.parametrize(
    ("command", "run", "arguments", "sentence"),
    [
        (translate, "decoder_lm", ["x"], r"holds a decoder_lm model: use scripts/generate.py"),
        (generate, "seq2seq", ["--prompt", "x"], r"holds a seq2seq model: use scripts/translate.py"),
        (classify, "seq2seq", ["x"], r"holds a seq2seq model: use scripts/translate.py"),
        (translate, "seq2seq", ["a" * 16], "the source has 16 tokens, but the model takes at most 15: shorten it"),
        (generate, "decoder_lm", ["--prompt", "a" * 16], "the prompt has 16 tokens, but the model takes at most 15"),
        (generate, "decoder_lm", ["--prompt", ""], "the prompt is empty"),
        (generate, "decoder_lm", ["--prompt", "a", "--temperature", "0"], "decode.temperature=0.0: must be at least"),
        (translate, "seq2seq", ["x", "--beams", "2", "--n-best", "3"], "--n-best 3 needs at least as many beams"),
        (translate, "seq2seq", ["--input", "nowhere.txt"], "nowhere.txt does not exist"),
        (translate, "seq2seq", ["x", "--output", "nowhere/out.txt"], "folder nowhere does not exist"),
        (translate, "seq2seq", ["x", "--input", "in.txt"], "on the command line or with --input, not both"),
        (translate, "missing", ["x"], "missing does not exist; name the run folder"),
    ],
)
def test_mistakes(runs, command, run, arguments, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        command.main(["--run", str(runs.get(run, run)), *arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"", "in.txt is empty"), (b"a\n\xff\n", "in.txt, line 2: not valid UTF-8")]
)
def test_unreadable_input(runs, tmp_path, content, sentence):
    (tmp_path / "in.txt").write_bytes(content)
    arguments = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt")]
    with pytest.raises(ConfigError, match=sentence):
        translate.main(["--run", str(runs["seq2seq"]), *arguments])
    assert not (tmp_path / "out.txt").exists()


def test_standard_input_that_is_not_utf8(runs, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n\xc3\n")))
    with pytest.raises(ConfigError, match="standard input, line 3: not valid UTF-8"):
        translate.main(["--run", str(runs["seq2seq"])])


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [(ConfigError("a sentence"), 2, "error: a sentence\n"), (KeyboardInterrupt(), 130, "")],
)
def test_how_a_command_ends(raised, status, message, capsys):
    def main() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        common.run_main(main)
    assert ended.value.code == status
    assert capsys.readouterr().err == message
