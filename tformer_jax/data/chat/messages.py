"""Conversations: lists of messages with roles, as OpenAI's API has them."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tformer_jax.base.errors import UserError
from tformer_jax.data.characters import is_blank

Message = dict[str, Any]
"""A message as a template reads it: "role", "content", and other fields such as "tool_calls"."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASSISTANT = "assistant"
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters of Unicode, which are used inside of this package and must not occur in messages."""
MAX_DEPTH = 100
"""Maximum number of objects and lists within each other in a message or a tool."""
JSON = str | int | float | list | tuple | Mapping | None
"""Types of the values of a message."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, ready for a template.

    Raises:
        UserError: a message is malformed; the error says which one.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """Descriptions of functions, which some templates show the model."""
    weights: Sequence[bool] = ()
    """Whether each message is trained on if it is the assistant's; (): all are (OpenAI's `weight`)."""

    @classmethod
    def read(cls, messages: Any, tools: Any = None) -> "Chat":
        """Reads messages in the form of OpenAI's API."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise UserError("must be a list of messages, such as [{'role': 'user', 'content': 'Hello'}]")
        if not isinstance(tools, list | None):
            raise UserError(f"has tools that are {type(tools).__name__}, not a list of descriptions of functions")
        _check_value(tools, "a tool")
        read = [_read_message(message, number) for number, message in enumerate(messages, start=1)]
        weights = tuple(bool(message.pop("weight", 1)) for message in read)
        return cls(read, tools or None, () if all(weights) else weights)

    @classmethod
    def from_json(cls, text: str) -> "Chat":
        """Restores a conversation from `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Returns the conversation as one line, which is the text of an example."""
        values = {"messages": list(self.messages), "tools": self.tools, "weights": list(self.weights)}
        return json.dumps({name: value for name, value in values.items() if value}, ensure_ascii=False)

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == ASSISTANT]

    @property
    def answer_weights(self) -> list[bool]:
        """Whether each of the assistant's messages is trained on."""
        return [not self.weights or self.weights[place] for place in self.answers]

    def until(self, count: int) -> "Chat":
        """Returns the first `count` messages."""
        return dataclasses.replace(self, messages=self.messages[:count], weights=self.weights[:count])

    def with_written_arguments(self) -> "Chat":
        """Returns the conversation with the arguments of calls as JSON, as OpenAI's API has them."""
        return dataclasses.replace(self, messages=_rewritten(list(self.messages), _write_arguments))

    def to_answer(self) -> "Chat":
        """Returns the conversation without the assistant's message at its end, if it has one."""
        return self.until(len(self.messages) - (self.messages[-1]["role"] == ASSISTANT))


def contents(text: str) -> str:
    """Returns what the messages of `Chat.to_json` say, one per line."""
    return "\n".join(message.get("content") or "" for message in Chat.from_json(text).messages)


def has_blank_side(text: str) -> bool:
    """Returns whether a user's message, or an answer to learn that calls no tools, has no visible character.

    Args:
        text: a conversation by `Chat.to_json`.
    """
    chat = Chat.from_json(text)
    learned = dict(zip(chat.answers, chat.answer_weights, strict=True))
    return any(
        is_blank(message.get("content") or "") and not message.get("tool_calls")
        for place, message in enumerate(chat.messages)
        if message["role"] == "user" or learned.get(place)
    )


def say(content: str, system: str | None = None) -> Chat:
    """Returns a conversation of one user message, after a system message if `system` is given."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return Chat.read([*first, {"role": "user", "content": content}])


def _read_message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f"message {number} must be an object with role and content")
    values = {name: value for name, value in message.items() if value is not None}  # templates would write "None"
    _check_value(values, f"message {number}")
    role = values.get("role")
    if role not in ROLES:
        raise UserError(f"message {number} has the role {role!r}: write one of {', '.join(ROLES)}")
    if isinstance(values.get("content"), list):
        values["content"] = "".join(_text_of(part, number) for part in values["content"])
    if not isinstance(values.get("content", ""), str):
        raise UserError(f"the content of message {number} must be text")
    if "content" not in values and not values.get("tool_calls"):
        raise UserError(f"message {number} of the {role} has no content")
    if values.get("weight", 1) not in (0, 1):
        raise UserError(f"message {number} has the weight {values['weight']!r}: write 0 or 1")
    if values.get("tool_calls"):  # templates read objects, and OpenAI's API has them as JSON
        values["tool_calls"] = _rewritten(values["tool_calls"], _read_arguments)
        _check_value(values["tool_calls"], f"a call in message {number}")
    return values


def _rewritten(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a message, or a part of it, with the arguments of its calls of tools changed."""
    if isinstance(value, list):
        return [_rewritten(part, change) for part in value]
    if not isinstance(value, Mapping):
        return value
    calls = {name: _rewritten(value[name], change) for name in ("tool_calls", "function") if name in value}
    return {**value, **calls} | ({"arguments": change(value["arguments"])} if "arguments" in value else {})


def _read_arguments(arguments: Any) -> Any:
    """Returns the object that a JSON text has; another value, and a text that an object cannot hold, as it is."""
    try:
        options: dict[str, Any] = {"object_pairs_hook": _unique_fields, "parse_constant": _reject_number}
        read = json.loads(arguments, **options) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _unique_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _reject_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _write_arguments(arguments: Any) -> Any:
    """Returns an object as JSON; another value as it is."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _check_value(value: Any, name: str) -> None:
    """Raises `UserError` for a value that JSON does not have, that is nested too deeply, or whose text is invalid."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if other := next((part for part in level if not isinstance(part, JSON)), None):
            raise UserError(f"{name} has a value of the type {type(other).__name__}: write text, a number or a list")
        for text in (part for part in level if isinstance(part, str)):
            if mark := next((mark for mark in MARKS if mark in text), None):
                raise UserError(f"{name} has U+{ord(mark):04X}, which is not a character: remove it")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(f"{name} has a lone surrogate, which is not a character: remove it") from None
        level = [part for outer in level for part in _parts(outer)]
    if level:
        raise UserError(f"{name} is nested more than {MAX_DEPTH} levels deep")


def _parts(value: Any) -> Iterable[Any]:
    """Returns the names and values of an object, or the elements of a list."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if isinstance(value, list) else ()


def _text_of(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"message {number} has a part of the type {kind!r}: only texts are read")
