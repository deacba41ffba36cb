"""A kind of tokenizer that code outside the package registers, from training to translating."""

import dataclasses
import json
import pickle
import sys
from pathlib import Path

import pytest

import tformer_jax as tj
from tests.runs.conftest import small_config, write_pairs
from tformer_jax.base.errors import UserError
from tformer_jax.cli import score, translate
from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.data.tokenizers import Tokenizers, from_json
from tformer_jax.data.tokenizers.files import FORMATS
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.runs import experiment, training
from tformer_jax.special_tokens import EOS, UNK

OUTSIDE = Path(__file__).resolve().parents[1] / "outside"
TEXTS = ["abcd", "abef", "abc"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)
    kinds.import_modules(["letter_pairs"])
    yield kinds.TOKENIZERS["letter_pairs"]
    forget()


def forget():
    """Removes the module and its kind, as in a new process."""
    sys.modules.pop("letter_pairs", None)
    kinds.TOKENIZERS.pop("letter_pairs", None)


def trained(**settings):
    cfg = DataConfig(tokenizer="letter_pairs", vocab_size=8, **settings)
    return train_tokenizers(cfg, [{"source": text, "target": text} for text in TEXTS])


def test_it_is_trained_and_restored(registered):
    tokenizer = trained().source
    assert (type(tokenizer), tokenizer.pieces) == (registered, ["ab", "c", "cd", "ef"])
    assert tokenizer.encode(" abcdxy ") == [4, 6, UNK]
    assert tokenizer.decode([4, 6, EOS, 4]) == "abcd"
    for again in (from_json(json.loads(json.dumps(tokenizer.to_json()))), pickle.loads(pickle.dumps(tokenizer))):
        assert (type(again), again.encode(" ab ")) == (registered, [4])
        assert again.to_json() == tokenizer.to_json()
    assert tokenizer.to_library() is None


def test_the_text_is_normalized_and_the_vocabulary_extended():
    tokenizer = trained(normalize=("lowercase",)).source.extended(["<mask>"])
    assert tokenizer.encode("ABCD") == [4, 6]
    assert (tokenizer.vocab_size, tokenizer.id_of("<mask>")) == (9, 8)
    assert tokenizer.decode([8, 4], unknown="?") == "ab"
    again = from_json(tokenizer.to_json())
    assert (again.encode("AB"), again.vocab_size, again.steps) == ([4], 9, ("whitespace", "lowercase"))
    with_symbols = trained(normalize=("lowercase",), symbols=("<B>",)).source
    assert with_symbols.encode("A <B>CD<B>") == [UNK, 8, 6, 8]
    assert from_json(with_symbols.to_json()).decode([4, 8, 6]) == "ab<B>cd"


@pytest.mark.slow
def test_a_run_trains_with_it_and_every_command_loads_it(tmp_path, capsys):
    """The run names the module that registers the kind."""
    write_pairs(tmp_path)
    settings = dataclasses.asdict(small_config(steps=2)) | {"imports": ("letter_pairs",)}
    settings["data"] |= {"tokenizer": "letter_pairs", "vocab_size": 130}
    folder = tmp_path / "run"
    training.run(experiment.build(Config.from_dict(settings), folder, data_root=tmp_path))
    forget()
    run = tj.load(folder)
    assert type(run.tokenizers.target).__name__ == "LetterPairs"
    assert run.tokenizers.target.vocab_size == run.config.model.vocab_size == 130
    (written,) = run.translate(["abcd"])
    capsys.readouterr()
    (tmp_path / "in.txt").write_text("abcd\n")
    translate.main(["--run", str(folder), "--input", str(tmp_path / "in.txt")])
    assert capsys.readouterr().out == f"{written}\n"
    (tmp_path / "pair.tsv").write_text("abcd\tABCD\n")
    score.main(["--run", str(folder), "--input", str(tmp_path / "pair.tsv")])
    assert capsys.readouterr().out


def test_without_its_registration_a_run_is_refused(tmp_path):
    trained().save(tmp_path)
    forget()
    with pytest.raises(UserError, match="kind of tokenizer 'letter_pairs' is not known; --import"):
        Tokenizers.load(tmp_path)
    with pytest.raises(UserError, match="data.tokenizer='letter_pairs'"):
        trained()


@pytest.mark.parametrize("kind", FORMATS)
def test_names_of_formats_of_files_are_taken(kind, registered, monkeypatch):
    monkeypatch.setitem(kinds.TOKENIZERS, kind, registered)
    with pytest.raises(UserError, match="is the name of a format of files; register the kind by another name"):
        train_tokenizers(DataConfig(tokenizer=kind), [{"text": "a"}])


def test_the_readme_shows_it():
    assert (OUTSIDE / "letter_pairs.py").read_text() in (OUTSIDE.parents[1] / "tformer_jax" / "README.md").read_text()
