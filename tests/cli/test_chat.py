"""Conversations in commands: generate.py --chat and score.py --chat, and the export of their template."""

import builtins
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import tformer_jax as tj
from tests import chats
from tests.cli.finished_runs import run_of_conversations
from tformer_jax import api
from tformer_jax.base.errors import UserError
from tformer_jax.cli import generate, score
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.chats import encode_chat, encode_prompt
from tformer_jax.data.tokenizers.simple import ByteTokenizer

LENGTH = 96
LONG = ["--min-new-tokens", "5", "--max-new-tokens", "5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tj.load(run_of_conversations(tmp_path_factory.mktemp("runs")))


def records_of(command, run, records, folder, *flags):
    """Returns the records that a command writes for the lines of a file."""
    given, written = folder / "given.jsonl", folder / "written.jsonl"
    given.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    command.main(["--run", str(run.path), "--chat", "--input", str(given), "--output", str(written), *flags])
    return [json.loads(line) for line in written.read_text().splitlines()]


@functools.partial(jax.jit, static_argnums=0)
def whole_pass(model, params, row):
    return model.apply({"params": params}, row)


def logits_of(model, params, ids):
    """Returns the logits of a row that is padded, so that one program computes all."""
    row = np.array([[*ids, *[0] * (LENGTH - len(ids))]])
    return whole_pass(model, params, row)[0]


def greedy(run, messages, count=5):
    """Returns an answer, token by token from whole passes; no token ends it."""
    ids = encode_prompt(run.tokenizers.target, Chat.read(messages))
    special = run.tokenizers.target.special
    for _ in range(count):
        logits = np.array(logits_of(run.model, run.params, ids)[len(ids) - 1])
        logits[[*special.eos, *special.suppressed]] = -np.inf
        ids.append(int(logits.argmax()))
    return run.tokenizers.target.decode(ids[-count:])


@pytest.mark.slow
def test_answers_of_records_and_texts(run, tmp_path, capsys):
    conversation = chats.chat("Hi", "Hello!", "How are you?")
    system = {"role": "system", "content": "Be brief."}
    records = [
        {"messages": conversation, "id": 1},
        {"messages": [*conversation, {"role": "assistant", "content": "x"}]},
    ]
    records += [{"prompt": "Hi"}, {"prompt": "Hi", "response": "left out"}]
    written = records_of(generate, run, records, tmp_path, *LONG)
    expected = [greedy(run, messages) for messages in (conversation, conversation, *[chats.chat("Hi")] * 2)]
    assert [line["outputs"] for line in written] == [[text] for text in expected]
    assert [{name: line[name] for name in record} for line, record in zip(written, records, strict=True)] == records
    generate.main(["--run", str(run.path), "--chat", "Hi", "--system", "Be brief.", *LONG])
    assert capsys.readouterr().out == greedy(run, [system, *chats.chat("Hi")]) + "\n"
    settings = {"min_new_tokens": 5, "max_new_tokens": 5}
    assert run.chat([conversation, chats.chat("Hi")], **settings) == [expected[0], expected[2]]


@pytest.mark.long
def test_a_conversation_at_the_prompt(run, monkeypatch, capsys):
    """Each answer depends on the turns before it, until /new."""
    typed = iter(["Hi", "How are you?", "/new", "Hi"])
    monkeypatch.setattr(builtins, "input", lambda _: next(typed, None) or (_ for _ in ()).throw(EOFError()))
    generate.main(["--run", str(run.path), "--chat", "--interactive", *LONG])
    first = greedy(run, chats.chat("Hi"))
    second = greedy(run, chats.chat("Hi", first, "How are you?"))
    assert capsys.readouterr().out == f"{first}\n{second}\n\n{first}\n\n"


@pytest.mark.long
def test_scores_of_answers(run, tmp_path):
    """They are the log-probabilities of the assistant's tokens, from the logits."""
    conversation = chats.chat("Hi", "Hello!", "How are you?", "I am fine.")
    (written,) = records_of(score, run, [{"messages": conversation}], tmp_path, "--per-token")
    encoded = encode_chat(run.tokenizers.target, Chat.read(conversation))
    log_p = np.asarray(jax.nn.log_softmax(logits_of(run.model, run.params, encoded.ids), axis=-1))
    places = np.flatnonzero(encoded.answers)
    expected = [log_p[place - 1, encoded.ids[place]] for place in places]
    np.testing.assert_allclose(written["log_probabilities"], expected, rtol=1e-5)
    assert "".join(written["tokens"]) == "Hello!<|im_end|>I am fine.<|im_end|>"
    (scored,) = run.score([Chat.read(conversation)])
    assert scored.log_probabilities == written["log_probabilities"]


@pytest.mark.parametrize(
    ("command", "record", "flags", "problem"),
    [
        (generate, {"text": "a"}, [], r"given\.jsonl, line 1: has no field 'messages' or"),
        (
            generate,
            {"messages": [{"role": "assistant", "content": "a"}]},
            [],
            "line 1: has no message before the answer",
        ),
        (
            generate,
            {"messages": [{"role": "system", "content": "a"}]},
            ["--system", "b"],
            "already has a system message: leave out --system",
        ),
        (
            generate,
            {"messages": chats.chat("a " * 200)},
            [],
            "line 1: the prompt has 209 tokens, but",
        ),
        (
            score,
            {"messages": chats.chat("a", "b " * 200)},
            [],
            "line 1: the conversation has ... tokens, but",
        ),
        (score, {"x": 1}, [], "line 1: has no field 'messages'"),
        (score, {"messages": chats.chat("a")}, [], "line 1: has no message of the assistant to score"),
        (generate, {"prompt": "a"}, ["--prefix-field", "b"], "--chat has no --prefix-field"),
    ],
)
def test_mistakes(command, record, flags, problem, run, tmp_path):
    with pytest.raises(UserError, match=problem):
        records_of(command, run, [record], tmp_path, *flags)


@pytest.mark.parametrize(
    ("command", "flags", "problem"),
    [
        (generate, ["--chat", "Hi"], "has no chat template: train it with task='chat'"),
        (generate, ["Hi", "--system", "b"], "--system is used only with --chat"),
        (score, ["--chat", "Hi"], r"--chat scores the answers of conversations: name a \.jsonl file"),
    ],
)
def test_flags_that_do_not_fit(command, flags, problem, run, monkeypatch):
    own = ByteTokenizer()
    monkeypatch.setattr(api, "load", lambda *_, **__: dataclasses.replace(run, tokenizers=Tokenizers(own, own)))
    with pytest.raises(UserError, match=problem):
        command.main(["--run", str(run.path), *flags])
