"""Sentences of documents: the model reads each with the sentences before it, and forces the outputs before its own."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tformer_jax.data.placeholders import has_same_placeholders
from tformer_jax.data.tokenizers import Placeholders
from tformer_jax.inference.outputs import Output, Parts
from tformer_jax.inference.requests import EncodedRequest, Request


class Documents(NamedTuple):
    """How the sentences of documents are read."""

    context: int
    """Maximum number of sentences before each sentence."""
    separator: str
    """Text between sentences."""
    placeholders: Placeholders
    """Placeholders of the texts."""
    encode: Callable[[Request], EncodedRequest | None]
    """Returns the row of a sentence and the sentences before it; None: it does not fit the model."""
    decode: Callable[[Sequence[EncodedRequest]], Iterator[list[Output]]]
    """Yields the outputs of each row."""

    def outputs(self, documents: Sequence[Parts]) -> Iterator[list[Output]]:
        """Yields the outputs of each document.

        The first sentences of all documents are decoded at once, then the second ones, and so on. The output of a
        sentence starts with the first outputs of up to `context` sentences before it, as many as fit.
        """
        decoded: list[list[list[Output]]] = [[] for _ in documents]
        for number in range(max((len(parts.rows) for parts in documents), default=0)):
            places = [place for place, parts in enumerate(documents) if number < len(parts.rows)]
            rows = [self._row(documents[place], [first.text for first, *_ in decoded[place]]) for place in places]
            for place, (_, before), outputs in zip(places, rows, self.decode([row for row, _ in rows]), strict=True):
                sentence = documents[place].requests[number].text
                lacks = len(before) < min(self.context, number)
                decoded[place].append([self._own(output, before, sentence, lacks) for output in outputs])
        for parts, by_sentence in zip(documents, decoded, strict=True):
            yield parts.join(by_sentence)

    def _row(self, parts: Parts, written: Sequence[str]) -> tuple[EncodedRequest, Sequence[str]]:
        """Returns the row of the next sentence and the outputs before it in that row, given all outputs `written`."""
        number = len(written)
        request = parts.requests[number]
        for first in range(max(number - self.context, 0), number):
            text = self.separator.join(each.text for each in parts.requests[first : number + 1])
            prefix = self.separator.join([*written[first:], ""]).rstrip()
            row = self.encode(request._replace(text=text, prefix=prefix))
            if row is not None:
                return row._replace(sample_index=parts.rows[number].sample_index), written[first:]
        return parts.rows[number], ()

    def _own(self, output: Output, before: Sequence[str], sentence: str, lacks: bool) -> Output:
        """Returns the output of one sentence, removing the outputs `before` of earlier sentences from its text."""
        if not before:
            return output._replace(lacking_context=int(lacks))
        mark = self.separator.strip()
        text = output.text.split(mark, mark.join([*before, ""]).count(mark))[-1].strip()
        same = has_same_placeholders(self.placeholders, sentence, text) if self.placeholders else None
        return output._replace(text=text, placeholders_kept=same, lacking_context=int(lacks))
