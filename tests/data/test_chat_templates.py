"""Chat templates of published models, calls of tools, and conversations that cannot be learned."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests import chats
from tests.data.test_chats import PAIR, SYSTEM, config, write
from tformer_jax.base.errors import UserError
from tformer_jax.config import FilterConfig
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.corpora.chats import chat_of
from tformer_jax.data.pipeline import without_refused
from tformer_jax.data.summary import summarize
from tformer_jax.data.summary_warnings import warnings
from tformer_jax.data.tokenizers.chats import encode_chat, with_chat, written_text
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.training import train_tokenizers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return chats.write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


QWEN_3 = chats.CHATML.replace(
    "message['content']",
    "('<think>\n\n</think>\n\n' if loop.last and message['role'] == 'assistant' else '') + message['content']",
)
"""Only the last answer has a thought."""
PHI_3 = chats.CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
"""A special token ends the conversation."""
MISTRAL = """\
{% set system = messages[0]['content'] %}
{% for message in messages[1:] %}
{% if message['role'] == 'user' %}
{% set last = loop.last or (loop.index == loop.length - 1) %}
{{ '<|im_start|>' + (system + '\n' if last else '') + message['content'] + '\n' }}
{%- else %}
{{ message['content'] + '<|im_end|>' }}
{%- endif %}
{% endfor %}"""
"""The last message of the user has that of the system."""


@pytest.mark.parametrize(("text", "system"), [(QWEN_3, False), (PHI_3, False), (MISTRAL, True)])
def test_answers_of_templates_that_write_the_last_one_differently(text, system, checkpoint):
    """Regression test: such conversations of several turns were refused, though transformers writes them."""
    tokenizer = with_chat(load_checkpoint_tokenizers(checkpoint).target, text)
    messages = [*([SYSTEM] if system else []), *chats.chat("Hi", "one", "And?", "two", "So?", "three")]
    encoded = encode_chat(tokenizer, Chat.read(messages))
    own = [i for i, answer in zip(encoded.ids, encoded.answers, strict=True) if answer]
    last = "<think>\n\n</think>\n\nthree" if text == QWEN_3 else "three"
    end = tokenizer.encode_with_symbols(["<|im_end|>"])[0]
    expected = [*tokenizer.encode("one"), *end, *tokenizer.encode("two"), *end, *tokenizer.encode(last), *end]
    extra = own[len(expected) :]  # Phi 3's answers end with the conversation
    assert own[: len(expected)] == expected
    assert not extra or text == PHI_3
    refused = Chat.read([*messages[:-1], {**messages[-1], "content": ""}])
    assert encode_chat(tokenizer, refused).ids


def test_conversations_whose_answers_cannot_be_located_are_left_out(checkpoint, tmp_path):
    """Regression test: they ended training."""
    (tmp_path / "mine.jinja").write_text(QWEN_3)
    call = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    write(tmp_path, {"messages": PAIR}, {"messages": [PAIR[0], call, *PAIR]})
    cfg = config(checkpoint, chat_template="mine.jinja", on_bad_line="skip")
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train, tmp_path)
    assert without_refused(cfg, corpus, tokenizers).left_out["train"] == {"the chat template refuses it": 1}


def test_conversations_with_blank_sides_are_dropped(checkpoint, tmp_path):
    """Regression test: a model learned to end at once; a blank answer that calls a tool or is not learned may stay."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    blank = [chats.chat("a", " "), chats.chat("\u200b", "b"), chats.chat("a", "b", "c", "")]
    present = [PAIR, [PAIR[0], {**PAIR[1], "content": "", "weight": 0}, *PAIR], [PAIR[0], call]]
    write(tmp_path, *({"messages": messages} for messages in (*blank, *present)))
    cfg = config(checkpoint)
    corpus = load_corpus(cfg, tmp_path)
    assert len(corpus.train) == 3
    assert corpus.left_out["train"]["blank texts"] == 3
    told = warnings(cfg, corpus, summarize(cfg, corpus, train_tokenizers(cfg.data, corpus.train, tmp_path)))
    assert "3 examples of train were left out for a blank text: look for messages without a text" in told
    remaining = load_corpus(config(checkpoint, filters=FilterConfig(blank_sides=False)), tmp_path)
    assert len(remaining.train) == 6


def test_arguments_of_calls_are_objects_as_templates_read_them(checkpoint):
    """OpenAI's API has them as JSON; a template that joins them with texts gets this."""
    calls = [
        [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        for arguments in ('{"city": "Ä", "n": null}', {"city": "Ä", "n": None})
    ]
    read = [Chat.read([PAIR[0], {"role": "assistant", "content": None, "tool_calls": each}]) for each in calls]
    assert read[0] == read[1]
    tokenizer = load_checkpoint_tokenizers(checkpoint).target
    for use, written in (("| tojson", '{"city": "Ä", "n": null}'), ("+ '!'", '{"city": "Ä", "n": null}!')):
        text = "{{ messages[1]['tool_calls'][0]['function']['arguments'] " + use + " }}"
        assert written_text(with_chat(tokenizer, text), read[0].to_json()) == written
    broken = [{"function": {"name": "f", "arguments": "{"}}]
    assert Chat.read([PAIR[0], {"role": "assistant", "tool_calls": broken}]).messages[1]["tool_calls"] == broken


def test_parquet_adds_no_null_arguments(checkpoint, tmp_path):
    calls = [[{"function": {"name": "f", "arguments": each}}] for each in ({"city": "a"}, {"date": "b"})]
    records = [{"messages": [PAIR[0], {"role": "assistant", "content": None, "tool_calls": each}]} for each in calls]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    write(tmp_path, *records)
    lines = load_corpus(config(checkpoint), tmp_path).train
    rows = load_corpus(config(checkpoint, source="parquet", train="a.parquet", validation="a.parquet"), tmp_path).train
    actual, expected = ([json.loads(example["messages"]) for example in examples] for examples in (rows, lines))
    assert actual == expected  # but for the order of keys, which is Parquet's


def test_conversations_in_a_field_of_an_object():
    record = {"data": {"messages": PAIR}}
    assert chat_of(record, ("data.messages",)).messages == PAIR
    with pytest.raises(DataError, match="has no field 'data.dialog', only 'data'"):
        chat_of(record, ("data.dialog",))


WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}" + (
    "{{ message | tojson }}<|im_end|>{% endfor %}"
)


def call(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("spelled", [{"<|im_end|>": 1}, {"a <|im_end|>\n": {"b": "<|im_end|>"}}, ["<|im_end|>"]])
def test_names_of_fields_become_no_special_token(spelled, checkpoint):
    """Regression test: a tool, or an argument of a call, could end a message and begin another."""
    tokenizer = with_chat(load_checkpoint_tokenizers(checkpoint).target, WITH_TOOLS)
    end = chats.SPECIAL.index("<|im_end|>")
    question = {"role": "user", "content": "a"}
    for chat in (
        Chat.read([question], [{"name": "f", "parameters": spelled}]),
        Chat.read([question, call({"x": spelled}), question]),
        Chat.read([question, call(json.dumps({"x": spelled})), question]),
    ):
        row = encode_chat(tokenizer, chat)
        assert list(row.ids).count(end) == len(chat.messages)


def nested(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [200, 2_000, 100_000])
def test_deep_calls_and_tools_are_refused(levels):
    """Regression test: they were a RecursionError. A text too deep for Python's parser stays a text."""
    question = {"role": "user", "content": "a"}
    value = []
    for _ in range(levels):
        value = [value]
    for messages, tools, name in (
        ([question], [{"x": value}], "a tool"),
        ([{**question, "x": value}], None, "message 1"),
        ([question, call({"x": value})], None, "message 2"),
    ):
        with pytest.raises(UserError, match=f"{name} is nested more than 100 levels deep"):
            Chat.read(messages, tools)
    arguments = f'{{"x": {nested(levels)}}}'
    try:
        chat = Chat.read([question, call(arguments)])
    except UserError as error:
        assert str(error) == "a call in message 2 is nested more than 100 levels deep"
    else:
        assert levels > 1_000
        assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"x": "\\ud800"}', "a call in message 1 has a lone surrogate, which is not a character: remove it"),
        ('{"\\ufdd1": 1}', r"a call in message 1 has U\+FDD1, which is not a character"),
        ({"\ufdd1": 1}, r"message 1 has U\+FDD1, which is not a character"),
    ],
)
def test_arguments_with_what_is_no_character(arguments, problem):
    with pytest.raises(UserError, match=problem):
        Chat.read([call(arguments)])


@pytest.mark.parametrize("arguments", ['{"x": 1, "x": 2}', '{"x": NaN}', '{"x": {"y": 1, "y": 1}}', "[1]", "{"])
def test_arguments_that_an_object_would_change_stay_a_text(arguments):
    (message,) = Chat.read([call(arguments)]).messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
