"""Encodes texts as token ids that fit the model's maximum length."""

import itertools
from collections.abc import Sequence
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.tokens import document_end

ON_LONG = ("stop", "truncate", "skip")
"""What can be done with a text that is too long for the model."""
NO_START = "the model has no token that starts a text"
"""Why a language model cannot start from an empty prompt."""


class TextError(UserError):
    """The model cannot process one of several texts.

    Args:
        index: position of the text among the inputs, from 0.
        problem: what is wrong with the text, without its position.
    """

    def __init__(self, index: int, problem: str):
        super().__init__(f"text {index + 1}: {problem}")
        self.index, self.problem = index, problem


class LongTextError(TextError):
    """A text has more tokens than the model takes."""


class LongTexts:
    """Policy for texts that are too long for the model, and a record of their indices.

    Args:
        action: "stop": raise an error; "truncate": keep the first tokens (of prompts, the last); "skip": leave it out.
    """

    def __init__(self, action: str = "stop"):
        assert action in ON_LONG
        self.action = action
        self._indices: set[int] = set()

    def fit(self, index: int, ids: list[int], limit: int, name: str, *, last: int | None = None) -> list[int] | None:
        """Returns the token ids of text `index`, truncated if they exceed the limit; None if the text is left out.

        Args:
            limit: maximum number of tokens.
            name: role of the text in error messages, such as "source".
            last: truncate to this number of last tokens; None: to the first `limit` tokens.

        Raises:
            LongTextError: there are too many tokens, and the action is "stop".
        """
        if len(ids) <= limit:
            return ids
        if self.action == "stop":
            raise LongTextError(index, too_long(f"the {name}", len(ids), limit))
        self._indices.add(index)
        if self.action == "skip":
            return None
        return ids[:limit] if last is None else ids[-last:]

    def remarks(self, texts: int, name: str, max_length: int) -> tuple[str, ...]:
        """Returns a sentence about the texts that were truncated, of `texts` called `name`; () if none were."""
        if not (count := len(self._indices)):
            return ()
        were = "was" if count == 1 else "were"
        return (f"{count:,} of {texts:,} {name} {were} longer than model.max_length={max_length} and {were} truncated",)

    def pop(self, index: int) -> bool:
        """Returns whether text `index` was too long, and removes it from the record."""
        too_long = index in self._indices
        self._indices.discard(index)
        return too_long


def encode_with_masks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text, reading the mask token's name as the mask token.

    If the tokenizer joins spaces to words, a space before the name is removed: the masked token would include it.
    """
    ids = tokenizer.encode(text)
    mask, name = tokenizer.mask or (None, "")
    if mask is None or mask in ids or name not in text:
        return ids
    *before, last = text.split(name)
    if len(tokenizer.encode("a a")) == 2:
        before = [part.removesuffix(" ") for part in before]
    first, *others = map(tokenizer.encode, (*before, last))
    return first + [token for part in others for token in (mask, *part)]


def no_tokens(name: str, text: Any, reason: str = "") -> str:
    """Returns the error of a text, or list of token ids, without tokens; tokenizers may drop unknown characters."""
    if text:
        return f"{name} has no character of the vocabulary"
    return f"{name} is empty{reason and f', and {reason}'}: write at least one character"


def start_of_text(cfg: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens with which a language model starts a text from nothing; () if it has none.

    These are the tokens before each text, else the vocabulary's start token if models may write it, else the token that
    ends documents, which training on windows puts before each document.
    """
    special = tokenizer.special
    if special.before:
        return special.before
    bos = special.bos
    if bos is not None and bos not in special.suppressed and bos < tokenizer.vocab_size:
        return (bos,)
    end = document_end(tokenizer) if cfg.data.batching == "windows" else None
    return () if end is None else (end,)


def wrap_prompt(tokenizer: Tokenizer, text: str, ids: Sequence[int], start: Sequence[int]) -> list[int]:
    """Returns the ids of a prompt as the model reads them; of an empty one `start`, and [] if no token is left.

    Args:
        ids: the token ids of `text`.
        start: see `start_of_text`.
    """
    if ids:
        return tokenizer.special.wrap_text(ids)
    return [] if tokenizer.normalize(text) else list(start)


def dropped_characters(tokenizer: Tokenizer, text: str) -> str:
    """Returns the characters of `text` that a tokenizer without unknown token, such as nanoGPT's, leaves out."""
    if tokenizer.special.unknown is not None:
        return ""
    characters = list(dict.fromkeys(tokenizer.normalize(text)))
    return "".join(c for c, ids in zip(characters, tokenizer.encode_with_symbols(characters), strict=True) if not ids)


def check_example(cfg: ModelConfig, index: int, example: Sequence[Any]) -> None:
    """Raises `UserError` if example `index` does not consist of the texts that the model reads."""
    counts, texts = cfg.model_class.example
    if len(example) not in counts:
        raise UserError(f"example {index + 1} must be {texts}")
    if not cfg.model_class.reads_source and not all(isinstance(text, str) for text in example):
        raise UserError(f"example {index + 1} has a Request or a language, which only translators read: write texts")


def prompt_length(tokenizer: Tokenizer, example: Sequence[str], text: Sequence[int]) -> int:
    """Returns the number of tokens of the prompt of (prompt, continuation), with the tokens before it; 0 for a text.

    A token that spans the end of the prompt and the beginning of the continuation belongs to the continuation.

    Args:
        text: token ids of the joined example.
    """
    if len(example) == 1:
        return 0
    return len(tokenizer.special.before) + shared_length(tokenizer.encode(example[0]), text)


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Returns the number of characters or tokens with which both sequences begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def too_long(name: str, tokens: int, limit: int) -> str:
    """Returns the error message for a text that is too long for the model."""
    return f"{name} has {tokens} tokens, but the model takes at most {limit}: shorten it"


def text_inputs(model: ModelConfig, tokenizer: Tokenizer, number: int, example: Sequence[str]) -> dict[str, list[int]]:
    """Returns the ids of a text or of a prompt and its continuation; `prefix` has one number, the prompt's tokens.

    A masked language model reads the name of the mask token as that token. All rows of a prefix LM have `prefix`; it is
    0 for a text.
    """
    encode = encode_with_masks if model.model_class.fills_masks else Tokenizer.encode
    limit, text = model.max_length - tokenizer.special.added_to_text, encode(tokenizer, "".join(example))
    if len(text) > limit:
        raise UserError(too_long(f"text {number + 1}", len(text), limit))
    ids = tokenizer.special.wrap_text(text)
    if not model.prefix_lm:
        return {"tokens": ids}
    return {"tokens": ids, "prefix": [prompt_length(tokenizer, example, text)]}
