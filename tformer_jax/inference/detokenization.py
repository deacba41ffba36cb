"""Incremental detokenization with stop sequences."""

import dataclasses
from collections.abc import Iterable, Sequence

from tformer_jax.data.tokenizers import UNKNOWN_MARK, Decoder, Tokenizer

BROKEN = "\ufffd"
"""Replacement character, to which tokenizers decode invalid or incomplete UTF-8."""
MAX_WAITING = 16
"""Maximum number of tokens that are kept although they add no text: some become spaces before the next token."""


class TextStream:
    """Detokenizes one output incrementally, in pieces that later tokens do not change.

    The joined pieces are `cut(tokenizer.decode(tokens), stop)`, unless over `MAX_WAITING` consecutive tokens add no
    text. Text that may still become another character, or part of a stop sequence, is held back.

    The cost of a token does not depend on the length of the output. A tokenizer decodes a token differently at the
    start of a text than after another token, and bytes depend on their neighbors. The last token before a character
    boundary is therefore kept as context for the following tokens, and earlier tokens are dropped.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()):
        self.done = False
        """Whether an EOS token or a stop sequence has been reached."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._eos, self._hidden = tokenizer.special.eos, dict(tokenizer.special.names)
        self._tokens: list[int] = []
        """A context that has been shown, then the tokens whose text is held back."""
        self._text = ""
        """Text of `_tokens`, as last decoded."""
        self._settled = 0
        """Length of the part of `_text` that no later token changes."""
        self._in_run = False
        """Whether the last tokens are a run of bytes that may continue."""
        self._held = ""
        """Settled text that may be the start of a stop sequence."""

    def feed(self, token: int) -> str:
        """Adds a token and returns the text that can be shown now; empty once `done`."""
        if self.done:
            return ""
        if token in self._eos:
            remaining = self.close()
            self.done = True
            return remaining
        if token in self._hidden:
            return ""
        self._tokens.append(int(token))
        if token in self._tokenizer.fallback_bytes:
            self._in_run = True
            return ""
        return self._show(self._settle())

    def close(self) -> str:
        """Ends the output and returns its remaining text."""
        if self.done:
            return ""
        text = self._tokenizer.decode(self._tokens)
        shown = self._show(text[self._settled :])
        held, self._held, self._tokens, self._settled = self._held, "", [], 0
        return shown + ("" if self.done else held)

    def _settle(self) -> str:
        """Returns the text that is final after the last token."""
        if self._in_run:
            self._text = self._tokenizer.decode(self._tokens[:-1])
        before, self._text = self._text, self._tokenizer.decode(self._tokens)
        if self._in_run and self._text == before:
            return ""  # a token without text may not end the run
        self._in_run = False
        broken = self._text.endswith(BROKEN)
        start, self._settled = self._settled, len(self._text) - broken
        new = self._text[start : self._settled]
        if before and self._text == before and not broken:
            if len(self._tokens) > MAX_WAITING:  # a token without text
                self._tokens.pop()
        elif not broken:
            self._forget(len(self._tokens))
        elif self._text == before + self._tokenizer.decode(self._tokens[-1:]) != before:
            self._forget(len(self._tokens) - 1)  # a boundary between invalid bytes
        return new

    def _forget(self, border: int) -> None:
        """Drops the tokens before a character boundary, except the last ones that decode to a text."""
        for start in range(border - 1, -1, -1):
            if self._tokenizer.decode(self._tokens[start:border]):
                held_back = len(self._text) - self._settled
                self._tokens = self._tokens[start:]
                self._text = self._tokenizer.decode(self._tokens)
                self._settled = len(self._text) - held_back
                return

    def _show(self, new: str) -> str:
        """Returns the part of the held and new text that can be shown."""
        text = self._held + new
        start = _find_stop(text, self._stop)
        if start is not None:
            self.done, self._held = True, ""
            return text[:start]
        longest = max(map(len, self._stop), default=0)
        starts = range(max(len(text) - longest + 1, 0), len(text))
        border = next((start for start in starts if any(s.startswith(text[start:]) for s in self._stop)), len(text))
        self._held = text[border:]
        return text[:border]


class Continuation:
    """Decodes tokens as the continuation of a text.

    Some tokenizers, such as SentencePiece, decode a token without its space at the start of a text; this one decodes
    tokens after the token `special.context`.
    """

    def __init__(self, tokenizer: Decoder, context: int):
        self.special, self.fallback_bytes = tokenizer.special, tokenizer.fallback_bytes
        self._tokenizer, self._context, self._length = tokenizer, context, len(tokenizer.decode([context]))

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids before the first EOS token, skipping other special tokens."""
        return self._tokenizer.decode([self._context, *ids])[self._length :]


class ShownUnknown:
    """Decodes as `tokenizer` does, with `text` for its unknown token `token`."""

    def __init__(self, tokenizer: Tokenizer, token: int, text: str):
        names = tuple((i, name) for i, name in tokenizer.special.names if i != token)
        self.special = dataclasses.replace(tokenizer.special, names=names)
        self.fallback_bytes = tokenizer.fallback_bytes
        self._tokenizer, self._token, self._text = tokenizer, token, text

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids before the first EOS token, skipping other special tokens than the unknown token."""
        ids = list(ids)
        if self._token not in ids:
            return self._tokenizer.decode(ids)
        return self._tokenizer.decode(ids, unknown=self._text)


def output_decoder(tokenizer: Tokenizer, unknown: str = "omit", *, continues: bool) -> Decoder:
    """Returns the decoder of outputs, which are continuations of a text, or complete texts.

    Args:
        unknown: `decode.unknown`; "copy" writes `UNKNOWN_MARK` for each unknown token.
    """
    special = tokenizer.special
    decoder: Decoder = tokenizer
    if unknown != "omit" and special.shown_unknown is not None:
        text = UNKNOWN_MARK if unknown == "copy" else special.unknown_name
        decoder = ShownUnknown(tokenizer, special.shown_unknown, text)
    if not continues or special.context is None:
        return decoder
    return Continuation(decoder, special.context)


def has_text(tokenizer: Decoder, prompt: Sequence[int]) -> bool:
    """Returns whether a prompt has text before an output; without it, as in one start token, the output starts one.

    An unknown token stands for text.
    """
    special = tokenizer.special
    return any(i == special.shown_unknown or special.name(i) is None for i in prompt)


class TextBuffer:
    """Detokenizes one output at its end; has the interface of `TextStream`, without stop sequences."""

    def __init__(self, tokenizer: Decoder):
        self.done = False
        """Whether an EOS token has been reached."""
        self._tokenizer, self._eos = tokenizer, tokenizer.special.eos
        self._tokens: list[int] = []

    def feed(self, token: int) -> str:
        """Adds a token; returns the text at the end, otherwise an empty string."""
        if self.done:
            return ""
        if token in self._eos:
            text = self.close()
            self.done = True
            return text
        self._tokens.append(token)
        return ""

    def close(self) -> str:
        """Ends the output and returns its text, or an empty string if it has been returned before."""
        if self.done:
            return ""
        tokens, self._tokens = self._tokens, []
        return self._tokenizer.decode(tokens)


def cut(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the stop sequence that ends first, or before the longest of several."""
    start = _find_stop(text, stop)
    return text if start is None else text[:start]


def _find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Returns the start of the stop sequence that ends first, or of the longest of several; None if none occurs."""
    occurring = [end for end in stop if end in text]
    if not occurring:
        return None
    first = min(occurring, key=lambda end: (text.find(end) + len(end), -len(end)))
    return text.find(first)
