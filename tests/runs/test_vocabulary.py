"""Runs with another vocabulary: the outputs, the tables, and the commands that use them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import tformer_jax as tj
from tests.cli.finished_runs import finish
from tests.helpers import assert_close, randomized, rest_slow
from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.cli import vocabulary as command
from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.models import registry
from tformer_jax.runs import vocabulary, weights
from tformer_jax.runs.shared_rows import tables
from tformer_jax.runs.trained import Trained

WORDS = ["abc", "bca", "cabb", "ac", "bb", "cc", "aabb", "ca", "acab", "abcabc"]
ROWS = 500


def sentences(letters: str, count: int) -> list[str]:
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list(letters), draw.integers(2, 6))) for _ in range(40)]
    return [" ".join(draw.choice(words, draw.integers(1, 4))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with random parameters and subwords of eight letters, and a file with texts of three of them."""
    folder = tmp_path_factory.mktemp("vocabulary")
    lines = [*sentences("abcdefgh", 60), *sentences("abc", 60)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines))
    (folder / "abc.txt").write_text("".join(f"{line}\n" for line in sentences("abc", ROWS)))
    lengths = {"bucket_lengths": (16,), "batch_tokens": 64, "batch_multiple": 1, "vocab_size": 340}
    data = DataConfig(source="tsv", train="pairs.tsv", tokenizer="bpe", **lengths)
    run = finish("seq2seq", folder, data, evaluated=False)
    params = tj.load(run).params
    weights.save(run, randomized(params, seed=3, scale=2.0), "last", [1], 1)
    return folder


def with_suppressed(run: tj.Run, removed: set[int]) -> tj.Run:
    """The run before the change, whose outputs have no removed token."""
    target = run.tokenizers.target
    special = dataclasses.replace(target.special, suppressed=(*target.special.suppressed, *removed))
    target.special = special
    return dataclasses.replace(run, tokenizers=Tokenizers(run.tokenizers.source, target))


@pytest.fixture(scope="module")
def trimmed(folder):
    run, output = folder / "seq2seq", folder / "trimmed"
    command.main(["trim", str(run), "--output", str(output), "--texts", str(folder / "abc.txt")])
    return tj.load(run), tj.load(output)


@pytest.mark.parametrize("settings", rest_slow([{}, {"beams": 3, "renormalize": True}], 1))
@pytest.mark.slow
def test_outputs_are_those_before_of_kept_tokens(folder, trimmed, settings):
    """Also with random parameters, whose outputs would have any token."""
    before, after = trimmed
    _, olds = kept_rows(before, after)
    texts = (folder / "abc.txt").read_text().splitlines()[: ROWS if not settings else 50]
    removed = {*range(before.tokenizers.target.vocab_size)} - {*olds}
    assert len(removed) > 20
    expected = with_suppressed(before, removed).translate(texts, **settings)
    assert after.translate(texts, **settings) == expected
    assert len({*expected}) > 5


def kept_rows(before: tj.Run, after: tj.Run) -> tuple[dict[str, int], list[int]]:
    """The ids before the change, in the order of the new ids, by name."""
    old, new = (run.tokenizers.target.vocabulary()[1] for run in (before, after))
    return old, [old[piece] for piece, _ in sorted(new.items(), key=lambda item: item[1])]


@pytest.mark.long
def test_tables_are_rows_of_those_before(folder, trimmed):
    before, after = trimmed
    _, olds = kept_rows(before, after)
    old, new = (flatten_dict(run.params, sep="/") for run in trimmed)
    along = {name: axis for name, (_, axis, kind) in tables(before.config.model).items() if kind == axes.VOCAB}
    assert along
    for name in old:
        expected = np.take(old[name], olds, along[name]) if name in along else old[name]
        np.testing.assert_array_equal(new[name], expected)
    record = json.loads((folder / "trimmed/vocabulary.json").read_text())
    assert record["run"] == str(folder / "seq2seq")
    assert record["after"]["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(after.params))
    assert record["texts with other tokens"] == 0
    assert json.loads((folder / "trimmed/model.json").read_text())["parameters"]


def test_means_by_hand():
    table = np.arange(12, dtype=np.float32).reshape(2, 6)
    expected = [[5, 1, 2], [11, 7, 8]]
    np.testing.assert_array_equal(vocabulary.take_rows(table, 1, [(5,), (0, 2), (1, 2, 3)]), expected)


@pytest.mark.long
@pytest.mark.parametrize("tie", rest_slow(["none", "all", "output", "inputs"], 2))
def test_tables_of_every_kind_of_tying(trimmed, tie):
    """The logits of the changed model are those of the kept tokens."""
    before, _ = trimmed
    model = dataclasses.replace(before.config.model, tie_embeddings=tie, output_bias=True)
    built = registry.build(model)
    params = randomized(registry.shapes(built))
    cfg = dataclasses.replace(before.config, model=model)
    sides, _ = vocabulary.trim_tokenizers(cfg, before.tokenizers, lambda side: WORDS)
    after = vocabulary.resize(Trained(cfg, built, params, before.tokenizers, None), sides)
    new = np.array([after.tokenizers.source.encode("abc bca")], np.int32)
    rows = np.array([row[0] for row in sides["target"].rows])
    expected = built.apply({"params": params}, rows[new], rows[new])[..., rows]
    np.testing.assert_allclose(after.model.apply({"params": after.params}, new, new), expected, atol=1e-6)


@pytest.mark.slow
def test_an_extended_run_has_the_same_outputs_for_texts_without_new_tokens(folder, trimmed):
    before, _ = trimmed
    (folder / "words.txt").write_text("hgfedcba\n")
    options = ["--tokens", str(folder / "words.txt"), "--symbols", "<<A>>", "--languages", "de", "pt-PT"]
    command.main(["extend", str(folder / "seq2seq"), "--output", str(folder / "extended"), *options])
    after = tj.load(folder / "extended")
    new = after.tokenizers.target
    assert new.symbols == ("<<A>>",) and new.extension == ("<2de>", "<2pt_PT>")
    pieces = before.tokenizers.target.encode("a hgfedcba")[1:]
    table = np.asarray(before.params["target_embedding"]["embedding"])
    _, i = new.encode("a hgfedcba")
    row = after.params["target_embedding"]["embedding"][i]
    np.testing.assert_allclose(row, table[pieces].mean(axis=0), rtol=1e-6)
    pairs = [("abc bca", "cab"), ("ca", "ac")]
    size = before.tokenizers.target.vocab_size
    for old, now in zip(before.logits(pairs), after.logits(pairs), strict=True):
        assert_close(now[:, :size], old, 1e-6)  # float32 rounds logits of 28 by up to 2e-6


@pytest.mark.long
def test_the_record_names_the_checkpoint_that_was_loaded(folder):
    run, output = folder / "seq2seq", folder / "of_step"
    command.main(["extend", str(run), "--output", str(output), "--symbols", "<sep>", "--step", "0"])
    assert json.loads((output / "vocabulary.json").read_text())["weights"] == {"kind": "checkpoint", "steps": [0]}


def test_mistakes_are_named(folder):
    run = str(folder / "seq2seq")
    new = str(folder / "new")
    (folder / "empty.txt").write_text("")
    for arguments, message in {
        ("trim", run, "--output", run): "would replace the run that is changed",
        ("extend", run, "--output", str(folder / "new")): "nothing to add",
        ("trim", run, "--output", str(folder / "new"), "--texts", str(folder / "empty.txt")): "is empty",
        ("extend", run, "--output", new, "--symbols", ""): "--symbols '': must have visible characters, and single",
        ("extend", run, "--output", new, "--symbols", "a  b"): "--symbols 'a  b': must have visible characters",
        ("extend", run, "--output", new, "--symbols", "</s>"): "--symbols '</s>': is the name of a special token",
        ("extend", run, "--output", new, "--languages", "de", ""): "--languages '': must be a code of letters",
    }.items():
        with pytest.raises(UserError, match=message):
            command.main(list(arguments))
    assert not (folder / "new").exists()
