"""Decodes rows of token ids with engines of continuous batching."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from flax import linen as nn

from tformer_jax.base.numbers import counted
from tformer_jax.config import Config
from tformer_jax.data.characters import is_blank
from tformer_jax.data.markup import keeps_markup, leave_out, take_out
from tformer_jax.data.placeholders import NUMBERED, has_same_placeholders, mask, symbols_of
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.word_links import Links
from tformer_jax.inference.batching import ROWS_PER_CHUNK, longest_first, power_of_two
from tformer_jax.inference.engine import Engine, Event, Request, pool_pages
from tformer_jax.inference.engine.parallel import engine_count, run_engines
from tformer_jax.inference.engine.pool import max_new_tokens
from tformer_jax.inference.requests import EncodedRequest
from tformer_jax.inference.requests import Request as TextRequest
from tformer_jax.inference.risk import Utility

UNSPACED = re.compile("[\u0e00-\u0eff\u3000-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff]\\Z")
"""Last characters of sentences after which no space is written: Chinese, Japanese, Thai and Lao."""


class Output(NamedTuple):
    """A generated text and its score."""

    text: str
    score: float | None
    """Beam score, or the sum of token log-probabilities if requested; forced tokens do not count.

    None if not requested, for a blank text, and for the empty outputs added if beam search found too few.
    """
    limit: str | None = None
    """The setting that ended the output, `decode.max_new_tokens` or `model.max_length`; None: the output is complete.

    A prompt and its output together have at most `model.max_length` tokens.
    """
    unknown: int = 0
    """Number of unknown tokens."""
    placeholders_kept: bool | None = None
    """Whether it has exactly the placeholders and the markup of its source; None: no setting asks for it."""
    alignment: Links | None = None
    """Pairs (source word, output word), from 0; None: without `decode.alignments`."""
    constraints_met: bool | None = None
    """Whether it has a phrase of each constraint, as whole words; None: without constraints."""
    sentences: int = 1
    """Number of sentences that were translated separately."""
    recased: int = 0
    """Number of words whose case is changed by `decode.casing`."""
    invented: int = 0
    """Number of marks that the model wrote, and that `decode.markup="align"` leaves out."""
    lacking_context: int = 0
    """Number of sentences that were read with fewer previous sentences than `decode.context` and the text give."""
    unknown_read: int = 0
    """Number of unknown tokens of the source or prompt."""

    @property
    def finish_reason(self) -> str:
        """`length` if a limit ended the output, else `stop`, as in OpenAI's API."""
        return "stop" if self.limit is None else "length"


def count_limits(outputs: Iterable[Output]) -> collections.Counter[str]:
    """Returns the number of outputs that each limit ended."""
    return collections.Counter(output.limit for output in outputs if output.limit is not None)


def describe_limits(limits: Mapping[str, int], cfg: Config, total: int | None = None) -> Iterator[str]:
    """Yields a sentence for each limit that ended outputs, such as "3 of 9 outputs end at decode.max_new_tokens=5".

    Args:
        limits: numbers of outputs by the setting that ended them.
        total: number of all outputs; None: it is not mentioned.
    """
    for name, count in sorted(limits.items()):
        section, setting = name.split(".")
        of_all = "" if total is None else f" of {total:,}"
        outputs = f"{count:,}{of_all} {'output ends' if (total or count) == 1 else 'outputs end'}"
        yield f"{outputs} at {name}={getattr(getattr(cfg, section), setting)} and may be incomplete"


@dataclasses.dataclass
class OutputCounts:
    """Numbers of outputs that are incomplete or not as requested."""

    outputs: int = 0
    texts: int = 0
    sentences: int = 0
    limits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of outputs that each limit ended."""
    unknown: int = 0
    """Number of outputs with unknown tokens."""
    unknown_read: int = 0
    """Number of texts with unknown tokens."""
    other_placeholders: int = 0
    """Number of outputs with other placeholders than their source."""
    lacking: int = 0
    """Number of outputs that do not meet all their constraints."""
    recased: int = 0
    """Number of outputs with words that got the case of source words."""
    invented: int = 0
    """Number of outputs from which markup that the model wrote itself was removed."""
    lacking_context: int = 0
    """Number of sentences that were read with fewer previous sentences than `decode.context` and the text give."""

    @classmethod
    def count_outputs(cls, outputs: Iterable[Output]) -> Self:
        """Returns the numbers of outputs of one text each."""
        counts = cls()
        for output in outputs:
            counts.add([output])
        return counts

    def add(self, outputs: Sequence[Output]) -> None:
        """Counts the outputs of a text."""
        self.outputs += len(outputs)
        self.texts, self.sentences = self.texts + 1, self.sentences + outputs[0].sentences
        self.lacking_context += outputs[0].lacking_context
        self.limits += count_limits(outputs)
        self.unknown += sum(output.unknown > 0 for output in outputs)
        self.unknown_read += outputs[0].unknown_read > 0
        self.other_placeholders += sum(output.placeholders_kept is False for output in outputs)
        self.lacking += sum(output.constraints_met is False for output in outputs)
        self.recased += sum(output.recased > 0 for output in outputs)
        self.invented += sum(output.invented > 0 for output in outputs)

    def describe(self, cfg: Config, limits_of: int | None = None) -> Iterator[str]:
        """Yields a sentence about each number that is not 0; sentences about limits give `limits_of` as the total."""
        yield from describe_limits(self.limits, cfg, limits_of)
        unknown = cfg.decode.unknown
        done = {"show": "shown by name", "copy": "replaced by words of the source", "omit": "left out"}[unknown]
        yield from self._of_all(self.unknown, f"unknown tokens, {done} (decode.unknown={unknown!r})")
        if self.unknown_read:
            have = "text has" if self.texts == 1 else "texts have"
            yield f"{self.unknown_read:,} of {self.texts:,} {have} unknown tokens, which the model cannot tell apart"
        yield from self._of_all(self.other_placeholders, "other placeholders or markup than the source")
        why = "for lack of room or of a token, or because of other settings"
        yield from self._of_all(self.lacking, f"not all phrases of their constraints, {why}")
        yield from self._of_all(self.recased, f"words in the case of the source (decode.casing={cfg.decode.casing!r})")
        yield from self._of_all(self.invented, "markup that the model wrote itself, which is left out")
        if self.sentences > self.texts:
            texts = counted(self.texts, "text was", "texts were")
            yield f"{texts} translated as {self.sentences:,} sentences (decode.split_sentences)"
        if self.lacking_context:
            less = f"with fewer than decode.context={cfg.decode.context} sentences before them, since more do not fit"
            less += " or have unknown tokens, or texts of decode.stop or decode.forbidden"
            yield f"{self.lacking_context:,} of {counted(self.sentences, 'sentence was', 'sentences were')} read {less}"

    def _of_all(self, count: int, what: str) -> Iterator[str]:
        if count:
            yield f"{count:,} of {self.outputs:,} {'output has' if self.outputs == 1 else 'outputs have'} {what}"


class RowDecoder:
    """Decodes rows of sources (`Seq2Seq`) or prompts (`DecoderLM`) with the settings `cfg.decode`."""

    def __init__(self, cfg: Config, model: nn.Module, params: Any, tokenizers: Tokenizers):
        self._cfg, self._parts, self._special = cfg, (model, params, tokenizers), tokenizers.target.special
        self._read = tokenizers.source if cfg.model.model_class.reads_source else tokenizers.target

    def __call__(
        self, rows: Sequence[EncodedRequest], *, seed: int = 0, outputs: int = 1, scores: bool = False
    ) -> list[list[Output]]:
        """Returns `outputs` outputs of each row, best first for beam search; an empty row has empty outputs."""
        window = max(len(rows), 1)
        return list(self.stream(rows, 0, seed=seed, outputs=outputs, scores=scores, window=window))

    def stream(
        self,
        rows: Sequence[EncodedRequest],
        first: int,
        *,
        seed: int,
        outputs: int,
        scores: bool,
        window: int,
    ) -> Iterator[list[Output]]:
        """Yields the outputs of each row, in order, as soon as all earlier rows are finished.

        Outputs depend only on the arguments and the machine, bit for bit, because each call creates its engines, whose
        number depends on the cores of a CPU. With `decode.candidates`, the candidates ranked first by
        `Utility.rank_outputs` are returned.

        Args:
            first: index of the first row among all inputs, a multiple of `ROWS_PER_CHUNK`; samples depend on it.
            window: number of consecutive rows that are submitted longest first, so that rows of similar length are
                read together. Larger windows are faster; smaller ones yield the first outputs earlier.
        """
        candidates = self._cfg.decode.candidates
        utility = Utility.of_run(self._cfg, self._parts[2])
        pools = self._decode(rows, first, seed, max(outputs, candidates), scores, window)
        for row, decoded in zip(rows, pools, strict=True):
            order: Sequence[int] = range(outputs)
            if candidates > 1:
                present = [output.score is not None or self._cfg.decode.strategy != "beam" for output in decoded]
                order = utility.rank_outputs(row, [output.text for output in decoded], present)
            yield [decoded[place] for place in order[:outputs]]

    def _decode(
        self, rows: Sequence[EncodedRequest], first: int, seed: int, outputs: int, scores: bool, window: int
    ) -> Iterator[list[Output]]:
        """Yields all outputs of each row, in order; arguments are as for `stream`."""
        lengths = [len(row.ids) for row in rows]
        order = longest_first(lengths, window)
        engines, requests = self._engines(lengths, ROWS_PER_CHUNK if first else len(rows), outputs), {}
        for place, n in enumerate(order):
            number, index = place % len(engines), rows[n].sample_index or first + n
            options: dict[str, Any] = {"index": index * outputs % 2**31, "num_outputs": outputs, "scored": scores}
            request = self._request(rows[n], seed=seed, streamed=False, **options)
            requests[number, engines[number].submit(request)] = n
        steps = run_engines(engines)
        pieces: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
        ids: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        finished: dict[int, dict[int, Output]] = collections.defaultdict(dict)
        for n, row in enumerate(rows):
            while row.ids and len(finished[n]) < outputs:
                number, events = next(steps)
                for event in events:
                    key = requests[number, event.request], event.sample
                    pieces[key].append(event.text)
                    ids[key] += event.ids
                    if event.finish:
                        text, tokens = "".join(pieces.pop(key)), ids.pop(key)
                        finished[key[0]][key[1]] = self._finished(rows[key[0]], event, text, tokens)
            row_outputs = finished.pop(n, {})
            yield [row_outputs[sample] for sample in range(outputs)] if row.ids else [self._blank(row)] * outputs

    def pieces(self, row: EncodedRequest, *, seed: int = 0) -> Iterator[Output]:
        """Yields the output of one row in pieces, each decoded when it is requested.

        Each piece has the number of its own unknown tokens; the last piece also has the facts of the whole output. With
        `decode.candidates`, the whole output is the only piece.
        """
        if not row.ids:
            yield self._blank(row)
            return
        if self._cfg.decode.candidates > 1:
            yield self([row], seed=seed)[0][0]
            return
        engine = self._engine([len(row.ids)], 1, 1, seconds=0.0)
        engine.submit(self._request(row, seed=seed, index=row.sample_index % 2**31))
        text = ""
        tokens: list[int] = []
        while not engine.idle:
            for event in engine.step():
                text += event.text
                tokens += event.ids
                unknown = self._special.count_unknown(event.ids)
                if event.finish:
                    yield self._finished(row, event, text, tokens)._replace(text=event.text, unknown=unknown)
                elif event.text or unknown:
                    yield Output(event.text, event.score, unknown=unknown)

    def _finished(self, row: EncodedRequest, last: Event, text: str, tokens: Sequence[int]) -> Output:
        """Returns the output of a row, given its last event, and its whole text and tokens."""
        return Output(
            text,
            last.score,
            self._limit(len(row.ids)) if last.finish == "length" else None,
            self._special.count_unknown(tokens),
            self._keeps_placeholders(row.text, text, tokens),
            last.alignment,
            constraints_met=self._meets_constraints(row, text),
            recased=last.recased,
            invented=self._invented(tokens),
            unknown_read=self._read.special.count_unknown(row.ids),
        )

    def _blank(self, row: EncodedRequest) -> Output:
        """Returns the output of an empty row, which is the markup of the text if that has only markup to put back."""
        if self._cfg.decode.markup == "align" and is_blank(take_out(row.text, self._parts[2].placeholders).plain):
            met = self._meets_constraints(row, row.text)
            return Output(row.text.strip(), None, placeholders_kept=True, constraints_met=met)
        alignment = () if self._cfg.decode.alignments else None
        return Output("", None, alignment=alignment, constraints_met=self._meets_constraints(row, ""))

    def _keeps_placeholders(self, source: str, output: str, ids: Sequence[int]) -> bool | None:
        """Returns whether an output has exactly the placeholders of its source, and no symbol for another one."""
        names, target = self._parts[2].placeholders, self._parts[2].target
        if self._cfg.decode.markup == "align" and not keeps_markup(source, output, names):
            return False
        if not names or not source or not self._cfg.model.model_class.reads_source:
            return True if self._cfg.decode.markup == "align" else None
        written, originals = {*symbols_of(target.decode(ids))}, mask(names, source).originals or ()
        return written <= {*NUMBERED[: len(originals)]} and has_same_placeholders(names, source, output)

    def _invented(self, ids: Sequence[int]) -> int:
        aligns, target = self._cfg.decode.markup == "align", self._parts[2].target
        return leave_out(target.decode(ids), self._parts[2].placeholders)[1] if aligns else 0

    def _meets_constraints(self, row: EncodedRequest, text: str) -> bool | None:
        if not row.constraints:
            return None
        from tformer_jax.inference.phrases import are_met

        return are_met(row.constraints, text, self._cfg.decode)

    def _request(self, row: EncodedRequest, **options: Any) -> Request:
        decode = self._cfg.decode
        if row.prefix is not None:
            decode = dataclasses.replace(decode, prefix=row.prefix)
        return Request(tuple(row.ids), decode, tags=row.tags, text=row.text, constraints=row.constraints, **options)

    def _limit(self, length: int) -> str:
        """Returns the setting that limits the outputs of a row of `length` tokens."""
        decode = self._cfg.decode
        within = max_new_tokens(self._cfg.model, decode, length) == decode.max_new_tokens
        return "decode.max_new_tokens" if within else "model.max_length"

    def _engines(self, lengths: Sequence[int], count: int, outputs: int) -> list[Engine]:
        """Returns engines of equal size, which share compiled programs, for parts of rows of these lengths.

        Together they have enough rows per step for `count` texts, up to `eval.batch_size`. A beam search takes one row
        for any number of outputs; the samples of a text take one row each, at the same time, in one engine.
        """
        per_text = 1 if self._cfg.decode.strategy == "beam" else outputs
        max_rows = max(min(self._cfg.eval.batch_size, power_of_two(count * per_text)), per_text)
        engines = min(engine_count(max_rows, self._cfg.decode.width, self._parts[1]), max_rows // per_text)
        if engines > 1:
            max_rows = max_rows // engines // per_text * per_text
        return [self._engine(lengths, max_rows, outputs) for _ in range(engines)]

    def _engine(self, lengths: Sequence[int], max_rows: int, outputs: int, seconds: float = math.inf) -> Engine:
        """Returns an engine for rows of these lengths."""
        pages = None
        if self._cfg.model.model_class.continues:
            pages = pool_pages(self._cfg, lengths, max_rows=max_rows, outputs=outputs)
        return Engine(self._cfg, *self._parts, max_rows=max_rows, pages=pages, grows=True, seconds=seconds)


def gap_after(text: str, gap: str) -> str:
    """Returns what to write after an output where its source has `gap`; a space for none, if the language has any."""
    return gap or ("" if not text or UNSPACED.search(text) else " ")


def join_texts(texts: Sequence[str], gaps: Sequence[str]) -> str:
    """Returns outputs of sentences as a text, given the white space before, between and after the sentences."""
    joined = gaps[0] + texts[0]
    for gap, text in zip(gaps[1:-1], texts[1:], strict=True):
        joined += gap_after(joined, gap) + text
    return joined + gaps[-1]


class Parts(NamedTuple):
    """The sentences of a text, or the whole text, and the white space around them."""

    rows: tuple[EncodedRequest, ...]
    gaps: tuple[str, ...] = ("", "")
    requests: tuple[TextRequest, ...] = ()
    """The requests of the sentences, with `decode.split_sentences`."""

    def join(self, outputs: Sequence[list[Output]]) -> list[Output]:
        """Joins the outputs of the sentences: the first output of each, then the second output of each, and so on.

        Scores are summed.
        """
        return [self._join(sentences) for sentences in zip(*outputs, strict=True)]

    def pieces(self, decode: Callable[[EncodedRequest], Iterator[Output]]) -> Iterator[Output]:
        """Yields the pieces of the output, with the number of sentences; `decode` yields the pieces of a sentence."""
        written, count = self.gaps[0], len(self.rows)
        for number, row in enumerate(self.rows):
            if before := gap_after(written, self.gaps[number]) if number else written:
                yield Output(before, None)
            for piece in decode(row):
                written += piece.text
                yield piece._replace(sentences=count)
        if self.gaps[-1]:
            yield Output(self.gaps[-1], None, sentences=count)

    def _join(self, sentences: Sequence[Output]) -> Output:
        if len(sentences) == 1:
            return sentences[0]
        scores = [output.score for output in sentences if output.score is not None]
        return Output(
            join_texts([output.text for output in sentences], self.gaps),
            sum(scores) if len(scores) == len(sentences) else None,
            next((output.limit for output in sentences if output.limit), None),
            sum(output.unknown for output in sentences),
            _all_true(output.placeholders_kept for output in sentences),
            constraints_met=_all_true(output.constraints_met for output in sentences),
            sentences=len(sentences),
            recased=sum(output.recased for output in sentences),
            invented=sum(output.invented for output in sentences),
            lacking_context=sum(output.lacking_context for output in sentences),
            unknown_read=sum(output.unknown_read for output in sentences),
        )


def _all_true(values: Iterator[bool | None]) -> bool | None:
    """Returns whether all values except None are true; None if there are no others."""
    given = [value for value in values if value is not None]
    return all(given) if given else None
