"""The commands that use a trained model: translate, generate, classify."""

import functools
import gzip
import io
import json
import math
import sys
from pathlib import Path

import pytest

import tformer_jax as tj
from tests.helpers import rest_slow
from tformer_jax import api
from tformer_jax.base.errors import UserError
from tformer_jax.cli import classify, generate, lines, score, serve, translate
from tformer_jax.inference import batching
from tformer_jax.inference.scores import Scorer
from tformer_jax.inference.text import Translator
from tformer_jax.runs.trained import load_trained

FAMILIES = ("seq2seq", "classifier", "decoder_lm")


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """Loads each run once for all tests, and gives all engines as many rows, so that few functions are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "load_trained", functools.cache(load_trained))
        patch.setattr("tformer_jax.inference.outputs.power_of_two", lambda needed: 64)
        yield


def translated(run: Path, texts: list[str]) -> list[str]:
    trained = load_trained(run)
    return Translator(trained.cfg, trained.model, trained.tokenizers)(trained.params, texts)


@pytest.mark.long
def test_the_python_api_returns_what_the_command_prints(runs, capsys):
    translate.main(["--run", str(runs["seq2seq"]), "abc", "cab", "--beams", "2"])
    assert capsys.readouterr().out.splitlines() == tj.load(runs["seq2seq"]).translate(["abc", "cab"], beams=2)


@pytest.mark.long
def test_translate_arguments_in_order(runs, capsys):
    translate.main(["--run", str(runs["seq2seq"]), "abc", "b"])
    assert capsys.readouterr().out.splitlines() == translated(runs["seq2seq"], ["abc", "b"])


@pytest.mark.slow
def test_translate_on_several_devices(runs, capsys):
    translate.main(["--run", str(runs["seq2seq"]), "--mesh", "data=2,tensor=2", "abc", "b"])
    assert capsys.readouterr().out.splitlines() == translated(runs["seq2seq"], ["abc", "b"])


@pytest.mark.long
def test_a_mesh_that_does_not_fit_the_model(runs):
    with pytest.raises(UserError, match="model.num_heads=2: must be a multiple of the mesh's tensor=4"):
        translate.main(["--run", str(runs["seq2seq"]), "--mesh", "tensor=4", "abc"])


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz"])
def test_translate_a_file_into_a_file(runs, tmp_path, name):
    lines = b"abc\n\nb\n"
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    arguments = ["--input", str(tmp_path / name), "--output", str(tmp_path / "out.txt")]
    translate.main(["--run", str(runs["seq2seq"]), *arguments])
    first, last = translated(runs["seq2seq"], ["abc", "b"])
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == f"{first}\n\n{last}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "out.txt", "out.txt.provenance.json"])


@pytest.mark.long
def test_translate_with_several_outputs_and_their_scores(runs, capsys):
    run = runs["seq2seq"]
    translate.main(["--run", str(run), "--n-best", "2", "--scores", "abc", "", "b"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [""] * 2
    actual = [line.split("\t") for line in (*lines[:2], *lines[4:])]
    for scores in ([float(value) for value, _ in part] for part in (actual[:2], actual[2:])):
        assert scores == sorted(scores, reverse=True)
    translate.main(["--run", str(run), "--beams", "2", "abc", "b"])
    assert capsys.readouterr().out.splitlines() == [actual[0][1], actual[2][1]]
    translate.main(["--run", str(run), "--beams", "1", "abc", "b"])
    assert capsys.readouterr().out.splitlines() == translated(run, ["abc", "b"])


def test_translate_standard_input(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\r\nb")))
    translate.main(["--run", str(runs["seq2seq"])])
    assert capsys.readouterr().out.splitlines() == translated(runs["seq2seq"], ["abc", "b"])


@pytest.mark.long
def test_translate_objects_into_objects(runs, tmp_path):
    records = [{"id": 1, "body": "abc"}, {"id": 2, "body": ""}, {"id": 3, "body": "b"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--field", "body", "--output", str(tmp_path / "out.jsonl.gz")]
    translate.main(["--run", str(runs["seq2seq"]), *arguments])
    with gzip.open(tmp_path / "out.jsonl.gz", "rt", encoding="utf-8") as file:
        actual = [json.loads(line) for line in file]
    expected = translated(runs["seq2seq"], ["abc", "", "b"])
    reasons = ["length", "stop", "length"]  # of six tokens each, and of a blank text
    rows = zip(records, expected, reasons, strict=True)
    for row, (record, text, reason) in zip(actual, rows, strict=True):
        added = {"outputs": [text], "finish_reasons": [reason], "unknown_tokens": [text.count("<unk>")]}
        assert row == {**record, **added}
    translate.main(["--run", str(runs["seq2seq"]), "abc", "--scores", "--n-best", "2", *arguments[-2:]])
    with gzip.open(tmp_path / "out.jsonl.gz", "rt", encoding="utf-8") as file:
        (record,) = map(json.loads, file)
    assert (record["text"], len(record["outputs"])) == ("abc", 2)
    assert record["scores"] == sorted(record["scores"], reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("size", rest_slow([0, 9, 70, 1, 40], 3))
def test_translate_resumes_a_file(runs, tmp_path, monkeypatch, size):
    monkeypatch.setattr(batching, "ROWS_PER_CHUNK", 3)
    (tmp_path / "in.txt").write_text("abc\n\nb\naabb\nca\n")
    flags = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt"), "--scores", "--n-best", "2"]
    command = ["--run", str(runs["seq2seq"]), *flags]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tformer_jax.cli.outputs.PartialFile.finish", interrupt)
        translate.main(command)
    partial = tmp_path / "out.txt.partial"
    whole = partial.read_bytes()
    partial.write_bytes(whole[:size])
    translate.main([*command, "--resume"])
    assert (tmp_path / "out.txt").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt", "out.txt.provenance.json"]
    assert len(whole) > 70


def interrupt(*_):
    raise KeyboardInterrupt


def test_another_command_cannot_resume_a_file(runs, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("abc\nb\n")
    command = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt"), "--resume"]
    run = ["--run", str(runs["seq2seq"])]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tformer_jax.cli.outputs.PartialFile.finish", interrupt)
        translate.main([*run, *command])

    def refused(*changed: str, problem: str) -> None:
        with pytest.raises(UserError, match=rf"started by another command \(.*{problem}"):
            translate.main([*run, *command, *changed])

    refused("--beams", "2", problem="decode.strategy: 'greedy' -> 'beam'; decode.beams: 4 -> 2")
    refused("--seed", "1", problem="command.seed: 0 -> 1")
    with monkeypatch.context() as patch:
        patch.setattr(
            lines, "run_identity", lambda run, step: {"folder": str(run), "files": "other", "checkpoints": []}
        )
        refused(problem="run.")
    (tmp_path / "in.txt").write_text("abc\nc\n")
    with pytest.raises(UserError, match="the input has changed since .*out.txt.partial was started: restore it"):
        translate.main([*run, *command])


@pytest.mark.long
def test_a_long_line_stops_a_command_and_is_corrected_before_resuming(runs, tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    command = ["--run", str(runs["seq2seq"]), "--input", str(source), "--output", str(output)]
    source.write_text(f"abc\nb\n{'a' * 16}\nca\n")
    sentence = (
        "in.txt, line 3: the source has 16 tokens, but the model takes at most 15: shorten it, or add --on-long-line"
    )
    with pytest.raises(UserError, match=sentence):
        translate.main(command)
    assert len((tmp_path / "out.txt.partial").read_text().splitlines()) == 2
    source.write_text("abc\nb\naab\nca\n")
    translate.main([*command, "--resume"])
    assert output.read_text().splitlines() == translated(runs["seq2seq"], ["abc", "b", "aab", "ca"])


@pytest.mark.slow
@pytest.mark.parametrize("action", ["truncate", "skip"])
def test_long_lines_are_cut_or_skipped(runs, tmp_path, capsys, action):
    def run(command, family: str, text: str, *flags: str) -> dict:
        (tmp_path / "in.txt").write_text(f"{text}\n")
        files = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl")]
        command.main(["--run", str(runs[family]), *files, "--on-long-line", action, *flags])
        assert "1 line was too long for the model and" in capsys.readouterr().err
        return json.loads((tmp_path / "out.jsonl").read_text())

    actual = run(translate, "seq2seq", "ab" * 10)
    (expected,) = translated(runs["seq2seq"], [("ab" * 10)[:15]])
    outputs = {"outputs": [expected], "finish_reasons": ["length"], "unknown_tokens": [expected.count("<unk>")]}
    if action == "skip":
        outputs = dict.fromkeys(outputs)
    assert actual == {"text": "ab" * 10, **outputs, "too_long": action}
    actual = run(classify, "classifier", "ab" * 10)
    assert (actual["label"] in ("x", "y")) == (action == "truncate")
    actual = run(score, "decoder_lm", "ab" * 10)
    assert actual["tokens"] == (16 if action == "truncate" else None)
    actual = run(score, "seq2seq", f"ab\t{'ab' * 10}")
    assert actual["tokens"] == (16 if action == "truncate" else None)
    assert actual["too_long"] == action


@pytest.mark.long
def test_classify_objects(runs, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "abc", "n": 1}\n{"text": " "}\n')
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    classify.main(["--run", str(runs["classifier"]), *arguments])
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["n"], first["text"], first["label"] in ("x", "y")) == (1, "abc", True)
    assert 0.5 <= first["probability"] <= 1
    assert second == {"text": " ", "label": None, "probability": None}


@pytest.mark.long
def test_classify_prints_label_probability_and_text(runs, capsys):
    classify.main(["--run", str(runs["classifier"]), "abc", "bb"])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in lines] == ["abc", "bb"]
    assert all(line[0] in ("x", "y") and 0.5 <= float(line[1]) <= 1 for line in lines)
    assert json.loads((runs["classifier"] / "labels.json").read_text()) == ["x", "y"]


@pytest.mark.slow
def test_generate_repeats_the_prompt_and_follows_the_seed(runs, capsys):
    def output(*arguments: str) -> str:
        generate.main(["--run", str(runs["decoder_lm"]), "abc", *arguments])
        return capsys.readouterr().out

    greedy = output()
    assert output("abc") == f"{greedy}{generate.SEPARATOR}{greedy}"
    assert greedy.startswith("abc")
    assert len(greedy) <= 3 + 6 + 1
    assert output("--max-new-tokens", "2") == greedy[:5] + "\n"
    sampled = output("--samples", "3", "--temperature", "2", "--seed", "4")
    assert sampled.count("abc") >= 3
    assert sampled == output("--samples", "3", "--temperature", "2", "--seed", "4")
    assert sampled != output("--samples", "3", "--temperature", "2", "--seed", "5")
    assert output("--top-k", "1") == greedy


@pytest.mark.long
def test_outputs_of_prompts_before_one_that_fails(runs, capsys):
    command = ["--run", str(runs["decoder_lm"]), "abc"]
    generate.main(command)
    first = capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"^text 2: the prompt has 20 tokens.*, or add --on-long-line truncate or skip$"
    ):
        generate.main([*command, "ab" * 10])
    assert capsys.readouterr().out == first
    generate.main([*command, "ab" * 10, "--on-long-line", "skip"])
    actual = capsys.readouterr()
    assert actual.out == f"{first}{generate.SEPARATOR}\n"
    assert actual.err == (
        "1 line was too long for the model and was skipped: text 2\n"
        "1 output ends at decode.max_new_tokens=6 and may be incomplete\n"
    )


@pytest.mark.long
def test_generate_one_line_per_sample(runs, capsys, monkeypatch, tmp_path):
    flags = ["--run", str(runs["decoder_lm"]), "--samples", "2", "--seed", "3", "--scores"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\nb\n")))
    generate.main(flags)
    actual = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[1][0] for line in actual] == ["a", "a", "b", "b"]
    assert all(float(value) < 0 for value, _ in actual)
    generate.main([*flags, "abc"])
    alone = capsys.readouterr().out.split(generate.SEPARATOR)
    assert [line.split("\t", 1)[1].strip() for line in alone] == [line[1].strip() for line in actual[:2]]
    (tmp_path / "in.txt").write_text("abc\nb\n")
    output = tmp_path / "out.jsonl"
    generate.main([*flags, "--input", str(tmp_path / "in.txt"), "--output", str(output)])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["text"] + text for record in records for text in record["outputs"]] == [line[1] for line in actual]


@pytest.mark.long
@pytest.mark.parametrize(("command", "run"), [(translate, "seq2seq"), (generate, "decoder_lm")])
def test_an_interactive_prompt_answers(runs, monkeypatch, capsys, command, run):
    typed = iter(["abc", "a" * 17])
    monkeypatch.setattr("builtins.input", lambda _: next(typed, None) or interrupt_with(EOFError()))
    command.main(["--run", str(runs[run]), "--interactive"])
    actual = capsys.readouterr()
    monkeypatch.undo()
    command.main(["--run", str(runs[run]), "abc"])
    assert actual.out == capsys.readouterr().out.removeprefix("abc" if run == "decoder_lm" else "") + "\n"
    assert "has 17 tokens, but the model takes at most 15" in actual.err


def interrupt_with(error):
    raise error


@pytest.mark.long
def test_score_pairs(runs, capsys, tmp_path):
    run, pairs = runs["seq2seq"], [("abc", "cba"), ("b", "aab"), ("", "c")]
    trained = load_trained(run)
    expected = list(Scorer(trained.cfg, trained.model, trained.tokenizers).stream(trained.params, pairs))
    score.main(["--run", str(run), *("\t".join(pair) for pair in pairs)])
    actual = capsys.readouterr()
    shown = [
        (f"{result.total:.4f}", str(len(result.tokens)), pair[1]) for result, pair in zip(expected, pairs, strict=True)
    ]
    assert [tuple(line.split("\t")) for line in actual.out.splitlines()] == shown
    tokens = sum(len(result.tokens) for result in expected)
    perplexity = math.exp(-sum(result.total for result in expected) / tokens)
    assert actual.err == f"perplexity {perplexity:.4g} (tokens: {tokens}, texts: 3)\n"

    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"source": s, "de": t, "n": 1}) + "\n" for s, t in pairs))
    arguments = ["--target-field", "de", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    score.main(["--run", str(run), *arguments])
    actual = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    added = [
        {"log_probability": result.total, "tokens": len(result.tokens), "unknown_tokens": result.tokens.count(3)}
        for result in expected
    ]
    assert actual == [{"source": s, "de": t, "n": 1, **more} for (s, t), more in zip(pairs, added, strict=True)]


@pytest.mark.long
def test_score_each_token_of_a_text(runs, capsys):
    score.main(["--run", str(runs["decoder_lm"]), "--per-token", "abc", "b"])
    actual = capsys.readouterr()
    first, second = map(json.loads, actual.out.splitlines())
    assert (first["text"], first["tokens"], len(first["log_probabilities"])) == ("abc", ["b", "c"], 2)
    assert first["log_probability"] == pytest.approx(sum(first["log_probabilities"]))
    assert second == {"text": "b", "log_probability": 0.0, "tokens": [], "unknown_tokens": 0, "log_probabilities": []}
    score.main(["--run", str(runs["decoder_lm"]), "b"])
    assert capsys.readouterr().err == "perplexity unknown (tokens: 0, texts: 0, texts without a scored token: 1)\n"
    score.main(["--run", str(runs["seq2seq"]), "--per-token", "a\tb"])
    assert json.loads(capsys.readouterr().out)["tokens"] == ["b", "</s>"]


@pytest.mark.parametrize(
    ("command", "run", "arguments", "sentence"),
    [
        (translate, "decoder_lm", ["x"], r"translate: .* holds a decoder_lm model; use generate"),
        (generate, "seq2seq", ["x"], r"holds a seq2seq model; use translate"),
        (classify, "seq2seq", ["x"], r"holds a seq2seq model; use translate"),
        (
            translate,
            "seq2seq",
            ["a" * 16],
            "text 1: the source has 16 tokens, .* at most 15: shorten it, or add --on-long-line truncate or skip",
        ),
        (generate, "decoder_lm", ["a" * 16], "the prompt has 16 tokens, but the model takes at most 15"),
        (generate, "decoder_lm", ["a", "--temperature", "-1"], "decode.temperature=-1.0: must be at least"),
        (translate, "seq2seq", ["x", "--beams", "2", "--n-best", "3"], "3 outputs need --beams of at least 3"),
        (translate, "seq2seq", ["x", "--beams", "1001"], "decode.beams=1001: must be at most 256"),
        (translate, "seq2seq", ["--input", "nowhere.txt"], "nowhere.txt does not exist"),
        (translate, "seq2seq", ["x", "--output", "nowhere/out.txt"], "folder nowhere does not exist"),
        (translate, "seq2seq", ["x", "--input", "in.txt"], "on the command line or with --input, not both"),
        (translate, "seq2seq", ["x", "--output", "o.txt", "--resume"], "--resume needs --output FILE and --input FILE"),
        (translate, "seq2seq", ["x", "--interactive"], "--interactive cannot be combined with texts"),
        (translate, "seq2seq", ["x", "", "a" * 16], "text 3: the source has 16 tokens"),
        (score, "seq2seq", ["x"], "text 1: has 1 column where source<tab>target is expected"),
        (score, "classifier", ["x"], "holds a classifier model; use classify"),
        (generate, "decoder_lm", ["x", "--input", "in.txt"], "or with --input, not both"),
        (translate, "missing", ["x"], "missing does not exist; name the run folder"),
        (serve, "missing", ["--port", "0"], "missing does not exist; name the run folder"),
        (serve, "seq2seq", ["--port", "65536"], "--port 65536: must be at most 65535"),
        (serve, "seq2seq", ["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000: Cannot assign requested address"),
    ],
)
def test_mistakes(runs, command, run, arguments, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        command.main(["--run", str(runs[run] if run in FAMILIES else run), *arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"", "in.txt is empty"), (b"a\n\xff\n", "in.txt, line 2: not valid UTF-8")]
)
def test_unreadable_input(runs, tmp_path, content, sentence):
    (tmp_path / "in.txt").write_bytes(content)
    arguments = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt")]
    with pytest.raises(UserError, match=sentence):
        translate.main(["--run", str(runs["seq2seq"]), *arguments])
    assert not (tmp_path / "out.txt").exists()


def test_standard_input_that_is_not_utf8(runs, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n\xc3\n")))
    with pytest.raises(UserError, match="standard input, line 3: not valid UTF-8"):
        translate.main(["--run", str(runs["seq2seq"])])
