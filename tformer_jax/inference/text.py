"""Translation, text generation and classification of strings; results do not depend on batching."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.data.characters import is_blank
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora.example import DataError
from tformer_jax.data.markup import take_out
from tformer_jax.data.placeholders import mask, mask_target
from tformer_jax.data.tokenizers import NO_PLACEHOLDERS, Placeholders, Tokenizers
from tformer_jax.data.tokenizers.chats import encode_prompt
from tformer_jax.inference.batching import WINDOW, TextProcessor, compute_rows, run_in_chunks
from tformer_jax.inference.encoding import NO_START, LongTexts, TextError, no_tokens, start_of_text, wrap_prompt
from tformer_jax.inference.forced import FirstTokens, first_tokens
from tformer_jax.inference.languages import Languages
from tformer_jax.inference.outputs import Output, OutputCounts, Parts, RowDecoder
from tformer_jax.inference.requests import Constraint, EncodedRequest, Request, as_request
from tformer_jax.models import registry
from tformer_jax.nn.sharding import replicate
from tformer_jax.special_tokens import PAD

CACHED_PREFIXES = 256
"""Maximum number of prefixes whose tokens are cached."""


class _Generator:
    """Base of `Translator` and `TextGenerator`: decodes texts with continuous batching."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        self.cfg, self.model, self.tokenizers = cfg, model, tokenizers
        self._cached_first_tokens = functools.lru_cache(CACHED_PREFIXES)(self._find_first_tokens)

    def __call__(
        self, params: Any, texts: Sequence[str | Request], *, seed: int = 0, long_texts: LongTexts | None = None
    ) -> list[str]:
        """Returns the output of each text, in order.

        Logs the numbers of `OutputCounts` as warnings.

        Raises:
            TextError: as in `stream`, but before anything is decoded.
        """
        outputs = self.outputs(params, texts, seed=seed, long_texts=long_texts)
        for sentence in OutputCounts.count_outputs(outputs).describe(self.cfg, len(outputs)):
            logging.getLogger(__name__).warning("%s", sentence)
        return [output.text for output in outputs]

    def outputs(
        self,
        params: Any,
        texts: Sequence[str | Request],
        *,
        seed: int = 0,
        scores: bool = False,
        long_texts: LongTexts | None = None,
    ) -> list[Output]:
        """Like `__call__`, with scores where beam search computes them, or `scores` asks for them as in `stream`."""
        encode = self._encoder(long_texts)
        parts = [encode(index, text) for index, text in enumerate(texts)]
        size = max(sum(len(part.rows) for part in parts), 1)
        decoded = self._decode(params, parts, 0, seed=seed, outputs=1, scores=scores, window=size)
        return [outputs[0] for outputs in decoded]

    def stream(
        self,
        params: Any,
        texts: Iterable[str | Request],
        *,
        seed: int = 0,
        outputs: int = 1,
        scores: bool = False,
        skip: int = 0,
        long_texts: LongTexts | None = None,
    ) -> Iterator[list[Output]]:
        """Yields `outputs` outputs of each text, in order, for any number of texts, as soon as they are known.

        Args:
            texts: read as needed.
            outputs: number of outputs per text: the best ones of beam search, at most `cfg.decode.beams`, or samples.
            scores: also score the outputs of greedy decoding and sampling, at the cost of a pass over the logits.
            skip: number of first texts to omit; the outputs of the other texts are bit-identical for any `skip`.
            long_texts: what to do with texts that are too long; default: raise an error. The outputs of texts that
                are left out are empty.

        Raises:
            UserError: raised by `texts`; the outputs of all earlier texts are yielded first.
            TextError: a text does not fit the model; as above.
        """
        encode = self._encoder(long_texts)
        window = WINDOW * self.cfg.eval.batch_size

        def read(index: int, text: str | Request) -> tuple[int, Parts]:
            return index, encode(index, text)

        def run(chunk: list[tuple[int, Parts]]) -> Iterator[list[Output]]:
            options: Any = {"seed": seed, "outputs": outputs, "scores": scores, "window": window}
            return self._decode(params, [parts for _, parts in chunk], chunk[0][0], **options)

        return run_in_chunks(texts, read, run, skip=skip)

    def stream_pieces(
        self, params: Any, text: str | Request, *, seed: int = 0, long_texts: LongTexts | None = None
    ) -> Iterator[Output]:
        """Yields the output of one text in pieces, as `RowDecoder.pieces` does for each sentence.

        With `decode.context`, the whole output is the only piece.
        """
        parts, decode = self._encoder(long_texts)(0, text), self._decoder(params)
        if self.cfg.decode.context:
            return iter(next(self._decode(params, [parts], 0, seed=seed, outputs=1, scores=False, window=1)))
        return parts.pieces(lambda row: decode.pieces(row, seed=seed))

    def _decoder(self, params: Any) -> RowDecoder:
        return RowDecoder(self.cfg, self.model, params, self.tokenizers)

    def _decode(self, params: Any, parts: Sequence[Parts], first: int, **options: Any) -> Iterator[list[Output]]:
        """Yields the outputs of each text; `options` are passed to `RowDecoder.stream`."""
        rows = [row for part in parts for row in part.rows]
        decoded = self._decoder(params).stream(rows, first, **options)
        for part in parts:
            yield part.join([next(decoded) for _ in part.rows])

    def _encoder(self, long_texts: LongTexts | None) -> Callable[[int, str | Request], Parts]:
        """Returns a function that maps the index of a text and the text to its tokens."""
        policy = long_texts or LongTexts()
        return lambda index, text: self._encode_parts(policy, index, as_request(text))

    def _encode_parts(self, long_texts: LongTexts, index: int, request: Request) -> Parts:
        return Parts((self._encode(long_texts, index, request),))

    def _encode(self, long_texts: LongTexts, index: int, request: Request) -> EncodedRequest:
        raise NotImplementedError

    def _constraints(
        self,
        index: int,
        request: Request,
        names: Placeholders = NO_PLACEHOLDERS,
        originals: tuple[str, ...] | None = None,
    ) -> tuple[Constraint, ...]:
        """Returns the constraints of text `index` and of the glossary; other arguments are as for `encode_constraints`.

        Raises:
            DataError: the glossary cannot be read.
            TextError: outputs cannot have the phrases.
        """
        decode = self.cfg.decode
        if not request.constraints and not decode.glossary:
            return ()
        from tformer_jax.inference.phrases import constraints_of, encode_constraints

        limit = decode.max_new_tokens or self.cfg.model.max_length
        try:
            constraints = constraints_of(decode, request.text, request.constraints)
            encode_constraints(decode, self.tokenizers.target, constraints, limit, names, originals)
        except DataError:  # of the glossary
            raise
        except UserError as error:
            raise TextError(index, str(error)) from None
        return constraints

    def _first_tokens(self, index: int, prefix: str | None, tags: tuple[int, ...] = ()) -> FirstTokens:
        """Returns the tokens with which the output of text `index` starts.

        Raises:
            TextError: outputs cannot start with the prefix.
        """
        try:
            return self._cached_first_tokens(prefix, tags)
        except UserError as error:
            raise error if prefix is None else TextError(index, str(error)) from None

    def _find_first_tokens(self, prefix: str | None, tags: tuple[int, ...]) -> FirstTokens:
        decode, tokenizer = self.cfg.decode, self.tokenizers.target
        if prefix is not None:
            decode = dataclasses.replace(decode, prefix=prefix)
        return first_tokens(decode, tokenizer, continues=self.model.continues, tags=tags)


class Translator(_Generator):
    """Translates texts with a `Seq2Seq` model; the translation of a text that is blank, or has no tokens, is empty.

    A model of several languages reads the tags of a request's languages.
    """

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        super().__init__(cfg, model, tokenizers)
        self.languages = Languages(cfg.data, tokenizers)

    def _encode(self, long_texts: LongTexts, index: int, request: Request) -> EncodedRequest:
        source_tags, tags = self.languages.tags_of(index, request)
        names = self.tokenizers.placeholders
        text = take_out(request.text, names).plain if self.cfg.decode.markup == "align" else request.text
        text, originals = mask(names, self.languages.format_source(text))
        prefix = request.prefix and mask_target(names, request.prefix, originals)
        if prefix:
            self._first_tokens(index, prefix, tags)  # raises
        special, ids = self.tokenizers.source.special, self._source_ids(text)
        limit = self.cfg.model.max_length - special.added_to_side - len(source_tags)
        fitting = long_texts.fit(index, ids, limit, "source")
        if fitting is None:
            return EncodedRequest((), request.text)
        wrapped = special.wrap_side(fitting, source_tags) if fitting else []
        known = names if originals is not None else NO_PLACEHOLDERS
        read = request.text if len(fitting) == len(ids) else self.tokenizers.source.decode(fitting)
        constraints = self._constraints(index, request._replace(text=read), known, originals)
        return EncodedRequest(wrapped, request.text, tags, request.prefix, constraints)

    def _encode_parts(self, long_texts: LongTexts, index: int, request: Request) -> Parts:
        if not self.cfg.decode.split_sentences:
            return super()._encode_parts(long_texts, index, request)
        from tformer_jax.inference.sentences import split_sentences

        sentences, gaps = split_sentences(request.text, self.languages.language_of_source(request))
        if len(sentences) > 1 and request.constraints:
            problem = "use a glossary, or leave out decode.split_sentences"
            raise TextError(index, f"has constraints, and {len(sentences)} sentences: {problem}")
        rows, requests = [], []
        for number, sentence in enumerate(sentences):
            requests.append(request._replace(text=sentence, prefix="" if number else request.prefix))
            row = self._encode(long_texts, index, requests[-1])
            rows.append(row._replace(sample_index=index + number * 2**20))
        return Parts(tuple(rows), gaps, tuple(requests))

    def _decode(self, params: Any, parts: Sequence[Parts], first: int, **options: Any) -> Iterator[list[Output]]:
        trained, context = self.cfg.data.documents, self.cfg.decode.context
        if not (trained and context):
            return super()._decode(params, parts, first, **options)
        from tformer_jax.inference.documents import Documents

        decode = functools.partial(self._decoder(params).stream, first=first, **options)
        names = self.tokenizers.placeholders
        return Documents(context, trained[1], names, self._encode_in_document, decode).outputs(parts)

    def _encode_in_document(self, request: Request) -> EncodedRequest | None:
        """Returns the row that translates the last of several sentences; None: the sentences do not fit the model.

        Half of the maximum output length is reserved for the last sentence.
        """
        limit = self.cfg.decode.max_new_tokens or self.cfg.model.max_length
        if len(self.tokenizers.target.encode(request.prefix or "")) > limit // 2:
            return None
        try:
            return self._encode(LongTexts(), 0, request)
        except TextError:
            return None

    def _source_ids(self, text: str) -> list[int]:
        return [] if is_blank(text) else self.tokenizers.source.encode(text)


class TextGenerator(_Generator):
    """Continues prompts or answers conversations with a `DecoderLM` model; outputs do not repeat the prompt.

    An empty prompt starts a text (`start_of_text`); a model that has no token for this raises `TextError`.
    A truncated prompt keeps its last tokens and leaves room for `decode.max_new_tokens` new ones; without that setting,
    for half of the model's maximum length.
    """

    def _encode(self, long_texts: LongTexts, index: int, request: Request) -> EncodedRequest:
        tokenizer = self.tokenizers.target
        if request.target_language or request.source_language:
            raise TextError(index, "has a language, but a language model continues texts: leave it out")
        chat = request.chat
        wrap: Callable[[list[int]], list[int]] = list
        if chat is None:
            wrap = functools.partial(wrap_prompt, tokenizer, request.text, start=self._start)
        max_length = self.cfg.model.max_length - (tokenizer.special.added_to_text if chat is None else 0)
        ids = tokenizer.encode(request.text) if chat is None else self._prompt(index, chat)
        if not wrap(ids):
            raise TextError(index, no_tokens("the prompt", tokenizer.normalize(request.text), NO_START))
        last = max(max_length - (self.cfg.decode.max_new_tokens or max_length // 2), 1)
        fitting = long_texts.fit(index, ids, max_length - 1, "prompt", last=last)
        if fitting is None:
            return EncodedRequest(())
        prompt = wrap(fitting)
        prefix = self.cfg.decode.prefix if request.prefix is None else request.prefix
        room, forced = self.cfg.model.max_length - len(prompt), len(self._first_tokens(index, request.prefix).ids)
        if prefix and room < forced:
            raise TextError(
                index,
                f"decode.prefix={prefix!r} has {forced} tokens, but only {room} fit after the prompt: shorten one of "
                "them",
            )
        constraints = self._constraints(index, request)
        return EncodedRequest(prompt, request.text, prefix=request.prefix, constraints=constraints)

    @functools.cached_property
    def _start(self) -> tuple[int, ...]:
        return start_of_text(self.cfg, self.tokenizers.target)

    def _prompt(self, index: int, chat: Chat) -> list[int]:
        """Returns the tokens of conversation `index`; raises `TextError` if the template refuses it."""
        try:
            return encode_prompt(self.tokenizers.target, chat)
        except UserError as error:
            raise TextError(index, str(error)) from None


class LabelClassifier(TextProcessor[str, list[int], tuple[str, float]]):
    """Predicts the most probable label of texts with a `Classifier` model; results are a label and its probability."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, labels: Sequence[str]):
        super().__init__(cfg, model, tokenizers)
        self.labels = labels

    def __call__(
        self, params: Any, texts: Sequence[str], *, long_texts: LongTexts | None = None
    ) -> list[tuple[str, float]]:
        """Returns the label of each text, and its probability; of a blank text "" and 0.

        Raises:
            TextError: as in `stream`, but before anything is computed.
        """
        long_texts = long_texts or LongTexts()
        rows = [self._encode(long_texts, index, text) for index, text in enumerate(texts)]
        return list(self._compute(params, rows))

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        """Returns the token ids of a text; none of a blank text. A text that is left out is encoded as empty."""
        if is_blank(text):
            return []
        tokenizer = self.tokenizers.target
        limit = self.cfg.model.max_length - tokenizer.special.added_to_text
        return tokenizer.special.wrap_text(long_texts.fit(index, tokenizer.encode(text), limit, "text") or [])

    def _compute(self, params: Any, rows: list[list[int]]) -> Iterator[tuple[str, float]]:
        predicted = classify_rows(self.model, params, list(filter(None, rows)), self.cfg.eval.batch_size)
        for row in rows:
            if row:
                probabilities = next(predicted)
                yield self.labels[int(probabilities.argmax())], float(probabilities.max())
            else:
                yield "", 0.0


def classify_rows(
    model: nn.Module, params: Any, rows: Sequence[Sequence[int]], batch_size: int
) -> Iterator[np.ndarray]:
    """Yields the label probabilities of each row of token ids, float32 [classes], with a `Classifier` model."""
    return compute_rows(label_probabilities, model, params, [{"tokens": row} for row in rows], batch_size)


@functools.partial(jax.jit, static_argnames="model")
def label_probabilities(model: nn.Module, params: Any, batch: registry.Batch) -> jax.Array:
    """Returns label probabilities, float32 [B, classes], for tokens int [B, S] with PAD on the right."""
    tokens = batch["tokens"]
    logits: Any = model.apply({"params": params}, tokens, padding_mask=tokens != PAD, right_padded=True)
    return replicate(jax.nn.softmax(logits, axis=-1))
