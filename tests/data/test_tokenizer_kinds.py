"""A kind of tokenizer that code outside the package registers, from training to translating."""

import dataclasses
import json
import pickle
import sys
from collections.abc import Sequence

import pytest

import tformer_jax as tj
from tests.runs.conftest import small_config, write_pairs
from tformer_jax.base.errors import UserError
from tformer_jax.cli import score, translate
from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.data.tokenizers import Tokenizers, from_json, train_tokenizers
from tformer_jax.data.tokenizers.files import FORMATS
from tformer_jax.data.tokenizers.simple import PieceTokenizer
from tformer_jax.runs import experiment, loop
from tformer_jax.special_tokens import EOS, UNK

TEXTS = ["abcd", "abef", "abc"]


class LetterPairs(PieceTokenizer):
    """One token per two characters."""

    @staticmethod
    def split(text: str) -> Sequence[str]:
        return [text[start : start + 2] for start in range(0, len(text), 2)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(kinds.TOKENIZERS, "letter_pairs", LetterPairs)


def trained(**settings):
    cfg = DataConfig(tokenizer="letter_pairs", vocab_size=8, **settings)
    return train_tokenizers(cfg, [{"source": text, "target": text} for text in TEXTS])


def test_it_is_trained_and_restored():
    tokenizer = trained().source
    assert (type(tokenizer), tokenizer.pieces) == (LetterPairs, ["ab", "c", "cd", "ef"])
    assert tokenizer.encode(" abcdxy ") == [4, 6, UNK]
    assert tokenizer.decode([4, 6, EOS, 4]) == "abcd"
    for again in (from_json(json.loads(json.dumps(tokenizer.to_json()))), pickle.loads(pickle.dumps(tokenizer))):
        assert (type(again), again.encode(" ab ")) == (LetterPairs, [4])
        assert again.to_json() == tokenizer.to_json()
    assert tokenizer.to_library() is None


def test_the_text_is_normalized_and_the_vocabulary_extended():
    tokenizer = trained(normalize=("lowercase",)).source.extended(["<mask>"])
    assert tokenizer.encode("ABCD") == [4, 6]
    assert (tokenizer.vocab_size, tokenizer.id_of("<mask>")) == (9, 8)
    assert tokenizer.decode([8, 4], unknown="?") == "ab"
    again = from_json(tokenizer.to_json())
    assert (again.encode("AB"), again.vocab_size, again.steps) == ([4], 9, ("whitespace", "lowercase"))


MODULE = """
from tests.data.test_tokenizer_kinds import LetterPairs
from tformer_jax.config import kinds

kinds.TOKENIZERS["pairs_of_a_module"] = LetterPairs
"""


def test_a_run_trains_with_it_and_every_command_loads_it(tmp_path, capsys, monkeypatch):
    """The run names the module that registers the kind."""
    (tmp_path / "letter_pairs_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    write_pairs(tmp_path)
    settings = dataclasses.asdict(small_config(steps=2)) | {"imports": ("letter_pairs_module",)}
    settings["data"] |= {"tokenizer": "pairs_of_a_module", "vocab_size": 130}
    folder = tmp_path / "run"
    loop.run(experiment.build(Config.from_dict(settings), folder, data_root=tmp_path))
    del kinds.TOKENIZERS["pairs_of_a_module"], sys.modules["letter_pairs_module"]
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
    del kinds.TOKENIZERS["pairs_of_a_module"]


def test_without_its_registration_a_run_is_refused(tmp_path, monkeypatch):
    trained().save(tmp_path)
    monkeypatch.delitem(kinds.TOKENIZERS, "letter_pairs")
    with pytest.raises(UserError, match="kind of tokenizer 'letter_pairs' is not known; --import"):
        Tokenizers.load(tmp_path)
    with pytest.raises(UserError, match="data.tokenizer='letter_pairs'"):
        trained()


@pytest.mark.parametrize("kind", FORMATS)
def test_names_of_formats_of_files_are_taken(kind, monkeypatch):
    monkeypatch.setitem(kinds.TOKENIZERS, kind, LetterPairs)
    with pytest.raises(UserError, match="is the name of a format of files; register the kind by another name"):
        train_tokenizers(DataConfig(tokenizer=kind), [{"text": "a"}])
