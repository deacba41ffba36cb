"""Languages and prefixes of texts: flags, columns and fields of lines."""

import hashlib
import json
import re
import types
from pathlib import Path

import pytest

import tformer_jax as tj
from tests.cli.finished_runs import run_of_many_languages
from tests.helpers import tiny
from tests.test_api import DATA, run_of
from tformer_jax.base.errors import UserError
from tformer_jax.cli import attention, generate, generation, languages, outputs, score, translate
from tformer_jax.config import Config, DecodeConfig

FIELDS = ("--to-field", "to", "--from-field", "from", "--prefix-field", "start")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_of_many_languages(tmp_path_factory.mktemp("runs"))


@pytest.mark.long
def test_lines_have_languages_and_prefixes(run, tmp_path, capsys):
    """By flags, by column and by field; a line without one has that of the flag, and of the run."""
    requests = [
        tj.Request("abc", "de", "en"),
        tj.Request("abc", "fr", "en"),
        tj.Request("bca", "fr", "de", prefix="ab"),
        tj.Request("cab", "de", "en", prefix="c"),
    ]
    actual = tj.load(run).outputs(requests, 1)
    expected = [output.text for (output,) in actual]
    assert [expected[2][:2], expected[3][:1]] == ["ab", "c"]
    rows = [("abc", "", "", ""), ("abc", "French", "en", ""), ("bca", "fr", "deu", "ab"), ("cab", "de", "en", "c")]
    columns, records = tmp_path / "in.tsv", tmp_path / "in.jsonl"
    columns.write_text("".join("\t".join(row) + "\n" for row in rows))
    named = [dict(zip(("text", "to", "from", "start"), row, strict=True)) for row in rows]
    named[0] = {"text": "abc", "id": 7, "to": None}
    records.write_text("".join(json.dumps(record) + "\n" for record in named))
    flags = ["--run", str(run), "--to", "German", "--from", "en", *FIELDS]
    translate.main([*flags, "--input", str(columns)])
    assert capsys.readouterr().out.splitlines() == expected
    translate.main([*flags, "--input", str(records), "--scores", "--output", str(tmp_path / "out.jsonl")])
    written = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert [(record["outputs"][0], record["scores"][0]) for record in written] == [tuple(out[:2]) for (out,) in actual]
    assert (written[0]["id"], written[2]["start"]) == (7, "ab")
    translate.main(["--run", str(run), "--to", "de", "--from", "English", "abc"])
    assert capsys.readouterr().out.splitlines() == expected[:1]


@pytest.mark.long
def test_pairs_have_languages(run, capsys):
    score.main(["--run", str(run), "--to", "de", "--from", "en", "--to-field", "to", "abc\tcba\t", "abc\tcba\tfr"])
    written = capsys.readouterr()
    expected = tj.load(run).score([("abc", "cba")] * 2, to=["de", "fr"], source_language="en")
    assert written.out.splitlines() == [f"{actual.total:.4f}\t4\tcba" for actual in expected]
    assert expected[0].total != expected[1].total
    assert "tokens: 8, texts: 2" in written.err


@pytest.mark.long
def test_the_page_of_attention_has_the_tags(run, tmp_path):
    page = tmp_path / "page.html"
    attention.main(["--run", str(run), "--to", "fr", "--from", "en", "abc", "--output", str(page)])
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    decoder = next(each for each in json.loads(data)["attentions"] if each["name"] == "decoder")
    assert decoder["keys"][:3] == ["<s>", "<2en>", "<2fr>"]


@pytest.mark.parametrize(("command", "text"), [(score, "ab"), (attention, "ab")])
def test_a_language_model_has_no_languages(command, text, monkeypatch):
    model = run_of(Config(model=tiny("decoder_lm"), data=DATA["decoder_lm"]))
    monkeypatch.setattr("tformer_jax.load", lambda path, **options: model)
    with pytest.raises(UserError, match="languages have no effect for model.family='decoder_lm': leave them out"):
        command.main(["--run", "runs/x", "--to", "de", text])


@pytest.mark.parametrize(
    ("command", "flags", "problem"),
    [
        (translate, ["--from", "en", "abc"], "text 1: the target language is missing: name one of de, fr"),
        (
            translate,
            ["--to", "de", "--from", "en", "--to-field", "to", "a\tde", "a\tgr"],
            "text 2: the .* 'gr'; did you",
        ),
        (translate, ["--to-field", "to", "abc"], "text 1: has 1 column where text<tab>to is expected"),
        (
            translate,
            ["--to-field", "to", "--interactive"],
            "--interactive cannot be combined with --to-field: omit one",
        ),
        (score, ["--to", "en", "--from", "en", "a\tb"], "text 1: the model has no target language 'en', only de, fr"),
    ],
)
def test_mistakes(run, command, flags, problem):
    with pytest.raises(UserError, match=problem):
        command.main(["--run", str(run), *flags])


def test_generate_has_no_languages():
    with pytest.raises(UserError, match="unknown flag '--to'"):
        generate.main(["--run", "run", "--to", "de"])


@pytest.mark.slow
def test_lines_have_constraints(run, tmp_path, capsys):
    """By field and by column; records say whether they are met, and a wrong one is located."""
    records, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given = [["ba", ["c", "cc"]], None, "ab"]
    records.write_text("".join(json.dumps({"text": "abc", "must": each}) + "\n" for each in given))
    flags = ["--run", str(run), "--to", "de", "--from", "en", "--beams", "3", "--constraints-field", "must"]
    translate.main([*flags, "--input", str(records), "--output", str(out)])
    written = list(map(json.loads, out.read_text().splitlines()))
    requests = [tj.Request("abc", "de", "en", constraints=each or ()) for each in given]
    expected = tj.load(run).outputs(requests, 1, beams=3)
    assert [record["outputs"][0] for record in written] == [output.text for (output,) in expected]
    assert [record["constraints_met"][0] for record in written] == [output.constraints_met for (output,) in expected]
    assert [output.constraints_met for (output,) in expected][1:] == [None, True]
    capsys.readouterr()
    translate.main([*flags, "abc\tab", "abc\t"])
    assert capsys.readouterr().out.splitlines() == [expected[2][0].text, expected[1][0].text]
    records.write_text('{"text": "a", "must": [[]]}\n')
    with pytest.raises(UserError, match="line 1: constraints must be a text, or a list of texts"):
        translate.main([*flags, "--input", str(records)])


@pytest.mark.slow
@pytest.mark.parametrize("command", [translate, score])
def test_outputs_of_other_languages_are_not_resumed(run, tmp_path, capsys, command):
    lines, out = tmp_path / "in.tsv", tmp_path / "out.jsonl"
    lines.write_text("abc\tcba\n" if command is score else "abc\n")
    flags = ["--run", str(run), "--input", str(lines), "--output", str(out), "--from", "en"]
    command.main([*flags, "--to", "de"])
    with pytest.raises(SystemExit):
        command.main([*flags, "--to", "de", "--resume"])
    assert "is complete: remove it, or leave out --resume" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"was written by another command \(languages.target_language: 'de' -> 'fr'\)"):
        command.main([*flags, "--to", "fr", "--resume"])


def test_what_determines_outputs_has_topics(tmp_path):
    parser = generation.make_parser("translate", "", "--n-best")
    languages.add_languages(parser)
    options = parser.parse_args(["--run", "x", "--to", "de", "a"])
    decode = DecodeConfig(strategy="beam", beams=2, glossary=str(tmp_path / "terms.tsv"))
    model = types.SimpleNamespace(tokenizers=types.SimpleNamespace(placeholders=()))
    actual = []
    for text in ("a\tb\n", "a\tc\n"):
        (tmp_path / "terms.tsv").write_text(text)
        actual.append(generation.Generation(options, None, decode, model).work(str).facts)
        assert actual[-1]["languages"] == {"target_language": "de"}
        assert actual[-1]["glossary"] == {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    (change,) = outputs.fact_differences(*actual)
    assert change.startswith("glossary.sha256: ")
