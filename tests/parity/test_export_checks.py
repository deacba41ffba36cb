"""The command that exports compares the written files with the run by other libraries, and writes nothing else."""

import json
import warnings

import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import rest_slow
from tests.parity import own_runs
from tformer_jax.base.errors import UserError
from tformer_jax.cli import checkpoint_export, export_checks, export_hf
from tformer_jax.data.tokenizers import exported
from tformer_jax.interop import hf


def export(run, out, name="llama", *flags):
    export_hf.main(["--run", str(run), "--model-type", name.split(" ")[0], str(out), *flags])


CTRANSLATE2 = {
    **dict.fromkeys(("llama", "bart", "gpt2", "t5", "qwen2", "qwen3"), ("checked with CTranslate2 ", ": log-prob")),
    "marian": ("CTranslate2 ", " cannot convert it ("),
    **dict.fromkeys(("mistral", "gemma3_text"), ("CTranslate2 ", " converts it, but cannot score its tokens (")),
    "gemma2": (
        "CTranslate2 ",
        " converts it, but computes other log-probabilities (by ",
    ),  # it ignores windows and caps
}
"""What is said about a conversion; of other architectures, it has none."""


def test_warnings_of_other_libraries_are_hidden(recwarn):
    """Regression test: the check of an adapter showed PEFT's use of a deprecated method of transformers."""
    with export_checks.without_warnings():
        warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning, stacklevel=1)
    assert not recwarn.list


@pytest.mark.parametrize("name", rest_slow(list(own_runs.MODELS), 3))
def test_an_export_is_read_by_transformers(name, tmp_path, capsys):
    export(own_runs.make(tmp_path / "run", name), tmp_path / "out", name)
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: ")
    assert second.startswith("checked with transformers ") and ": equal ids, logits within " in second
    beginning, middle = CTRANSLATE2.get(name, ("", ""))
    assert len(rest) == bool(beginning) and all(line.startswith(beginning) and middle in line for line in rest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def _with_other_weights(monkeypatch):
    def save(folder, *arguments, **options):
        original(folder, *arguments, **options)
        arrays = load_file(folder / "model.safetensors")
        arrays["model.norm.weight"] = arrays["model.norm.weight"] + 0.01
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})

    original = hf.save
    monkeypatch.setattr(hf, "save", save)


def _with_another_tokenizer(monkeypatch):
    def save(folder, *arguments, **options):
        why_not = original(folder, *arguments, **options)
        library = json.loads((folder / "tokenizer.json").read_text())
        library["normalizer"] = {"type": "Lowercase"}
        (folder / "tokenizer.json").write_text(json.dumps(library))
        return why_not

    original = exported.export_tokenizers
    monkeypatch.setattr(checkpoint_export, "export_tokenizers", save)


def _with_missing_weights(monkeypatch):
    original = hf.save
    monkeypatch.setattr(hf, "save", lambda folder, *a, **k: (original(folder, *a, **k), _remove(folder)))


def _remove(folder):
    (folder / "model.safetensors").unlink()


FAULTS = {
    "weights": (_with_other_weights, "logits of transformers differ from the run's by .* of the largest one"),
    "tokenizer": (_with_another_tokenizer, "AutoTokenizer reads 'The cat sat on the mat.' as .*, the run as "),
    "no weights": (_with_missing_weights, "transformers .* cannot read the exported folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_from_which_transformers_computes_something_else_are_not_written(fault, tmp_path, monkeypatch, capsys):
    spoil, message = FAULTS[fault]
    run = own_runs.make(tmp_path / "run", "llama")
    spoil(monkeypatch)
    with pytest.raises(UserError, match=rf"{message}.*; .*out was not written \(--no-check writes it\)"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export(run, tmp_path / "out", "llama", "--no-check")
    assert "not checked: --no-check" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_empty_folder_is_filled_and_a_full_one_is_left(tmp_path):
    run, out = own_runs.make(tmp_path / "run", "llama"), tmp_path / "out"
    out.mkdir()
    export(run, out, "llama", "--no-check")
    with pytest.raises(UserError, match="already exists: name a new folder"):
        export(run, out, "llama", "--no-check")


def test_without_transformers_the_export_says_that_it_was_not_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_checks, "not_installed", lambda modules: list(modules))
    export(own_runs.make(tmp_path / "run", "llama"), tmp_path / "out")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not checked with transformers: torch and transformers is not installed"
    ]


def test_what_ctranslate2_cannot_convert_or_computes_otherwise_is_said(tmp_path, monkeypatch, capsys):
    """Its converter drops the last row of Marian's embedding, and begins with a zero embedding."""
    pytest.importorskip("ctranslate2")
    export(own_runs.make(tmp_path / "marian", "marian"), tmp_path / "out", "marian")
    assert "CTranslate2 " in (line := capsys.readouterr().out.splitlines()[-1]) and " cannot convert it (" in line
    monkeypatch.setattr(export_checks, "SCORE_TOLERANCE", 0.0)
    export(own_runs.make(tmp_path / "gpt2", "gpt2"), tmp_path / "other", "gpt2")
    assert " converts it, but computes other log-probabilities (by " in capsys.readouterr().out.splitlines()[-1]
