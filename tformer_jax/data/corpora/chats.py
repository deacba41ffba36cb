"""Layouts of records of conversations: OpenAI's messages, ShareGPT's conversations, and prompts with responses."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora.example import DataError, Example, type_name
from tformer_jax.data.corpora.lines import NOT_A_CHARACTER, is_unicode

ALPACA = ("instruction", "output")
LAYOUTS = (("messages",), ("conversations",), ("prompt", "response"), ("prompt", "completion"), ALPACA)
"""Fields of each layout; a record is read by the first layout whose fields it has."""
ASIDE = ("system", "tools", "input")
"""Fields that a record may have besides; `input` continues the instruction of `ALPACA`."""
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT that have other names than OpenAI's."""


def is_chat_field(cfg: DataConfig, name: str) -> bool:
    """Returns whether a column may be a part of conversations."""
    named = (*cfg.fields, *(field.partition(".")[0] for field in cfg.fields), *ASIDE)
    return name in named or any(name in layout for layout in LAYOUTS if not cfg.fields)


def read_chat(record: Any, fields: Sequence[str] = ()) -> Example:
    """Builds the example of a conversation; its text is `Chat.to_json`.

    Args:
        fields: the field of messages, or the fields of prompt and response; (): the first layout that fits.

    Raises:
        DataError: the record has none of the layouts, or a message is malformed.
    """
    chat = chat_of(record, fields)
    if not any(chat.answer_weights):
        raise DataError("has no message of the assistant to learn")
    text = chat.to_json()
    if not is_unicode(text):
        raise DataError(f"a message {NOT_A_CHARACTER}")
    return {"messages": text}


def chat_of(record: Any, fields: Sequence[str] = ()) -> Chat:
    """Returns the conversation of a record; arguments and exceptions are as for `read_chat`."""
    if not isinstance(record, Mapping):
        raise DataError("is not an object with named fields")
    layouts = [tuple(fields)] if fields else LAYOUTS
    layout = next((layout for layout in layouts if all(_find(record, name) is not None for name in layout)), None)
    if layout is None:
        wanted = " or ".join(" and ".join(map(repr, layout)) for layout in layouts)
        present = ", ".join(map(repr, record)) or "none"
        raise DataError(f"has no field {wanted}, only {present}: name the fields in data.fields")
    values = [_find(record, name) for name in layout]
    if layout == ALPACA and record.get("input"):
        values[0] = "\n\n".join(_text(record, name) for name in ("instruction", "input"))
    messages = _from_pair(layout, *values) if len(values) == 2 else _as_openai(layout[0], values[0])
    system = _text(record, "system") if record.get("system") is not None else None
    first = [{"role": "system", "content": system}] if system else []
    if first and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        if messages[0].get("content") != system:
            raise DataError("has a message of the system and another text in its field 'system': keep one of them")
        first = []
    try:
        return Chat.read([*first, *messages], _tools(record.get("tools")))
    except UserError as error:
        raise DataError(str(error)) from None


def _text(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record[name], str):
        raise DataError(f"field {name!r} is {type_name(record[name])}, not text")
    return str(record[name])


def _find(record: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a record, as `records.read_field` reads it; None: it is missing."""
    outer, dot, inner = name.partition(".")
    if name in record or not dot:
        return record.get(name)
    return _find(record[outer], inner) if isinstance(record.get(outer), Mapping) else None


def _tools(value: Any) -> Any:
    """Returns the tools of a record, which may be JSON in a text."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except ValueError:
        raise DataError("field 'tools' is a text that is not JSON") from None


def _from_pair(layout: Sequence[str], *values: Any) -> list[Any]:
    """Returns the messages of a prompt and a response, each a text or, as in TRL, a list of messages."""
    messages: list[Any] = []
    for name, value, role in zip(layout, values, ("user", "assistant"), strict=True):
        if not isinstance(value, str | list | tuple):
            raise DataError(f"field {name!r} is {type_name(value)}, not text or a list of messages")
        messages += [{"role": role, "content": value}] if isinstance(value, str) else _as_openai(name, value)
    return messages


def _as_openai(field: str, messages: Any) -> list[Any]:
    """Returns messages with "role" and "content" in place of ShareGPT's "from" and "value"."""
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"field {field!r} is not a list of messages with role and content, or from and value")
    return [_rename(message) if isinstance(message, Mapping) and "from" in message else message for message in messages]


def _rename(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["from"]
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": SHAREGPT.get(role, role), "content": message.get("value"), **others}
