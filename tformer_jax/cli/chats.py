"""The flags `--chat` and `--system`: conversations of lines, of records, and at the prompt."""

import argparse
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.cli import languages
from tformer_jax.cli.inputs import JSONL
from tformer_jax.data.chat.messages import ASSISTANT, Chat, Message, say
from tformer_jax.data.corpora.chats import chat_of
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.chats import template_of
from tformer_jax.inference.encoding import TextError
from tformer_jax.inference.requests import Request

SETTINGS = ("chat", "system", "field")
"""Options that determine the outputs."""
NEW = "/new"
"""What begins a new conversation at the prompt."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--chat` and `--system` to the parser of a command that answers."""
    what = "answer each text, or the conversation of each .jsonl record, without the answer at its end"
    add_chat(parser, f"{what}; with --interactive, {NEW} begins a new one")
    parser.add_argument("--system", metavar="TEXT", help="message of the system at the beginning of each conversation")


def add_chat(parser: argparse.ArgumentParser, use: str) -> None:
    """Adds `--chat`; `use` says what the command does with it."""
    layouts = "messages, conversations, or prompt and response; --field names another one of messages"
    parser.add_argument("--chat", action="store_true", help=f"{use}, by the chat template of the run ({layouts})")


def record_fields(options: argparse.Namespace, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns (), for records of conversations.

    Raises:
        UserError: the input has no records, or the tokenizer has no template.
    """
    if not _has_records(options):
        raise UserError("--chat scores the answers of conversations: name a .jsonl file with --input")
    template_of(tokenizer)
    return ()


def read_records(records: Iterable[Any], field: str) -> Iterator[Chat]:
    """Yields the conversations of records; raises `TextError` for one that has none."""
    for index, record in enumerate(records):
        try:
            chat = chat_of(record, _names(field))
            if not chat.answers:
                raise UserError("has no message of the assistant to score")
            yield chat
        except UserError as error:
            raise TextError(index, str(error)) from None


def _has_records(options: argparse.Namespace) -> bool:
    return options.input is not None and options.input.name.endswith(JSONL)


def _names(field: str) -> tuple[str, ...]:
    """Returns the field of messages that `--field` names; () if it is the default."""
    return () if field == "text" else (field,)


@dataclasses.dataclass
class Chats:
    """Makes requests of conversations.

    Args:
        fields: options that name the fields of texts; (): records of conversations are read.
        names: the fields of conversations in a record; (): the fields that `chat_of` looks for.
    """

    fields: tuple[str, ...]
    names: tuple[str, ...] = ()
    system: str | None = None
    turns: list[Message] = dataclasses.field(default_factory=list)
    """The messages at the prompt so far."""

    @classmethod
    def given(cls, options: argparse.Namespace, tokenizer: Tokenizer) -> "Chats | None":
        """Returns what `--chat` asks for; None without it.

        Raises:
            UserError: flags contradict each other, or the tokenizer has no template.
        """
        if not getattr(options, "chat", False):
            if getattr(options, "system", None) is not None:
                raise UserError("--system is used only with --chat: add it")
            return None
        if languages.given_fields(options):
            problem = "--prefix-field, nor --constraints-field: write --prefix, the beginning of every answer"
            raise UserError(f"--chat has no {problem}")
        template_of(tokenizer)
        return cls(() if _has_records(options) else ("field",), _names(options.field), options.system)

    def requests(self, items: Iterable[Any]) -> Iterator[Request]:
        """Yields the requests of texts, or of records."""
        for index, item in enumerate(items):
            try:
                chat = say(item) if isinstance(item, str) else chat_of(_with_response(item), self.names).to_answer()
                if not chat.messages:
                    raise UserError("has no message before the answer")
                yield self._request(chat)
            except UserError as error:
                raise TextError(index, str(error)) from None

    def turn(self, text: str) -> Request:
        """Returns the request to answer a text at the prompt."""
        self.turns.append({"role": "user", "content": text})
        return self._request(Chat.read(self.turns))

    def keep(self, answer: str) -> None:
        """Adds the answer to the conversation at the prompt; an empty one takes its question back."""
        if answer:
            self.turns.append({"role": ASSISTANT, "content": answer})
        else:
            self.turns.pop()

    def _request(self, chat: Chat) -> Request:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        if first and chat.messages[0]["role"] == "system":
            raise UserError("already has a system message: leave out --system")
        return Request("", chat=dataclasses.replace(chat, messages=[*first, *chat.messages], weights=()))


def _with_response(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of a prompt alone with an empty response, which `chat_of` needs."""
    alone = isinstance(record.get("prompt"), str) and not {"response", "completion", "messages"} & record.keys()
    return {**record, "response": ""} if alone else record
