"""Types of Parquet columns that JSON lacks: maps and times."""

import datetime
import decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora import DataError, load_corpus

MAP = pa.map_(pa.string(), pa.string())
MOMENT = datetime.datetime(2026, 3, 3, 15, 33)
UNREPRESENTABLE = [
    *((pa.timestamp("ns"), 1), (pa.timestamp("s"), 10**15), (pa.time64("ns"), 1), (pa.date32(), 10**8)),
    *((pa.duration("s"), 10**18), (pa.list_(pa.timestamp("ns")), [1]), (pa.list_(pa.date32(), 1), [10**8])),
    (pa.map_(pa.string(), pa.timestamp("ns")), [("a", 1)]),
]
"""Types and values that Python's types do not hold."""


def load(folder, table: pa.Table, task: str = "translate", **data):
    parquet.write_table(table, folder / "a.parquet")
    files = {"source": "parquet", "train": "a.parquet", "validation": "a.parquet", "tokenizer": "bytes"}
    if task == "translate":
        return load_corpus(Config(data=DataConfig(**files, **data)), folder)
    model = ModelConfig(family="decoder_lm")
    return load_corpus(Config(task=task, model=model, data=DataConfig(**files, **data, batching="packed")), folder)


def pair(**fields) -> pa.Array:
    """Returns a column with one conversation, whose messages have further fields: (type, value) by name."""
    kinds = [(name, pa.string()) for name in ("role", "content")] + [(name, kind) for name, (kind, _) in fields.items()]
    given = {name: value for name, (_, value) in fields.items()}
    messages = [{"role": "user", "content": "a"} | given, {"role": "assistant", "content": "b"} | given]
    return pa.array([messages], pa.list_(pa.struct(kinds)))


def test_maps_are_objects(tmp_path):
    column = pa.array([[("en", "a"), ("de", "b")], [("de", "d"), ("en", "c")]], MAP)
    corpus = load(tmp_path, pa.table({"texts": column}), fields=("texts.en", "texts.de"))
    assert corpus.train == [{"source": "a", "target": "b"}, {"source": "c", "target": "d"}]
    messages = pa.array(
        [[[("role", "user"), ("content", "a")], [("role", "assistant"), ("content", "b")]]], pa.list_(MAP)
    )
    (example,) = load(tmp_path, pa.table({"messages": messages}), "chat").train
    assert [message["content"] for message in Chat.from_json(example["messages"]).messages] == ["a", "b"]


def test_a_key_that_a_map_has_twice_is_an_error(tmp_path):
    column = pa.array([[("en", "a"), ("en", "b"), ("de", "c")]], MAP)
    with pytest.raises(DataError, match="line 1: a map has a key twice"):
        load(tmp_path, pa.table({"texts": column}), fields=("texts.en", "texts.de"))


@pytest.mark.parametrize(("kind", "value"), UNREPRESENTABLE, ids=str)
def test_times_outside_of_python_are_no_texts_and_do_not_matter_elsewhere(kind, value, tmp_path):
    column = pa.array([value], kind)
    with pytest.raises(DataError, match="line 1: field 'source' is .*, not text"):
        load(tmp_path, pa.table({"source": column, "target": ["a"]}))
    (example,) = load(tmp_path, pa.table({"messages": pair(when=(kind, value)), "system": ["c"]}), "chat").train
    assert [message["content"] for message in Chat.from_json(example["messages"]).messages] == ["c", "a", "b"]


def test_messages_may_have_times_and_decimals(tmp_path):
    fields = {"when": (pa.timestamp("us"), MOMENT), "score": (pa.decimal128(5, 2), decimal.Decimal("1.25"))}
    (example,) = load(tmp_path, pa.table({"messages": pair(**fields)}), "chat").train
    first = Chat.from_json(example["messages"]).messages[0]
    assert first == {"role": "user", "content": "a", "when": "2026-03-03 15:33:00", "score": "1.25"}


def test_a_value_that_json_does_not_have_is_named(tmp_path):
    with pytest.raises(DataError, match="line 1: message 1 has a value of the type bytes: write text"):
        load(tmp_path, pa.table({"messages": pair(image=(pa.binary(), b"a"))}), "chat")
    with pytest.raises(UserError, match="message 1 has a value of the type datetime"):
        Chat.read([{"role": "user", "content": "a", "when": MOMENT}])


def test_two_fields_of_one_name_in_a_struct_are_an_error(tmp_path):
    column = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["en", "en"])
    with pytest.raises(DataError, match=r"a\.parquet: .*duplicate field names"):
        load(tmp_path, pa.table({"texts": column}), fields=("texts.en", "texts.de"))
