"""Test sets of `evaluate.py`: lines with several references, records with documents and languages, and mistakes."""

import gzip
import json
import os
import types

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, test_sets
from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.tasks.evaluators.directions import group_directions
from tformer_jax.tasks.evaluators.evaluation import Segment


def read(*flags: object) -> list[Segment] | None:
    return test_sets.read_test_set(evaluate.parser().parse_args(["--run", "r", *map(str, flags)]))


def test_lines_with_several_references(tmp_path):
    (tmp_path / "s").write_text("a b\n\nc\n")
    (tmp_path / "r").write_text("A\nB\nC\n")
    with gzip.open(tmp_path / "q.gz", "wt") as file:
        file.write("1\n2\n3\n")
    actual = read("--source", tmp_path / "s", "--reference", tmp_path / "r", tmp_path / "q.gz")
    assert actual == [Segment("a b", ("A", "1")), Segment("", ("B", "2")), Segment("c", ("C", "3"))]
    actual = read("--source", tmp_path / "s", "--reference", tmp_path / "r", "--direction", "en-pt_BR")
    assert actual[0] == Segment("a b", ("A",), "en-pt_BR")
    assert read() is None


def test_examples_without_text_are_left_out_and_counted(tmp_path, caplog):
    (tmp_path / "s").write_text("a\n \n\u200b\nb\n", encoding="utf-8")
    (tmp_path / "r").write_text("A\n\n\u00a0\n\n", encoding="utf-8")
    assert read("--source", tmp_path / "s", "--reference", tmp_path / "r") == [
        Segment("a", ("A",)),
        Segment("b", ("",)),
    ]
    assert "s: 2 of 4 examples are left out, because their source and references are blank" in caplog.text
    (tmp_path / "s.tsv").write_text("source\ttarget\na\tA\n\u200b\t \n\t\n\n", encoding="utf-8")
    assert read("--source", tmp_path / "s.tsv") == [Segment("a", ("A",))]
    assert "s.tsv: 3 of 4 examples are left out" in caplog.text
    languages = ("--language-fields", "from", "to")
    (tmp_path / "s.tsv").write_text("from\tto\tsource\ttarget\nen \tpt_BR\ta\tA\n\nen\tde\t \t\n", encoding="utf-8")
    assert read("--source", tmp_path / "s.tsv", *languages) == [Segment("a", ("A",), "en-pt_BR")]
    record = {"from": "en", "to": "de", "source": "a", "target": "A"}
    (tmp_path / "s.jsonl").write_text(f"{json.dumps(record)}\n\n")
    assert read("--source", tmp_path / "s.jsonl", *languages) == [Segment("a", ("A",), "en-de")]
    assert "s.jsonl: 1 of 2 examples are left out" in caplog.text
    (tmp_path / "s.jsonl").write_text(json.dumps(record | {"to": "en"}))
    with pytest.raises(UserError, match="the languages 'en' and 'en' in the fields of --language-fields must be two"):
        read("--source", tmp_path / "s.jsonl", *languages)
    (tmp_path / "s.tsv").write_text("source\ttarget\na\t \n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2: has no reference in 'target': write one, or remove the record"):
        read("--source", tmp_path / "s.tsv")
    (tmp_path / "s.tsv").write_text("source\ttarget\n\t \n")
    with pytest.raises(UserError, match="has no text: write a source"):
        read("--source", tmp_path / "s.tsv")


@pytest.mark.parametrize(("longer", "shorter"), [("s", "r"), ("r", "s")])
def test_a_line_without_a_partner_is_named(tmp_path, longer, shorter):
    (tmp_path / longer).write_text("a\nb\nc\n")
    (tmp_path / shorter).write_text("a\nb\n")
    with pytest.raises(UserError, match=f"/{longer}, line 3: has no partner, because .*/{shorter} ends after 2 lines"):
        read("--source", tmp_path / "s", "--reference", tmp_path / "r")


def test_records_of_tsv_and_jsonl(tmp_path):
    rows = [("d1", "en", "pt-BR", "one", "um", "hum"), ("d2", "de", "en", "zwei", "two", "2")]
    names = ("doc", "sl", "tl", "src", "ref", "ref2")
    (tmp_path / "a.tsv").write_text("".join("\t".join(row) + "\n" for row in (names, *rows)))
    records = [{**dict(zip(names[:4], row[:4], strict=True)), "refs": list(row[4:])} for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ("--source-field", "src", "--document-field", "doc", "--language-fields", "sl", "tl", "--reference-field")
    expected = [
        Segment("one", ("um", "hum"), "en-pt_BR", "d1"),
        Segment("zwei", ("two", "2"), "de-en", "d2"),
    ]
    assert read("--source", tmp_path / "a.tsv", *flags, "ref", "ref2") == expected
    assert read("--source", tmp_path / "a.jsonl", *flags, "refs") == expected
    (tmp_path / "c.tsv").write_text("source\ttarget\tb\nx\ty\t\nz\tu\tv\n")
    actual = read("--source", tmp_path / "c.tsv", "--reference-field", "target", "b")
    assert [segment.references for segment in actual] == [("y",), ("u", "v")]
    (tmp_path / "n.jsonl").write_text('{"source": "a", "target": "b", "doc": null}\n')
    assert read("--source", tmp_path / "n.jsonl", "--document-field", "doc") == [Segment("a", ("b",))]
    (tmp_path / "d.tsv").write_text("source\ttarget\ttarget\nx\ty\tz\n")
    with pytest.raises(UserError, match=r"d.tsv, line 1: names two columns 'target': rename one of them"):
        read("--source", tmp_path / "d.tsv")
    os.mkfifo(tmp_path / "pipe.tsv")
    with pytest.raises(UserError, match=r"pipe.tsv is not a regular file, and it must be read more than once: copy it"):
        read("--source", tmp_path / "pipe.tsv")
    (tmp_path / "c.jsonl").write_text('{"source": "a", "target": null}\n')
    with pytest.raises(UserError, match="c.jsonl, line 1: has no reference in 'target'"):
        read("--source", tmp_path / "c.jsonl")
    with pytest.raises(
        UserError, match=r"a.tsv, line 2: has no field 'target', only 'doc', .* with --reference-field \(line 1 names"
    ):
        read("--source", tmp_path / "a.tsv", "--source-field", "src")
    (tmp_path / "b.tsv").write_text("source\ttarget\n")
    with pytest.raises(UserError, match=r"b.tsv has only a header, no example: write one in each line after it"):
        read("--source", tmp_path / "b.tsv")
    (tmp_path / "b.tsv").write_text("source\ttarget\na\t\n")
    with pytest.raises(UserError, match=r"b.tsv, line 2: has no reference in 'target': .* remove the record$"):
        read("--source", tmp_path / "b.tsv")
    (tmp_path / "b.tsv").write_text("source\ttarget\na\tb\nc\n")
    with pytest.raises(UserError, match=r"b.tsv, line 3: has 1 column where the first line has 2"):
        read("--source", tmp_path / "b.tsv")
    for value, kind in (("[1]", "int"), ("0", "int"), ('["b", false]', "bool"), ('["b", {}]', "dict")):
        (tmp_path / "b.jsonl").write_text(f'{{"source": "a", "target": {value}}}\n')
        with pytest.raises(UserError, match=f"b.jsonl, line 1: field 'target' is {kind}, not text"):
            read("--source", tmp_path / "b.jsonl")


@pytest.mark.parametrize("parts", [[{"name": "en-de"}], []])
def test_trained_directions_are_named_as_those_of_test_sets(tmp_path, parts):
    """Regression test: all directions were zero-shot ones. An earlier run with one direction has no parts."""
    letters = CharacterTokenizer("ab").extended(["deu_Latn", "eng_Latn", "fra_Latn"])
    files = {"train": ("{src}-{tgt}.tsv",), "validation": ("{src}-{tgt}.tsv",)}
    data = DataConfig(source="tsv", **files, directions=("en-de",), zero_shot=("de-fr",))
    tokenizers = Tokenizers(letters, letters)
    run = types.SimpleNamespace(path=tmp_path, config=types.SimpleNamespace(data=data), tokenizers=tokenizers)
    (tmp_path / "data.json").write_text(json.dumps({"splits": {"train": {"parts": parts}}}))
    given = [Segment("a", ("b",), "en-German"), Segment("a", ("b",), "deu-fr")]
    directions = [segment.direction for segment in test_sets.with_directions_of(run, given)]
    with pytest.raises(UserError, match="direction en-germna: the model has no language 'germna'; did you mean"):
        test_sets.with_directions_of(run, [Segment("a", ("b",), "en-germna")])
    trained = evaluate.trained_directions(run)
    assert trained == ("eng_Latn-deu_Latn",)
    assert group_directions(directions, trained) == {"zero-shot": ["deu_Latn-fra_Latn"]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--reference", "r"), "--reference is used only with --source FILE, which names a test set"),
        (("--document-field", "d"), "--document-field is used only with --source FILE"),
        (("--source", "s"), "--source needs --reference FILE, the references of its lines"),
        (("--source", "s", "--source-field", "d"), "--source-field names a field of records: --source must be named"),
        (("--source", "s.tsv", "--reference", "r"), "--reference names files of lines: leave it out, or name"),
        (("--source", "s", "--reference", "r", "--direction", "en"), "--direction 'en' must be two different codes"),
    ],
)
def test_options_that_contradict_each_other(flags, message):
    with pytest.raises(UserError, match=message):
        read(*flags)
