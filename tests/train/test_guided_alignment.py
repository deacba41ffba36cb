"""Guided alignment: links from files to labels, and the loss against attention weights in NumPy."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.helpers import build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.base.user_cache import VARIABLE
from tformer_jax.config import Config, DataConfig, DecodeConfig, TrainConfig
from tformer_jax.config.decode import AlignmentHead
from tformer_jax.data.corpora import load_corpus, stored
from tformer_jax.data.features import feature_converter, tokenize
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.placeholders import NUMBERED
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer, WordTokenizer
from tformer_jax.data.word_links import linked_places
from tformer_jax.inference.watch import watch
from tformer_jax.models.losses import Guide, guided_loss
from tformer_jax.nn.attention_ops import Operands
from tformer_jax.nn.module import WATCHED
from tformer_jax.special_tokens import IGNORED
from tformer_jax.train.step import accumulated_gradients

TOKENIZERS = Tokenizers(CharacterTokenizer([*"abcd "]), WordTokenizer(["T", "U", "V"]))


def config(model=None, links="links", **changes) -> Config:
    data = DataConfig(
        source="parallel_lines",
        train=("train.{lang}",),
        validation=("held.{lang}",),
        source_language="xx",
        target_language="yy",
        links=links,
        bucket_lengths=(16,),
        batch_tokens=32,
        batch_multiple=2,
    )
    return Config(
        model=model or tiny("seq2seq", decoder_layers=2), data=data, train=TrainConfig(guided_alignment=0.5), **changes
    )


@pytest.fixture
def folder(tmp_path):
    files = {"train.xx": "ab cd\nc\n", "train.yy": "T U V\nU\n", "train.links": "0-1 1-1 1-2\n\n"}
    files |= {"held.xx": "a\n", "held.yy": "T\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_links_become_places_of_tokens():
    pair = {"source": "ab cd", "target": "T U V", "links": "0-1 1-1 1-2"}
    cd = [*TOKENIZERS.source.encode("ab cd")].index(TOKENIZERS.source.encode("cd")[0])
    assert linked_places(TOKENIZERS, pair, 3) == [IGNORED, 0, linked_places(TOKENIZERS, pair | {"links": "1-2"}, 3)[2]]
    assert linked_places(TOKENIZERS, pair | {"links": "1-2"}, 3)[2] in (cd - 1, cd)  # the space is of the word after it
    several = Tokenizers(WordTokenizer(["a", "b"]), CharacterTokenizer([*"TUV "]))
    back = {"source": "a b", "target": "TUVT", "links": "0-0 1-0"}
    assert linked_places(several, back, 4) == [0, 1, 0, 1]  # the tokens of a word share its links


def test_links_have_the_places_of_the_tokens_that_the_model_reads():
    """A placeholder that the source lacks stays text: its letters are tokens."""
    source = WordTokenizer(["a", "b"]).with_symbols(NUMBERED, ("braces",))
    target = CharacterTokenizer([*"{}yTU "]).with_symbols(NUMBERED, ("braces",))
    pair = {"source": "a {x} b", "target": "{y}T {x} U", "links": "1-1 2-2"}
    block = tokenize([pair], Tokenizers(source, target))
    tokens = [target.decode([token]) for token in block["target"].ids]
    assert tokens == [*"{y}T ", NUMBERED[0], *" U"]
    linked = dict(zip(tokens, block["links"].ids.tolist(), strict=True))
    assert (linked[NUMBERED[0]], linked["U"], linked["y"]) == (1, 2, IGNORED)


def test_files_of_links_are_read_beside_their_pairs(folder):
    corpus = load_corpus(config(), folder)
    assert corpus.train[0] == {"source": "ab cd", "target": "T U V", "links": "0-1 1-1 1-2"}
    assert corpus.train[1]["links"] == ""
    assert corpus.validation[0] == {"source": "a", "target": "T"}
    batch = next(iter(train_batches(config(), corpus, TOKENIZERS)))
    (row,) = [n for n in range(2) if (batch["aligned"][n] != IGNORED).any()]
    places = linked_places(TOKENIZERS, corpus.train[0], 3)
    assert batch["aligned"][row, :4].tolist() == [*places, IGNORED]
    assert batch["aligned"].shape == batch["target_out"].shape
    convert = feature_converter(config(), TOKENIZERS)
    assert "aligned" not in convert(tokenize(corpus.validation, TOKENIZERS))
    begun = dataclasses.replace(convert, source=dataclasses.replace(convert.source, before=(9, 9)))
    moved = begun(tokenize(corpus.train[:1], TOKENIZERS))["aligned"].ids.tolist()
    assert moved == [place if place == IGNORED else place + 2 for place in [*places, IGNORED]]


def test_mistakes_in_files_of_links_are_named(folder):
    (folder / "train.links").write_text("0-1\n")
    with pytest.raises(UserError, match=r"train.xx, line 2: has no partner, because \S+train.links ends after 1 line"):
        load_corpus(config(), folder)
    (folder / "train.links").write_text("0-1\n0:0\n")
    with pytest.raises(UserError, match="train.links, line 2: '0:0' is no link"):
        load_corpus(config(), folder)
    (folder / "train.links").write_text("0-1\n0-1\n")
    words = r"train.links, line 2: link 0-1: 'c' and its target have 1 and 1 words"
    with pytest.raises(UserError, match=words):  # regression test: training ended when it read them
        load_corpus(config(), folder)
    (folder / "train.links").unlink()
    with pytest.raises(UserError, match="links"):
        load_corpus(config(), folder)


def test_stored_examples_are_read_again_after_their_links_have_changed(folder, monkeypatch):
    """Regression test: the old links were used."""
    monkeypatch.setattr(stored, "LARGE", 1)
    monkeypatch.setenv(VARIABLE, str(folder / "cache"))
    for links in ("0-1", "0-0 1-1"):
        (folder / "train.links").write_text(f"{links}\n\n")
        assert load_corpus(config(), folder).train[0]["links"] == links


def test_settings_that_do_not_fit_links_are_refused():
    cfg = config()
    for data, name in (({"batching": "packed"}, "batching"), ({"long_pairs": "truncate"}, "long_pairs")):
        with pytest.raises(UserError, match=f"data.{name}=.*: does not keep the words of data.links in their places"):
            dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **data))
    with pytest.raises(UserError, match="train.guided_alignment=0.5: and data.links are used only together"):
        config(links=None)


def batches(draw):
    """Returns a batch of pairs with links at random places."""
    source, target = draw.integers(5, 11, (4, 6)), draw.integers(5, 11, (4, 5))
    source[0, 4:] = target[1, 3:] = 0
    labels = np.where(target == 0, IGNORED, target)
    aligned = np.where((draw.random((4, 5)) < 0.6) & (target != 0), draw.integers(0, 4, (4, 5)), IGNORED)
    return {"source": source, "target_in": target, "target_out": labels, "aligned": aligned}


@pytest.mark.parametrize(("number", "query"), [(1, "predicts"), (None, "reads")])
def test_the_loss_of_operands_is_that_of_numpy(number, query):
    draw = np.random.default_rng(5)
    q, k = draw.normal(size=(2, 3, 2, 4)).astype(np.float32), draw.normal(size=(2, 5, 2, 4)).astype(np.float32)
    scores = np.einsum("btnh,bsnh->bnts", q.astype(np.float64), k) / 2
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    weights = weights.mean(axis=1) if number is None else weights[:, number]
    aligned = np.array([[4, IGNORED, 0], [1, 2, IGNORED]])
    expected = {
        "predicts": [weights[0, 0, 4], weights[0, 2, 0], weights[1, 0, 1], weights[1, 1, 2]],
        "reads": [weights[0, 1, 4], weights[1, 1, 1], weights[1, 2, 2]],  # no step reads the last token
    }[query]
    operands = {"operands": (Operands.pack(*map(np.asarray, (q, k, k))),)}
    collected = {WATCHED: {"decoder": {"layers_0": {"cross_attention": operands}}}}
    guide = Guide(AlignmentHead(None, number, query), np.float32(1))
    actual = guided_loss(collected, tiny("seq2seq"), {"aligned": aligned}, guide)
    np.testing.assert_allclose(actual, -np.log(expected).sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "head"),
    [({}, (1, 2, "predicts")), ({"scan_layers": True, "remat": "nothing_saveable"}, (0, None, "reads"))],
    ids=["head", "scanned"],
)
def test_the_loss_is_the_cross_entropy_of_links_and_weights(layout, head):
    model, params = build(tiny("seq2seq", encoder_layers=2, decoder_layers=2, **layout), seed=1)
    names = dict(zip(("alignment_layer", "alignment_head", "alignment_query"), head, strict=True))
    cfg = config(model.cfg, decode=DecodeConfig(**names))
    batch = {key: np.asarray(x, np.int32) for key, x in batches(np.random.default_rng(3)).items()}
    gradients = jax.jit(accumulated_gradients, static_argnums=(0, 4))
    actual = gradients(model, params, batch, jax.random.key(0), cfg)
    layer, number, query = head
    weights = np.asarray(watch(model, params, batch).weights["cross"], np.float64)[:, layer]
    weights = weights.mean(axis=1) if number is None else weights[:, number]
    total = 0.0
    for row, t in zip(*np.nonzero(batch["aligned"] >= 0), strict=True):
        step = t + (query == "reads")
        total -= np.log(weights[row, step, batch["aligned"][row, t]]) if step < 5 else 0
    np.testing.assert_allclose(actual.auxiliary_loss, 0.5 * total / (batch["aligned"] >= 0).sum(), rtol=1e-5)
    parts = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, accumulate=2))
    split = gradients(model, params, batch, jax.random.key(0), parts)
    np.testing.assert_allclose(split.auxiliary_loss, actual.auxiliary_loss, rtol=1e-5)
    for each, other in zip(jax.tree.leaves(actual.grads), jax.tree.leaves(split.grads), strict=True):
        np.testing.assert_allclose(each, other, atol=1e-6)
    plain = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, links=None), train=TrainConfig())
    unguided = gradients(model, params, batch, jax.random.key(0), plain)
    np.testing.assert_allclose(unguided.sums.loss, actual.sums.loss, rtol=1e-6)
