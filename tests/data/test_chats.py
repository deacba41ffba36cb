"""Conversations: layouts of records, mistakes with their lines, labels of the assistant's tokens, and truncation."""

import json

import pyarrow as pa
import pytest
import tokenizers as hf
from pyarrow import parquet

from tests import chats
from tests.helpers import rest_slow
from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.chat import template
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.corpora.chats import chat_of
from tformer_jax.data.pipeline import check_predictable, evaluation_batches, train_batches, without_refused
from tformer_jax.data.prepare import prepare
from tformer_jax.data.summary import lines, summarize
from tformer_jax.data.summary_warnings import warnings
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.chats import encode_chat, with_chat, written_text
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.surgery import extend, needed_tokens, trim
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.special_tokens import IGNORED, SpecialTokens

PAIR = chats.chat("How are you?", "I am fine.")
SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "I am fine."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "How are "}, {"type": "text", "text": "you?"}]}]
PARTS += [{"role": "assistant", "content": [{"type": "text", "text": "I am fine."}]}]
LAYOUTS = [
    ({"messages": PAIR}, (), PAIR),
    ({"messages": PARTS, "id": 7}, (), PAIR),
    ({"conversations": SHAREGPT}, (), PAIR),
    ({"conversations": SHAREGPT, "system": "Be brief."}, (), [SYSTEM, *PAIR]),
    ({"prompt": "How are you?", "response": "I am fine."}, (), PAIR),
    ({"prompt": "How are you?", "completion": "I am fine.", "system": None}, (), PAIR),
    ({"prompt": PAIR[:1], "completion": PAIR[1:]}, (), PAIR),
    ({"instruction": "How are you?", "input": "", "output": "I am fine."}, (), PAIR),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, (), chats.chat("Add.\n\n1 2", "3")),
    ({"q": "How are you?", "a": "I am fine.", "messages": "other"}, ("q", "a"), PAIR),
    ({"dialog": SHAREGPT}, ("dialog",), PAIR),
]
MISTAKES = [
    ({"text": "a"}, "has no field 'messages' or 'conversations' or 'prompt' and 'response' or .*, only 'text': name"),
    ({"messages": "a"}, "field 'messages' is not a list of messages"),
    ({"messages": PAIR[:1]}, "has no message of the assistant to learn"),
    ({"messages": [PAIR[0], {**PAIR[1], "weight": 0}]}, "has no message of the assistant to learn"),
    ({"messages": [{"role": "asistant", "content": "a"}]}, "message 1 has the role 'asistant': write one of system"),
    ({"messages": [*PAIR, {"role": "user"}]}, "message 3 of the user has no content"),
    ({"messages": [*PAIR, "a"]}, "message 3 must be an object with role and content"),
    ({"messages": [*PAIR, {"role": "user", "content": 3}]}, "the content of message 3 must be text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, PAIR[1]]}, "a part of the type 'image_url'"),
    ({"messages": chats.chat("a\ufdd1", "b")}, r"message 1 has U\+FDD1, which is not a character: remove it"),
    ({"messages": PAIR, "tools": [{"name": "\ufdd1"}]}, r"a tool has U\+FDD1, which is not a character"),
    ({"messages": PAIR, "tools": "{"}, "field 'tools' is a text that is not JSON"),
    ({"prompt": "a", "response": 3}, "field 'response' is int, not text"),
    ({"instruction": 3, "input": "a", "output": "b"}, "field 'instruction' is int, not text"),
    ({"instruction": "a", "input": {"x": 1}, "output": "b"}, "field 'input' is an object, not text"),
]


def config(folder, **data) -> Config:
    settings = {"source": "jsonl", "train": ("a.jsonl",), "validation": ("a.jsonl",), "tokenizer": "file"}
    packed = {"tokenizer_file": str(folder), "batching": "packed", "batch_size": 2, "window": 40}
    model = ModelConfig(family="decoder_lm", max_length=120)
    return Config(task="chat", model=model, data=DataConfig(**{**settings, **packed, **data}))


def write(folder, *records) -> None:
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return chats.write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(("record", "fields", "expected"), LAYOUTS)
def test_layouts_give_the_same_messages(record, fields, expected, checkpoint, tmp_path):
    write(tmp_path, record)
    parquet.write_table(pa.Table.from_pylist([record | {"other": 1}]), tmp_path / "a.parquet")
    for source in ("jsonl", "parquet"):
        cfg = config(checkpoint, source=source, train=f"a.{source}", validation=f"a.{source}", fields=fields)
        (example,) = load_corpus(cfg, tmp_path).train
        assert Chat.from_json(example["messages"]).messages == expected


@pytest.mark.parametrize(("record", "problem"), MISTAKES)
def test_a_mistake_is_one_sentence_with_its_line(record, problem, checkpoint, tmp_path):
    write(tmp_path, {"messages": PAIR}, record)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{problem}"):
        load_corpus(config(checkpoint), tmp_path)
    corpus = load_corpus(config(checkpoint, on_bad_line="skip"), tmp_path)
    assert len(corpus.train) == 1 and sum(corpus.left_out["train"].values()) == 1


@pytest.mark.long
def test_labels_are_the_tokens_of_the_assistant(checkpoint, tmp_path):
    """Of each conversation of a packed row: its label is the next token where the assistant writes that, up to the end
    of its message, and none elsewhere."""
    write(tmp_path, *({"messages": messages} for messages in chats.CHATS))
    cfg = config(checkpoint, window=120)
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train)
    batch = next(train_batches(cfg, corpus, tokenizers))
    actual = set()
    for tokens, targets, segments in zip(*(batch[key] for key in ("tokens", "targets", "segments")), strict=True):
        for number in range(1, segments.max() + 1):
            ids, labels = tokens[segments == number], targets[segments == number]
            text, answers = tokenizers.target.backend_tokenizer.decode(ids, skip_special_tokens=False), []
            for label in labels[labels != IGNORED]:
                answers.append(tokenizers.target.special.name(label) or tokenizers.target.decode([label]))
            actual.add((text, "".join(answers)))
    expected = set()
    for messages in chats.CHATS:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        answers = "".join(f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant")
        expected.add((text.removesuffix("\n"), answers.replace("Ä", "\ufffd\ufffd")))
    assert actual == expected
    assert 2 in tokenizers.target.special.eos and 2 not in json.loads((checkpoint / "config.json").read_text()).values()


def test_an_answer_of_weight_0_is_not_learned(checkpoint, tmp_path):
    messages = chats.chat("a", "no", "b", "yes")
    messages[1]["weight"] = 0
    write(tmp_path, {"messages": messages})
    cfg = config(checkpoint)
    corpus = load_corpus(cfg, tmp_path)
    tokenizer = train_tokenizers(cfg.data, corpus.train).target
    encoded = encode_chat(tokenizer, Chat.from_json(corpus.train[0]["messages"]))
    assert tokenizer.decode([i for i, own in zip(encoded.ids, encoded.answers, strict=True) if own]) == "yes"


@pytest.mark.long
@pytest.mark.parametrize("policy", rest_slow(["truncate", "drop"], 1))
def test_long_conversations_are_counted(policy, checkpoint, tmp_path, caplog):
    """Truncated ones keep their prompt; one whose prompt fills the row is dropped, because nothing is left to learn."""
    long = chats.chat("the cat sat", "How are you? " * 20)
    write(tmp_path, {"messages": PAIR}, {"messages": long}, {"messages": chats.chat("How are you? " * 20, "a")})
    cfg = config(checkpoint, long_pairs=policy)
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train)
    batches = train_batches(cfg, corpus, tokenizers)
    rows = [row for _ in range(3) for row in next(batches)["tokens"].tolist()]
    begin = encode_chat(tokenizers.target, Chat.read(long)).ids[:40]
    assert (begin in rows) is (policy == "truncate")
    assert "dropping conversations that do not fit 40 tokens" in caplog.text or policy == "truncate"
    summaries = summarize(cfg, corpus, tokenizers)
    assert "2 too long  1 without an answer in their row" in next(iter(lines(summaries)))
    (told,) = (text for text in warnings(cfg, corpus, summaries) if "too long for their row" in text)
    advice = ", or set data.long_pairs='truncate'" if policy == "drop" else ""
    assert ("dropped" in told) is (policy == "drop") and told.endswith(f"increase data.window{advice}")
    evaluated = list(evaluation_batches(cfg, corpus.validation, tokenizers))
    answers = [
        sum(encode_chat(tokenizers.target, Chat.from_json(each["messages"])).answers[:121]) for each in corpus.train
    ]
    assert sum((batch["targets"] != IGNORED).sum() for batch in evaluated) == sum(answers)


def test_all_conversations_are_too_long(checkpoint, tmp_path):
    write(tmp_path, {"messages": chats.chat("How are you? " * 20, "a")})
    for policy in ("drop", "truncate"):
        cfg = config(checkpoint, long_pairs=policy)
        corpus = load_corpus(cfg, tmp_path)
        with pytest.raises(
            DataError, match="all conversations of split train are longer than 40 tokens: increase data"
        ):
            check_predictable(cfg, corpus, train_tokenizers(cfg.data, corpus.train))


def test_a_tokenizer_of_this_package_gets_the_plain_template(tmp_path, caplog):
    """It is stored with the tokenizer."""
    write(tmp_path, {"messages": PAIR})
    cfg = config(tmp_path, tokenizer="bytes", tokenizer_file=None)
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train)
    assert "has no chat template, so that a plain one is used" in caplog.text
    restored = Tokenizers.from_json(json.loads(json.dumps(tokenizers.to_json())))
    encoded = encode_chat(restored.target, Chat.read([*PAIR, *chats.chat("</s>")]))
    text = "User:\nHow are you?\nAssistant:\nI am fine.\nUser:\n</s>\n"
    assert restored.target.decode([i for i in encoded.ids if i not in restored.target.special.eos]) == text
    assert encoded.ids.count(restored.target.special.eos[0]) == 1
    answer = [i for i, own in zip(encoded.ids, encoded.answers, strict=True) if own]
    assert answer == [*restored.target.encode("I am fine."), restored.target.special.eos[0]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for m in messages %}", "the chat template is not valid in line 1: Unexpected end of template"),
        ("{{ raise_exception('no') }}", "the chat template refuses the conversation: no"),
        (
            "{{ messages[0].__class__.__mro__ }}",
            "the chat template refuses the conversation: access to attribute '__cl",
        ),
        (
            "{{ messages.append(1) }}",
            "refuses the conversation: access to attribute .append. of .list. object is unsafe",
        ),
        ("{{ messages | length }}", "writes message 2 differently within the conversation"),
        ("{{ messages[-1]['content'] }}", "ends answers without a special token"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "ends answers without a special token"),
    ],
)
def test_a_template_that_cannot_be_used(text, problem, checkpoint, tmp_path):
    write(tmp_path, {"messages": PAIR})
    (tmp_path / "mine.jinja").write_text(text)
    cfg = config(checkpoint, chat_template="mine.jinja")
    corpus = load_corpus(cfg, tmp_path)
    with pytest.raises(UserError, match=problem):
        train_tokenizers(cfg.data, corpus.train, tmp_path)


def test_prepared_data_holds_no_conversations(checkpoint, tmp_path):
    write(tmp_path, {"messages": PAIR})
    with pytest.raises(UserError, match=r"data\.source.* cannot be prepared for conversations"):
        prepare(config(checkpoint), tmp_path, tmp_path / "out")


def test_a_conversation_that_the_template_refuses_is_quoted(checkpoint, tmp_path):
    refusal = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    (tmp_path / "mine.jinja").write_text(refusal + chats.CHATML)
    write(tmp_path, {"messages": PAIR}, {"messages": chats.chat("a", "b", "c")})
    cfg = config(checkpoint, chat_template="mine.jinja")
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train, tmp_path)
    quoted = (
        r'refuses the conversation: one turn only; the conversation is \{"messages": \[\{"role": "user", "content": "a"'
    )
    with pytest.raises(DataError, match=quoted):
        summarize(cfg, corpus, tokenizers)


def test_conversations_that_the_template_refuses_are_left_out_before_training(checkpoint, tmp_path, caplog):
    """Regression test: one after the first 10,000 ended training, and a resumed run met it again."""
    refusal = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    (tmp_path / "mine.jinja").write_text(refusal + chats.CHATML)
    long = {"messages": chats.chat("a", "b", "c", "d")}
    write(tmp_path, {"messages": PAIR}, long, {"messages": PAIR}, long)
    for name in "bc":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": PAIR}))
    files = {"train": ("a.jsonl", "b.jsonl"), "validation": ("c.jsonl",), "weights": (1.0, 2.0)}
    cfg = config(checkpoint, chat_template="mine.jinja", **files)
    corpus = load_corpus(cfg, tmp_path)
    tokenizers = train_tokenizers(cfg.data, corpus.train, tmp_path)
    stopped = r"conversation 2 of train: the chat template refuses .*; leave it out, or set data.on_bad_line='skip'$"
    with pytest.raises(DataError, match=stopped):
        without_refused(cfg, corpus, tokenizers)
    skipping = config(checkpoint, chat_template="mine.jinja", on_bad_line="skip", **files)
    rest = without_refused(skipping, corpus, tokenizers)
    assert rest.sizes == [2, 1] and rest.test is rest.validation
    assert [len(Chat.from_json(example["messages"]).messages) for example in rest.train] == [2, 2, 2]
    assert rest.left_out["train"] == {"the chat template refuses it": 2}
    assert "2 conversations are left out; conversation 2 of train: " in caplog.text


def test_fields_that_are_null_are_left_out():
    """As transformers 5 does; regression test: templates wrote "None" where a call of a tool has no content."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    assert Chat.read([PAIR[0], call]).messages[1] == {name: call[name] for name in ("role", "tool_calls")}
    with pytest.raises(UserError, match="message 1 of the assistant has no content"):
        Chat.read([{"role": "assistant", "content": None}])


def test_a_greeting_is_learned_although_the_template_cannot_write_nothing(checkpoint, tmp_path):
    """Regression test: the conversation was refused with "list object has no element 0"."""
    (tmp_path / "mine.jinja").write_text("{% if messages[0]['role'] == 'system' %}{% endif %}" + chats.CHATML)
    greeted = [PAIR[1], *PAIR]
    write(tmp_path, {"messages": greeted})
    cfg = config(checkpoint, chat_template="mine.jinja")
    corpus = load_corpus(cfg, tmp_path)
    tokenizer = train_tokenizers(cfg.data, corpus.train, tmp_path).target
    encoded = encode_chat(tokenizer, Chat.from_json(corpus.train[0]["messages"]))
    learned = [i for i, own in zip(encoded.ids, encoded.answers, strict=True) if own]
    assert tokenizer.backend_tokenizer.decode(learned, skip_special_tokens=False) == "I am fine.<|im_end|>" * 2


def test_a_system_message_is_written_once():
    record = {"system": "Be brief.", "messages": [SYSTEM, *PAIR]}
    assert chat_of(record).messages == [SYSTEM, *PAIR]
    with pytest.raises(DataError, match="has a message of the system and another text in its field 'system'"):
        chat_of({**record, "system": "Be long."})


def test_jinja2_is_named_if_it_is_missing(checkpoint, tmp_path, monkeypatch):
    write(tmp_path, {"messages": PAIR})
    cfg = config(checkpoint)
    corpus = load_corpus(cfg, tmp_path)
    template._compile.cache_clear()
    monkeypatch.setattr(checks, "not_installed", lambda names: list(names))
    with pytest.raises(UserError, match=r'^a chat template needs jinja2: pip install -e "\.\[chat\]"$'):
        train_tokenizers(cfg.data, corpus.train)


@pytest.mark.parametrize("source", ["checkpoint", "file"])
def test_a_template_survives_a_changed_vocabulary(source, checkpoint, tmp_path):
    """And so does the end of answers, which the template of a tokenizer.json alone names."""
    if source == "checkpoint":
        tokenizer = load_checkpoint_tokenizers(checkpoint).target
    else:
        (tmp_path / "mine.jinja").write_text(chats.CHATML)
        cfg = config(checkpoint / "tokenizer.json", chat_template="mine.jinja")
        tokenizer = train_tokenizers(cfg.data, [{"messages": Chat.read(PAIR).to_json()}], tmp_path).target
        assert tokenizer.special.name(tokenizer.special.eos[-1]) == "<|im_end|>"
    text = Chat.read(chats.CHATS[1]).to_json()
    remaining = needed_tokens(tokenizer, tokenizer.encode(written_text(tokenizer, text)))
    for changed in (trim(tokenizer, remaining), extend(tokenizer, ["Ġtranslator"], ["<br>"], ["de"])):
        assert changed.tokenizer.vocab_size != tokenizer.vocab_size
        after, before = (encode_chat(each, Chat.from_json(text)) for each in (changed.tokenizer, tokenizer))
        assert [changed.rows[i][0] for i in after.ids] == before.ids and after.answers == before.answers
        assert tuple(changed.rows[i][0] for i in changed.tokenizer.special.eos) == tokenizer.special.eos


@pytest.mark.parametrize("stripping", [False, True])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_spelled_name_changes_no_other_token(scheme, stripping):
    """Of vocabularies that write spaces before texts, as Llama's, and special tokens that strip, as Phi-3's.

    The tokens are those of the library for the whole text, if it has no special token of the spelled name.
    """
    names = ("<|user|>", "<|assistant|>", "<|end|>", "</s>")
    library = hf.Tokenizer(hf.models.BPE())
    library.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    alphabet = [*map(chr, range(33, 127)), "\n"]
    options = {"vocab_size": 130, "special_tokens": [*names], "initial_alphabet": alphabet, "show_progress": False}
    library.train_from_iterator(chats.TEXTS, hf.trainers.BpeTrainer(**options))
    library.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    values = json.loads(library.to_str())
    for token in values["added_tokens"]:
        token.update(lstrip=stripping and token["content"] == "<|end|>", rstrip=stripping)
    plain = hf.Tokenizer.from_str(json.dumps(values | {"added_tokens": values["added_tokens"][:3]}))
    special = SpecialTokens(tuple(enumerate(names)), 3, (3, 2), None, None, None, ())
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + ' <|end|>\n' }}{% endfor %}"
    tokenizer = with_chat(HFTokenizer(hf.Tokenizer.from_str(json.dumps(values)), special), template)
    for messages in (
        chats.chat("What does </s> mean?", "</s> is the end.", "the cat", "a </s>"),
        chats.chat("the cat", " How </s>\n", "</s>", "sat"),
    ):
        chat = Chat.read(messages)
        actual = encode_chat(tokenizer, chat)
        expected = plain.encode(written_text(tokenizer, chat.to_json())).ids
        assert actual.ids == expected
        assert actual.ids.count(2) == len(messages) and 3 not in actual.ids


def test_where_a_template_is_looked_for(tmp_path):
    """A list has names; the file chat_template.jinja counts before the field of tokenizer_config.json."""
    folder = chats.write_tokenizer(tmp_path / "checkpoint")
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": chats.CHATML}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    assert template.read_template(path) == template.read_template(folder) == chats.CHATML
    assert load_checkpoint_tokenizers(folder).target.chat.text == chats.CHATML
    (folder / "chat_template.jinja").write_text(chats.GENERATION)
    assert template.read_template(folder) == template.read_template(folder / "chat_template.jinja") == chats.GENERATION
    assert load_checkpoint_tokenizers(folder).target.chat.text == chats.GENERATION
    (folder / "chat_template.jinja").write_text("\ufeff" + chats.CHATML, encoding="utf-8")
    assert template.read_template(folder) == chats.CHATML
    (folder / "latin.jinja").write_bytes("ä".encode("latin-1"))
    with pytest.raises(UserError, match="latin.jinja is not UTF-8: save it as UTF-8"):
        template.read_template(folder / "latin.jinja")
    for name, problem in ({"missing": "does not exist", "config.json": "has no template"}).items():
        with pytest.raises(UserError, match=rf"^data\.chat_template: .*{name} {problem}$"):
            template.read_template(folder / name)
