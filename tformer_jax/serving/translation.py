"""`POST /translate`: its fields."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from tformer_jax.config import DecodeConfig
from tformer_jax.config.fields import INT32_MAX, setting
from tformer_jax.inference import requests
from tformer_jax.inference.engine import Request
from tformer_jax.inference.languages import TagIds
from tformer_jax.inference.sentences import split_sentences
from tformer_jax.serving.bodies import MAX_BEAMS, MAX_LOGPROBS, DirectedBody, limit_tokens, text_or_empty
from tformer_jax.serving.model import ServedModel
from tformer_jax.serving.worker import Empty


@dataclasses.dataclass(frozen=True)
class Translation(DirectedBody):
    """Fields of `POST /translate`."""

    text: tuple[Any, ...] = setting((), "a text, or a list of texts")
    beams: int | None = setting(
        None, "beam width (default: the run's, or n_best for a run without beam search)", low=1, high=MAX_BEAMS
    )
    n_best: int = setting(1, "translations of each text", low=1, high=MAX_BEAMS)
    max_new_tokens: int | None = setting(None, "maximum number of tokens (default: the run's)", low=1, high=INT32_MAX)
    unknown: str | None = setting(
        None, "what to write for unknown tokens (default: the run's)", choices=("show", "copy", "omit")
    )
    detokenize: bool | None = setting(None, "undo the tokenization by Moses (default: the run's)")
    alignments: bool | None = setting(None, "align words of outputs and sources (default: the run's)")
    split_sentences: bool | None = setting(None, "translate each sentence separately (default: the run's)")
    logprobs: int | None = setting(None, "number of most probable tokens to show", low=0, high=MAX_LOGPROBS)
    stream: bool = setting(False, "respond with server-sent events")

    def by_sentence(self, served: ServedModel) -> tuple["Translation", list[tuple[str, ...]]]:
        """Returns a request for each sentence of the texts, and the white space around each text's sentences.

        The white space is [] if each text has one sentence, or if texts are not split.

        Raises:
            RequestError: several sentences have fields that only a whole text can have.
        """
        texts, languages = self.texts("text"), served.languages
        if not (served.decode.split_sentences if self.split_sentences is None else self.split_sentences):
            return self, []
        names = ("target_language", "source_language", "prefix")
        columns: dict[str, list[Any]] = {name: [] for name in ("text", *names)}
        gaps = []
        for text, *values in zip(texts, *(self.by_text(name, len(texts)) for name in names), strict=True):
            request = requests.Request(text_or_empty(text), source_language=values[1])
            language = languages.language_of_source(request) if languages else "en"
            sentences, around = split_sentences(request.text, language)
            gaps.append(around)
            for number, sentence in enumerate(sentences):
                own = (sentence or text, *values[:2], "" if number else values[2])
                for column, value in zip(columns.values(), own, strict=True):
                    column.append(value)
        if len(columns["text"]) == len(texts):
            return self, []
        aligned = served.decode.alignments if self.alignments is None else self.alignments
        whole = {"constraints": bool(self.constraints), "logprobs": self.logprobs is not None, "alignments": aligned}
        for name, used in whole.items():
            if used:
                raise self.error(name, "is not supported for a text of several sentences: leave out split_sentences")
        changes: Any = {name: tuple(column) for name, column in columns.items()}
        return dataclasses.replace(self, **changes), gaps

    def check(self) -> None:
        self.texts("text")
        if self.beams is not None and self.n_best > self.beams:
            raise self.error("n_best", f"needs at least as many beams: write {self.n_best} for beams")

    def requests(
        self, rows: Sequence[tuple[int, ...]], tags: Sequence[TagIds], saved: DecodeConfig
    ) -> list[Request | Empty]:
        """Returns one request per row of token ids; more than one translation of a text requires beam search.

        Raises:
            UserError: settings contradict each other.
        """
        written = {name: getattr(self, name) for name in ("unknown", "detokenize", "alignments")}
        changes: dict[str, Any] = {name: value for name, value in written.items() if value is not None}
        beams = self.beams or (saved.beams if saved.strategy == "beam" else 1)
        if self.beams or self.n_best > 1:
            changes |= {"strategy": "beam", "beams": max(beams, self.n_best)}
        if self.max_new_tokens:
            changes |= limit_tokens(self.max_new_tokens, saved)
        decodes = self.decode_settings(saved, changes, len(rows))
        seed = secrets.randbelow(INT32_MAX)  # of a run that samples
        parts = zip(rows, decodes, tags, self.texts("text"), strict=True)
        return [
            self.engine_request(number, ids, decode, both, text, num_outputs=self.n_best, seed=seed, scored=True)
            for number, (ids, decode, both, text) in enumerate(parts)
        ]
