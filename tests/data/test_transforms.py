"""Transforms in the pipeline: draws depend on the seed, the example and the epoch alone; settings; reports."""

import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tformer_jax as tj
from tests.data.test_pipeline import (
    CORPORA,
    assert_restored_exactly,
    assert_same,
    assert_shards_of,
    setup,
    take,
    train_batches,
)
from tests.helpers import tiny
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import prepare_data, train
from tformer_jax.config import Config, ConfigError, DataConfig, ModelConfig, kinds
from tformer_jax.data import examples, summary
from tformer_jax.data.columns import jsonable
from tformer_jax.data.corpora import Corpus, Joined, load_corpus
from tformer_jax.data.features import Tokenized
from tformer_jax.data.pipeline import evaluation_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.data.transforms.base import Training, build
from tformer_jax.data.transforms.show import show_changes
from tformer_jax.data.transforms.texts import TextTransform
from tformer_jax.inference.languages import Languages
from tformer_jax.runs.experiment import corpus_facts

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE, README = ROOT / "tests" / "outside", ROOT / "configs" / "README.md"
SYMBOLS = ("<br>", "<match>", "<hint>", "</hint>", "<bt>")
ALL = (
    {"kind": "concatenation", "separator": " <br> ", "probability": 0.5},
    {"kind": "fuzzy_matches", "similarity": 0.4},
    {"kind": "terminology", "glossary": "terms.tsv", "probability": 1.0, "rate": 1.0},
    {"kind": "entry_tags", "tags": ("", "<bt>")},
    *({"kind": kind, "probability": 0.5} for kind in ("case", "spacing", "punctuation", "typos")),
    *({"kind": kind, "probability": 0.5} for kind in ("word_dropout", "word_swap")),
    {"kind": "bpe_dropout", "rate": 0.3},
)
"""Every transform of the package."""
DIGESTS = {
    "translation in buckets": "0b3c81e1ac084b84",
    "translation packed": "8c61c9eeef3132e9",
    "classification in buckets": "125be64528d813b0",
    "documents packed and split": "098535ed2637c839",
    "a mixture": "5984b93536b96698",
}
"""Of the first ten batches of revision b451ab9, which had no transforms; packed pairs of c0d5d81d, which packs small
corpora by epochs."""
PAIRS = [{"source": f"cat dog, b {n} {n % 7}", "target": f"kat hond, z {n} {n % 7}"} for n in range(60)]


def setup_all(tmp_path, **changes):
    """Returns the arguments of `train_batches` for a mixture of two entries with every transform."""
    (tmp_path / "terms.tsv").write_text("cat\tkat\ndog\thond\n")
    data = {"source": "tsv", "train": ("p", "q"), "weights": (1, 2), "validation": "-", "symbols": SYMBOLS}
    sizes = {"vocab_size": 300, "bucket_lengths": (24, 96), "batch_tokens": 768, "batch_multiple": 4}
    cfg = Config(model=ModelConfig(max_length=96), data=DataConfig(**data, **sizes, transforms=ALL, **changes))
    corpus = Corpus(Joined([PAIRS[:20], PAIRS[20:]]), PAIRS[:5], PAIRS[:5], root=tmp_path)
    return cfg, corpus, train_tokenizers(cfg.data, corpus.train)


def test_every_transform_is_tested_here():
    assert {values["kind"] for values in ALL} == {*kinds.TRANSFORMS}


@pytest.mark.slow
def test_batches_are_the_same_after_a_resume_and_in_several_processes(tmp_path):
    arguments = setup_all(tmp_path)
    assert_restored_exactly(arguments, batches=9, points=2)
    assert_shards_of(arguments, take(train_batches(*arguments), 8))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_batches_are_the_same_with_loader_processes(workers, tmp_path):
    whole = take(train_batches(*setup_all(tmp_path)), 8)
    loaded = train_batches(*setup_all(tmp_path, workers=workers))
    assert_same(take(loaded, 4), whole[:4])
    state = json.loads(json.dumps(jsonable(loaded.get_state())))
    loaded.close()
    restored = train_batches(*setup_all(tmp_path))
    restored.set_state(state)
    assert_same(take(restored, 4), whole[4:])
    restored.close()


@pytest.mark.parametrize("kind", DIGESTS)
def test_without_transforms_batches_are_as_before(kind):
    digest = hashlib.sha256()
    for batch in take(train_batches(*setup(kind)), 10):
        for key in sorted(batch):
            digest.update(f"{key} {batch[key].dtype} {batch[key].shape}".encode() + batch[key].tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[kind]


def reader_of(tmp_path, seed=0):
    cfg, corpus, tokenizers = setup_all(tmp_path)
    transforms = build(cfg.data.transforms, Training(cfg.data, corpus, tokenizers), seed)
    return Tokenized(corpus.train, tokenizers, transforms=transforms)


def test_an_example_is_changed_anew_in_each_epoch_whatever_it_is_read_with(tmp_path):
    reader = reader_of(tmp_path)

    def source(number, *others):
        return reader.read([*others, number])["source"].rows()[-1].tolist()

    assert source(7) == source(7, 3, 60 + 7, 9)
    assert len({tuple(source(60 * epoch + 7)) for epoch in range(20)}) > 10
    assert any(
        source(number) != reader_of(tmp_path, seed=1).read([number])["source"].ids.tolist() for number in range(3)
    )


def test_epochs_of_training_differ():
    cfg, _, tokenizers = setup("translation in buckets", transforms=({"kind": "word_swap", "probability": 1.0},))
    pair = {"source": "a b c d", "target": "a b"}
    batches = take(train_batches(cfg, Corpus([pair], [], []), tokenizers), 10)
    assert len({row.tobytes() for batch in batches for row in batch["source"]}) > 5


def test_a_transform_at_the_end_leaves_what_the_others_draw():
    first = {"kind": "typos", "probability": 0.5, "rate": 0.5}
    traces, tokenizers = [], Tokenizers(ByteTokenizer(), ByteTokenizer())
    for others in ((), ("word_swap",)):
        data = DataConfig(source="tsv", train="x", transforms=(first, *others))
        transforms = build(data.transforms, Training(data, CORPORA["seq2seq"], tokenizers), 3)
        traces.append([transforms.trace(PAIRS[index], index)[1] for index in range(60)])
    assert traces[0] == traces[1] != PAIRS


def test_held_out_splits_are_as_before_unless_a_transform_is_a_format(tmp_path):
    cfg, corpus, tokenizers = setup_all(tmp_path)
    plain = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, transforms=()))
    tags = {"kind": "entry_tags", "tags": ("", "<bt>"), "held_out": "<bt>"}
    tagged = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, transforms=(*ALL[:3], tags)))
    before, after, formatted = (
        list(evaluation_batches(each, corpus.validation, tokenizers)) for each in (plain, cfg, tagged)
    )
    assert_same(before, after)
    tag = tokenizers.source.symbol_ids["<bt>"]
    np.testing.assert_array_equal(formatted[0]["source"][:5, 1:], before[0]["source"][:5, :-1])
    assert (formatted[0]["source"][:5, 0] == tag).all()
    np.testing.assert_array_equal(formatted[0]["target_out"], before[0]["target_out"])
    texts = Languages(tagged.data, tokenizers)
    assert [texts.format_source(text) for text in ("a", "<bt>a", " ")] == ["<bt>a", "<bt>a", " "]


def test_prepared_data_is_transformed_as_its_corpus(tmp_path):
    for name in "pq":
        (tmp_path / f"{name}.tsv").write_text("".join(f"{p['source']}\t{p['target']}\n" for p in PAIRS))
    data = {"source": "tsv", "train": ("p.tsv",), "validation": "q.tsv", "tokenizer": "characters", "batch_tokens": 512}
    changes = ({"kind": "typos", "probability": 0.5}, "word_dropout")
    cfg = Config(model=ModelConfig(max_length=64), data=DataConfig(**data, transforms=changes))
    prepare(cfg, tmp_path, tmp_path / "prepared")
    again = dataclasses.replace(cfg.data, source="prepared", train=(str(tmp_path / "prepared"),), validation=())
    again = dataclasses.replace(cfg, data=again)
    corpora = load_corpus(cfg, tmp_path), load_corpus(again, tmp_path)
    tokenizers = Tokenizers.load(corpora[1].tokenizers)
    both = (take(train_batches(*each, tokenizers), 5) for each in zip((cfg, again), corpora, strict=True))
    assert_same(*both)


@pytest.mark.parametrize(
    ("transforms", "sentence"),
    [
        (["cases"], "data.transforms: 'cases' is not a known kind; did you mean 'case'"),
        ([{"probability": 0.1}], "data.transforms: 'None' is not a known kind; known: "),
        ([{"kind": "case", "probabilty": 1}], "unknown setting 'probabilty' of transform 'case'; did you mean 'proba"),
        ([{"kind": "case", "probability": 2}], r"data.transforms: case.probability=2.0: must be at most 1"),
        ([{"kind": "typos", "rate": "x"}], "data.transforms: typos.rate='x': must be float, not str"),
        ([{"kind": "typos", "changes": ()}], r"typos.changes=\(\): must have a value to draw"),
        ([{"kind": "spacing", "changes": ("cut",)}], "spacing.changes=.*: is not a known value"),
        ([3], r"data.transforms=\(3,\): must hold Transform, not int"),
        (["terminology"], "terminology.glossary='': must name a file below the data folder"),
        (
            [{"kind": "terminology", "glossary": "g"}],
            r"marks=.*: add \('<hint>', '</hint>'\) to data.symbols",
        ),
        ([{"kind": "concatenation", "separator": " <p> "}], r"separator=' <p> ': .*: add \('<p>',\) to data.symbols"),
        ([{"kind": "entry_tags", "tags": ("a", "b")}], "must have one text for each of the 1 entries of data.train"),
        ([{"kind": "entry_tags", "tags": ("a",), "held_out": "b"}], r"held_out='b': must be one of \('a',\)"),
    ],
)
def test_mistakes_are_explained_in_one_sentence(transforms, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Config.from_dict({"data": {"source": "tsv", "train": ["x"], "transforms": transforms}})


def test_the_example_of_the_readme_is_a_config():
    (block,) = re.findall(r"```python\n(data = [^`]*transforms=[^`]*)```", README.read_text(encoding="utf-8"))
    scope = {"DataConfig": DataConfig}
    exec(block, scope)
    assert [transform.kind for transform in scope["data"].transforms][-2:] == ["entry_tags", "bpe_dropout"]


def test_tasks_refuse_transforms_of_other_examples():
    with pytest.raises(ConfigError, match="fuzzy_matches: cannot change examples of text, which model.family="):
        setup("documents packed and split", transforms=("fuzzy_matches",), symbols=("<match>",))
    with pytest.raises(ConfigError, match="concatenation: cannot change examples of text, label, which"):
        setup("classification in buckets", transforms=("concatenation",))
    chats = {"source": "jsonl", "train": ["x"], "batching": "packed", "transforms": ["case"]}
    with pytest.raises(ConfigError, match="case: cannot change examples of messages, which task='chat' has"):
        Config.from_dict({"task": "chat", "model": {"family": "decoder_lm"}, "data": chats})
    with pytest.raises(ConfigError, match="fuzzy_matches: searches examples that are read"):
        DataConfig(transforms=("fuzzy_matches",), symbols=("<match>",))


def test_a_list_of_transforms_has_a_round_trip(tmp_path):
    cfg, *_ = setup_all(tmp_path)
    assert config.from_config_dict(config.to_config_dict(cfg)) == cfg
    config.save(cfg, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == cfg
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, transforms=ALL[1:]))
    (difference,) = config.differences(cfg, other)
    assert difference.startswith("data.transforms: ")


@pytest.mark.parametrize(("rate", "transforms"), [(0.0, ()), (0.2, ({"kind": "bpe_dropout", "rate": 0.2},))])
def test_bpe_dropout_of_earlier_versions_is_read(rate, transforms, tmp_path):
    values = config.to_dict(Config())
    del values["data"]["transforms"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"data": values["data"] | {"bpe_dropout": rate}}))
    assert config.load(tmp_path / "config.json").data == DataConfig(transforms=transforms)


def test_the_summary_says_which_run_and_on_how_many_examples(tmp_path):
    cfg, corpus, tokenizers = setup_all(tmp_path)
    actual = summary.summarize(cfg, corpus, tokenizers)
    shares = dict(actual["train"].transforms)
    assert [*shares] == [values["kind"] for values in ALL]
    assert shares["entry_tags"] == pytest.approx(40 / 60)
    assert (shares["terminology"], shares["bpe_dropout"]) == (1.0, 1.0)
    assert 0.3 < shares["case"] < 0.7
    assert "  transforms: concatenation " in "\n".join(summary.lines(actual))
    assert not actual["validation"].transforms


def test_unknown_tokens_and_lengths_in_the_summary_are_those_of_changed_texts():
    changes = ({"kind": "case", "probability": 1.0, "sides": ("source",)},)
    for transforms, unknown in (((), 0), (changes, 60 * len("catdogb"))):
        cfg, _, _ = setup("translation in buckets", transforms=transforms)
        corpus = Corpus(PAIRS, PAIRS[:5], PAIRS[:5])
        actual = summary.summarize(cfg, corpus, train_tokenizers(cfg.data, corpus.train))
        assert actual["train"].sides["source"].unknown == unknown
        assert actual["validation"].sides["source"].unknown == 0


def test_a_changed_glossary_is_a_changed_corpus(tmp_path):
    cfg, corpus, _ = setup_all(tmp_path)
    facts = corpus_facts(cfg, corpus)
    (tmp_path / "terms.tsv").write_text("cat\tkater\n")
    assert facts != corpus_facts(cfg, corpus)


FILE = """
from tformer_jax.config import *
def get_config():
    data = DataConfig(source="tsv", train="p.tsv", tokenizer="characters", bucket_lengths=(64,))
    sizes = {"dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "ffn_dim": 8, "max_length": 64}
    return to_config_dict(Config(data=data, model=ModelConfig(**sizes), train=TrainConfig(steps=1)))
"""


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "p.tsv").write_text("".join(f"{p['source']}\t{p['target']}\n" for p in PAIRS))
    (tmp_path / "own.py").write_text(FILE)
    return ["--config", str(tmp_path / "own.py"), "--data", str(tmp_path)]


def test_examples_are_shown_before_and_after(config_file, capsys):
    chosen = "({'kind': 'case', 'probability': 1.0, 'sides': ('target',)}, {'kind': 'typos', 'rate': 0.0})"
    prepare_data.main([*config_file, "--show", "2", f"--config.data.transforms={chosen}"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[:5] == [
        "case",
        "  kat hond, z 0 0",
        "  -> KAT HOND, Z 0 0",
        "  kat hond, z 1 1",
        "  -> KAT HOND, Z 1 1",
    ]
    assert shown[5:] == ["typos", "  changes none of the first 1,000 examples"]
    with pytest.raises(UserError, match="--show needs transforms in data.transforms"):
        prepare_data.main([*config_file, "--show", "2"])


def test_tokens_of_transforms_of_ids_are_shown(tmp_path):
    shown = {name: list(pairs) for name, pairs in show_changes(*setup_all(tmp_path), 4)}
    assert [*shown] == [values["kind"] for values in ALL]
    assert all(len(pairs) == 4 for pairs in shown.values())
    for before, after in shown["bpe_dropout"]:
        assert before.replace("|", "") == after.replace("|", "")
        assert len(before.split("|")) < len(after.split("|"))


def test_a_transform_of_other_code_is_registered_like_a_kind(config_file, capsys, monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)
    chosen = "--config.data.transforms=({'kind':'reversed_words','probability':1.0},)"
    try:
        with pytest.raises(UserError, match="'reversed_words' is not a known kind.*; --import MODULE registers others"):
            prepare_data.main([*config_file, "--show", "1", chosen])
        prepare_data.main([*config_file, "--show", "1", chosen, "--import=reversed_words"])
        assert capsys.readouterr().out == "reversed_words\n  cat dog, b 0 0\n  -> 0 0 b dog, cat\n"
        with pytest.raises(UserError, match="data.transforms='reversed_words': no module is recorded"):
            train.main([*config_file, chosen])
    finally:
        sys.modules.pop("reversed_words", None)
        kinds.TRANSFORMS.pop("reversed_words", None)


@pytest.mark.parametrize("text", ["", "long " * 40])
def test_training_ends_if_transforms_leave_no_example_that_fits(text, monkeypatch):
    """Regression test: it waited for one for ever."""

    @dataclasses.dataclass(frozen=True)
    class Own(TextTransform):
        def change_text(self, given, rng):
            return text

    monkeypatch.setitem(kinds.TRANSFORMS, "own", Own)
    monkeypatch.setattr(examples, "MAX_UNUSABLE", 1000)
    data = {"transforms": ({"kind": "own", "probability": 1.0},), "bucket_lengths": (8,), "tokenizer": "words"}
    cfg = tj.Config(model=tiny("seq2seq"), data=tj.DataConfig(source="python", **data))
    with pytest.raises(UserError, match=r"1,024 training examples in a row are blank or too long, as data.transforms"):
        next(tj.batches(cfg, [("a b", "c d"), ("d", "e")]))
