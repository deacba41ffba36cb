"""Tokens of conversations, and which of them the assistant writes."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.chat.template import SPELLED, UNUSED, ChatTemplate
from tformer_jax.data.columns import Block, Column
from tformer_jax.data.corpora.example import DataError
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.normalization import symbol_pattern
from tformer_jax.special_tokens import IGNORED

NOTHING = re.compile(r"(?!)")


class Encoded(NamedTuple):
    """The tokens of a conversation."""

    ids: list[int]
    answers: list[bool]
    """Whether the assistant writes each token, in a message that is trained on."""

    @property
    def labels(self) -> list[int]:
        """The answers' tokens; IGNORED elsewhere."""
        return [i if answer else IGNORED for i, answer in zip(self.ids, self.answers, strict=True)]


def encode_chats(tokenizer: Tokenizer, chats: Sequence[str]) -> Block:
    """Tokenizes conversations, given by `Chat.to_json`.

    Returns:
        "messages": all tokens; "answers": 1 for tokens of the assistant's messages that are trained on, else 0.

    Raises:
        DataError: the template refuses a conversation; the error quotes it.
    """
    rows = []
    for text in chats:
        try:
            rows.append(encode_chat(tokenizer, Chat.from_json(text)))
        except UserError as error:
            raise DataError(f"{error}; the conversation is {text[:120]}") from None
    return {
        "messages": Column.from_rows([row.ids for row in rows]),
        "answers": Column.from_rows([np.array(row.answers, np.int32) for row in rows]),
    }


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> Encoded:
    """Tokenizes a conversation by the tokenizer's template.

    The tokens equal the output of transformers' `apply_chat_template`, except that special tokens which messages spell
    stay ordinary text here. A token that lies partly in an answer belongs to it, as in transformers.

    Raises:
        UserError: the tokenizer has no template, or its template refuses the conversation or has answers that cannot
            be located.
    """
    text, spans, weights = locate_answers(tokenizer, chat)
    places = [place for span in spans for place in span]
    ids, *beginnings = _encode(tokenizer, [text, *(text[:place] for place in places)])
    answers = [False] * len(ids)
    for first, last, weight in zip(beginnings[::2], beginnings[1::2], weights, strict=True):
        start, end = _count_alike(first, ids), _count_alike(last, ids)
        for place in range(start, min(end + (end < len(last)), len(ids))):
            answers[place] = weight
    return Encoded(ids, answers)


def locate_answers(tokenizer: Tokenizer, chat: Chat) -> tuple[str, tuple[tuple[int, int], ...], list[bool]]:
    """Returns the text of a conversation, start and end of each answer in it, and whether each is trained on.

    Raises:
        UserError: as `encode_chat`.
    """
    template, names = template_of(tokenizer), _names(tokenizer)
    text, spans = template.render(chat, names)
    if not template.has_spans:
        spans = tuple(_find_answer(template, names, chat, text, place) for place in chat.answers)
    weights = chat.answer_weights
    if len(weights) != len(spans):
        if not all(weights):
            raise UserError("the chat template has another number of answers than the conversation: leave out weight")
        weights = [True] * len(spans)
    return text, spans, weights


def encode_prompt(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Returns the tokens of a conversation and of the beginning of the assistant's next message."""
    return _encode(tokenizer, [template_of(tokenizer).render(chat, _names(tokenizer), prompt=True).text])[0]


def written_text(tokenizer: Tokenizer, chat: str) -> str:
    """Returns the text of a conversation, given by `Chat.to_json`, with names that messages spell as they are."""
    return template_of(tokenizer).render(Chat.from_json(chat), NOTHING).text


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template of a tokenizer.

    Raises:
        UserError: it has none.
    """
    if tokenizer.chat is None:
        raise UserError("the model has no chat template: train it with task='chat', or import one that has")
    return tokenizer.chat


def with_chat(tokenizer: Tokenizer, text: str, tokens: Mapping[str, str] | None = None) -> Tokenizer:
    """Returns a tokenizer with a template.

    Args:
        tokens: names of special tokens by their variables, such as `eos_token`; they replace the tokenizer's names.
    """
    return tokenizer.with_chat(ChatTemplate.make(text, role_names(tokenizer) | dict(tokens or {})))


def role_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the names of special tokens by `bos_token`, `eos_token`, `unk_token` and `pad_token`, if it has them."""
    special = tokenizer.special
    ids = {"bos": special.bos, "eos": special.eos[0], "unk": special.unknown, "pad": special.pad}
    names = {f"{role}_token": None if i is None else special.name(i) for role, i in ids.items()}
    return {role: name for role, name in names.items() if name is not None}


def ending_answers(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer whose outputs also end with the special token that ends answers in its template.

    Raises:
        UserError: the template ends them with ordinary text.
    """
    encoded = encode_chat(tokenizer, Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    last = max(place for place, answer in enumerate(encoded.answers) if answer)
    end = encoded.ids[last]
    if tokenizer.special.name(end) is None:
        raise UserError(
            "the chat template ends answers without a special token, so that no output would end: write a template "
            "with {{ eos_token }} at their end, within {% generation %} if it has that"
        )
    eos = tokenizer.special.eos
    return tokenizer if end in eos else tokenizer.with_chat(template_of(tokenizer), (*eos, end))


def _find_answer(template: ChatTemplate, names: re.Pattern[str], chat: Chat, text: str, place: int) -> tuple[int, int]:
    """Returns the start and the end in `text` of the answer at a place of a conversation.

    It is what follows the prompt up to the special token that ends it, if white space alone follows the token.
    """
    is_last = place + 1 == len(chat.messages)
    whole = text if is_last else template.render(chat.until(place + 1), names).text
    prompt = template.render(chat.until(place), names, prompt=True).text if place else _before_greeting(whole, chat)
    if prompt is None or not (text.startswith(whole) and whole.startswith(prompt)):
        return _find_content(template, names, chat, text, place)
    ends = [match.end() for match in names.finditer(whole, len(prompt))]
    return len(prompt), ends[-1] if ends and not whole[ends[-1] :].strip() else len(whole)


def _find_content(template: ChatTemplate, names: re.Pattern[str], chat: Chat, text: str, place: int) -> tuple[int, int]:
    """Returns the start and the end in `text` of the content of a message, and of a special token that follows.

    It is where another content changes the text, for templates that write a message otherwise if others follow it.

    Raises:
        UserError: the message calls tools, or its content is not in the text.
    """
    marked = {**chat.messages[place], "content": UNUSED}
    messages = [*chat.messages[:place], marked, *chat.messages[place + 1 :]]
    other = template.render(dataclasses.replace(chat, messages=messages), names).text
    if chat.messages[place].get("tool_calls") or other.count(UNUSED) != 1:
        raise UserError(
            f"the chat template writes message {place + 1} differently within the conversation, so that the answer "
            "cannot be located: enclose what the assistant writes with {% generation %} and {% endgeneration %}"
        )
    before, _, after = other.partition(UNUSED)
    start, end = len(before), len(text) - len(after)
    if start > end or not (text.startswith(before) and text.endswith(after)):
        raise UserError(f"the chat template writes other messages differently by the content of message {place + 1}")
    following = names.match(text, end)
    return start, following.end() if following else end


def _before_greeting(whole: str, chat: Chat) -> str | None:
    """Returns what a template writes before the content of a first message, since it may refuse to write no message.

    None: the content cannot be located.
    """
    content = (chat.messages[0].get("content") or "").strip()
    return whole.partition(content)[0] if content and whole.count(content) == 1 else None


def _names(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Returns a pattern that matches the names of a tokenizer's special tokens."""
    names = tuple(name for _, name in tokenizer.special.names if name)
    return symbol_pattern(names) if names else NOTHING


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes rendered texts, in which names of special tokens are these tokens, unless they are marked."""
    if _without_names(tokenizer) is not tokenizer:
        spelled = any(SPELLED in text for text in texts)
        return [_encode_spelled(tokenizer, text) for text in texts] if spelled else tokenizer.encode_batch(texts)
    ids = {name: i for i, name in tokenizer.special.names}
    rows = [list(filter(None, _names(tokenizer).split(text))) for text in texts]
    parts = [part.replace(SPELLED, "") for row in rows for part in row if part not in ids]
    encoded = iter(tokenizer.encode_batch(parts))
    return [[i for part in row for i in ([ids[part]] if part in ids else next(encoded))] for row in rows]


def _encode_spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text with a tokenizer that reads names of special tokens, except for names that are marked."""
    parts = list(filter(None, _names(tokenizer).split(text)))
    ids: list[int] = []
    read = ""
    for before, part, after in zip(("", *parts), parts, (*parts[1:], ""), strict=False):
        if SPELLED not in part:
            read += part
        else:
            ids += [*tokenizer.encode(read), *_encode_between(tokenizer, before, part.replace(SPELLED, ""), after)]
            read = ""
    return [*ids, *tokenizer.encode(read)]


def _encode_between(tokenizer: Tokenizer, before: str, text: str, after: str) -> list[int]:
    """Encodes a text without special tokens as if it stood between the special tokens `before` and `after`.

    Some special tokens include the white space around them, and some tokenizers put a space before whole texts only.
    These encode it after a newline, as transformers does, whose tokens are dropped.
    """
    plain = _without_names(tokenizer)
    if before and len(tokenizer.encode(f"{before}\n")) == 1:
        text = text.lstrip()
    if after and len(tokenizer.encode(f"\n{after}")) == 1:
        text = text.rstrip()
    if before and tokenizer.encode(f"{before}a")[1:] != plain.encode("a"):
        newline, ids = plain.encode("\n"), plain.encode(f"\n{text}")
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
    return plain.encode(text)


@functools.lru_cache(maxsize=8)
def _without_names(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer.without_special_names()


def _count_alike(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the number of equal ids at the beginning of two texts."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
