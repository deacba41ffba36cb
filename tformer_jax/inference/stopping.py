"""The text of an output while its tokens arrive, and where it stops."""

from collections.abc import Sequence

from tformer_jax.data.tokenizers import FIRST, Tokenizer
from tformer_jax.special_tokens import EOS

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or none yet."""


class TextStream:
    """Turns the tokens of one output into pieces of text that no later token changes.

    All pieces together are `cut(tokenizer.decode(tokens), stop)`. What may still become another character, or one of
    the texts that end the output, is held back. The cost of a token does not grow with the output: a tokenizer reads
    a token differently at the start of a text and after another token, and bytes together with their neighbours, so
    the last token before a border that no character crosses stands for all before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.done = False
        """EOS or one of the texts of `stop` has arrived: nothing follows."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        """A context that has been read, then the tokens of which something is held back."""
        self._text = ""
        """Their text when it was read last."""
        self._settled = 0
        """How much of it no later token changes."""
        self._in_run = False
        """Bytes of a run have arrived, and not yet the end of the run."""
        self._held = ""
        """Settled text that may be the beginning of a text of `stop`."""

    def feed(self, token: int) -> str:
        """The text that can be shown once this token has arrived; empty after the output is done."""
        if self.done:
            return ""
        if token == EOS:
            rest = self.close()
            self.done = True
            return rest
        if token < FIRST:
            return ""
        self._tokens.append(int(token))
        if token in self._tokenizer.fallback_bytes:
            self._in_run = True
            return ""
        return self._show(self._settle())

    def close(self) -> str:
        """The rest of the text, when no token follows."""
        if self.done:
            return ""
        text = self._tokenizer.decode(self._tokens)
        shown = self._show(text[self._settled :])
        rest, self._held, self._tokens, self._settled = self._held, "", [], 0
        return shown + ("" if self.done else rest)

    def _settle(self) -> str:
        """The text that this token settles."""
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
            self._tokens.pop()  # a token without text
        elif not broken:
            self._forget(len(self._tokens))
        elif self._text == before + self._tokenizer.decode(self._tokens[-1:]) != before:
            self._forget(len(self._tokens) - 1)  # a border between broken bytes
        return new

    def _forget(self, border: int) -> None:
        """Keeps, of the tokens before a border that no character crosses, the last ones that have a text."""
        for start in range(border - 1, -1, -1):
            if self._tokenizer.decode(self._tokens[start:border]):
                held_back = len(self._text) - self._settled
                self._tokens = self._tokens[start:]
                self._text = self._tokenizer.decode(self._tokens)
                self._settled = len(self._text) - held_back
                return

    def _show(self, new: str) -> str:
        """What of the held and the new text can be shown."""
        text = self._held + new
        found = _first(text, self._stop)
        if found is not None:
            self.done, self._held = True, ""
            return text[:found]
        longest = max(map(len, self._stop), default=0)
        starts = range(max(len(text) - longest + 1, 0), len(text))
        border = next((start for start in starts if any(s.startswith(text[start:]) for s in self._stop)), len(text))
        self._held = text[border:]
        return text[:border]


class WholeText:
    """As `TextStream`, where nobody reads along and no text ends the output: all of it comes at once, with the end."""

    def __init__(self, tokenizer: Tokenizer):
        self.done = False
        """EOS has arrived."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []

    def feed(self, token: int) -> str:
        """Empty, but for EOS."""
        if self.done:
            return ""
        if token == EOS:
            text = self.close()
            self.done = True
            return text
        self._tokens.append(token)
        return ""

    def close(self) -> str:
        """The text, when no token follows; empty once it has been given."""
        if self.done:
            return ""
        tokens, self._tokens = self._tokens, []
        return self._tokenizer.decode(tokens)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first text of `stop`: the one that is complete first, and of several the longest."""
    found = _first(text, stop)
    return text if found is None else text[:found]


def _first(text: str, stop: Sequence[str]) -> int | None:
    """The index of the text of `stop` that is complete first, of several the longest; None if none occurs."""
    found = [end for end in stop if end in text]
    if not found:
        return None
    first = min(found, key=lambda end: (text.find(end) + len(end), -len(end)))
    return text.find(first)
