"""Request bodies: each field is declared once, with its default and allowed values."""

import dataclasses
import re
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.config.fields import INT32_MAX, Section, nearest, setting
from tformer_jax.inference.engine import Request
from tformer_jax.inference.languages import TagIds
from tformer_jax.inference.phrases import constraints_of
from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.model import ServedModel, Text
from tformer_jax.serving.worker import Empty

MAX_OUTPUTS = 64
MAX_BEAMS = 16
"""Maximum beam width: each width has its own cache, whose size grows with it."""
MAX_LOGPROBS, STOPS, STOP_LENGTH = 5, 16, 200
WRONG_TYPE = re.compile(r"must be [\w ]+, not \w+")
JSON_WORDS = {
    "str": "a text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    **dict.fromkeys(("tuple", "str or tuple"), "a text or a list"),
    "list": "a list",
    **dict.fromkeys(("dict", "StreamOptions"), "an object"),
    **dict.fromkeys(("None", "NoneType"), "null"),
}


@dataclasses.dataclass(frozen=True)
class Body(Section):
    """Fields of the request body of one route."""

    neutral: ClassVar[Mapping[str, Any]] = {}
    """Fields of OpenAI's API that this server does not offer, with the value that has no effect."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Reads the fields that a client sent; null selects the default.

        Raises:
            RequestError: a field is unknown, or its value has the wrong type or is out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given = without_null(values)
        for name in [name for name in given if name not in names]:
            if name not in cls.neutral:
                raise RequestError(f"{reprlib.repr(name)}: unknown field{nearest(name[:100], names)}", param=name[:100])
            neutral = cls.neutral[name]
            if isinstance(given[name], bool) != isinstance(neutral, bool) or given.pop(name) != neutral:
                raise RequestError(f"{name}: is not supported by this server; leave it out", param=name)
        nested = {name: without_null(value) for name, value in given.items() if isinstance(value, Mapping)}
        return cls(**given | nested)

    def error(self, name: str, problem: str) -> UserError:
        """Returns the error for a field, with JSON's names of types."""
        if WRONG_TYPE.fullmatch(problem):
            problem = re.sub(r"str or tuple|\w+", lambda word: JSON_WORDS.get(word[0], word[0]), problem)
        return RequestError(f"{name}: {problem}", param=name)

    def texts(self, name: str) -> list[Text]:
        """Returns the texts of a field: a text, its token ids, or a list of texts or of lists of token ids.

        Raises:
            RequestError: the field has another value.
        """
        value = getattr(self, name)
        if is_ids(value):
            return [value]
        texts = [tuple(text) if isinstance(text, list) else text for text in value]
        if not texts or not all(isinstance(text, str) or is_ids(text) for text in texts):
            raise self.error(name, "must be a text, token ids, or a list of texts or of lists of token ids")
        return texts


@dataclasses.dataclass(frozen=True)
class DirectedBody(Body):
    """Fields of routes that generate outputs: one text for all texts, or a list with a text or null for each text."""

    target_language: str | tuple[Any, ...] = setting((), "language to translate into, a code or an English name")
    source_language: str | tuple[Any, ...] = setting((), "language of the text, a code or an English name")
    prefix: str | tuple[Any, ...] = setting((), "text that the output starts with (default: the run's)")
    constraints: tuple[Any, ...] = setting(
        (), "phrases that all outputs of beam search must contain: texts, or lists of alternatives"
    )
    candidates: int | None = setting(
        None,
        "number of outputs to choose from: those with the least Bayes risk are returned (default: the run's, if the "
        "request selects no strategy)",
        low=1,
        high=MAX_OUTPUTS,
    )

    def by_text(self, name: str, count: int) -> list[str | None]:
        """Returns the value of a field for each of `count` texts.

        Raises:
            RequestError: the field has another number of values, or a value that is not a text.
        """
        given = getattr(self, name)
        values = [given] * count if isinstance(given, str) else list(given) or [None] * count
        if not all(isinstance(value, str | None) for value in values) or len(values) != count:
            raise self.error(name, f"must be a text, or a list with a text or null for each of the {count} texts")
        return values

    def tags(self, served: ServedModel, count: int) -> list[TagIds]:
        """Returns the language tags of each of `count` texts, and of its output; see `ServedModel.tags`."""
        return served.tags(self.by_text("target_language", count), self.by_text("source_language", count))

    def decode_settings(self, saved: DecodeConfig, changes: Mapping[str, Any], count: int) -> list[DecodeConfig]:
        """Returns the settings of each of `count` texts: the run's with changes, and its prefix.

        Raises:
            UserError: settings contradict each other.
        """
        if (self.candidates or 1) > 1 and changes.get("strategy", saved.strategy) == "greedy":
            given = "a temperature" if hasattr(self, "temperature") else "beams"
            raise self.error("candidates", f"compares outputs of sampling or beam search: give {given}")
        if self.candidates or "strategy" in changes:
            changes = {**changes, "candidates": self.candidates or 1}
            changes |= {} if changes["candidates"] > 1 else {"utility": "chrf"}
        prefixes = [saved.prefix if prefix is None else prefix for prefix in self.by_text("prefix", count)]
        decode = {prefix: dataclasses.replace(saved, **{**changes, "prefix": prefix}) for prefix in {*prefixes}}
        return [decode[prefix] for prefix in prefixes]

    def engine_request(
        self, number: int, ids: tuple[int, ...], decode: DecodeConfig, tags: TagIds, text: Text, **options: Any
    ) -> Request | Empty:
        """Returns the request of the text `number`, or if the model reads nothing of it, its markup as outputs.

        `options` are `seed`, `scored` and the `num_outputs` to return.
        """
        given = text_or_empty(text)
        constraints = constraints_of(decode, given, self.constraints)
        if not ids:
            written = given.strip() if decode.markup == "align" else ""
            alignment = () if decode.alignments else None
            return Empty(options["num_outputs"], "stop", written, alignment, constraints)
        count = options["num_outputs"] = max(options["num_outputs"], decode.candidates)
        if self.constraints and decode.strategy != "beam":
            raise self.error("constraints", "needs beam search, which neither the request nor the run selects")
        return Request(ids, decode, index=number * count, tags=tags[1], text=given, constraints=constraints, **options)


@dataclasses.dataclass(frozen=True)
class StreamOptions(Body):
    """Options of a stream."""

    path: ClassVar[str] = "stream_options"

    neutral: ClassVar[Mapping[str, Any]] = {"include_obfuscation": False}

    include_usage: bool = setting(False, "end the stream with the usage")


@dataclasses.dataclass(frozen=True)
class ModelBody(Body):
    """Fields of a route that names the model."""

    model: str | None = setting(None, "name of the model")
    user: str | None = setting(None, "accepted, and not used")


@dataclasses.dataclass(frozen=True)
class Generated(ModelBody, DirectedBody):
    """Fields of routes that generate as OpenAI's API does, with `top_k` and `min_p`.

    Without `temperature`, `top_p`, `top_k`, `min_p` and `n`, the strategy of the run is used; any of them selects
    sampling, and a temperature of 0 selects greedy decoding.
    """

    max_tokens: int | None = setting(None, "maximum number of tokens (default: the run's)", low=0, high=INT32_MAX)
    temperature: float | None = setting(None, "logits are divided by it; 0: greedy", low=0.0, high=100.0)
    top_p: float | None = setting(None, "only the most probable tokens with this total mass", low=0.0, high=1.0)
    top_k: int | None = setting(None, "only the k most probable tokens", low=1, high=INT32_MAX)
    min_p: float | None = setting(None, "minimum probability relative to the largest one", low=0.0, high=1.0)
    n: int = setting(1, "outputs of each prompt", low=1, high=MAX_OUTPUTS)
    stop: tuple[Any, ...] | None = setting(None, "texts that end an output (default: the run's)")
    seed: int | None = setting(None, "random seed; None: a new one for each request", low=0, high=INT32_MAX)
    stream: bool = setting(False, "respond with server-sent events")
    stream_options: StreamOptions = dataclasses.field(default_factory=StreamOptions)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """As `Body.read`, with the fields of `stream_options`."""
        options = values.get("stream_options")
        nested = {"stream_options": StreamOptions.read(options)} if isinstance(options, Mapping) else {}
        return super().read({**values, **nested})

    def check(self) -> None:
        stop = self.stop or ()
        fits = all(isinstance(text, str) and 0 < len(text) <= STOP_LENGTH for text in stop)
        if not fits or len(stop) > STOPS:
            limits = f"at most {STOPS} texts of 1 to {STOP_LENGTH} characters"
            raise self.error("stop", f"must be a text, or a list of {limits}")
        if self.temperature is not None and 0 < self.temperature < 1e-4:
            raise self.error("temperature", "must be 0 (greedy) or at least 0.0001")
        if self.temperature == 0 and self.n > 1:
            raise self.error("n", "must be 1 for temperature 0, where all outputs are alike")
        if self.stream_options.include_usage and not self.stream:
            raise self.error("stream_options", "include_usage needs stream=true")

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens; None: the run's."""
        return self.max_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """Number of most probable tokens to show; None: no log-probabilities."""
        raise NotImplementedError

    def inputs(self) -> list[Text]:
        """Returns the texts from which unknown words are copied."""
        raise NotImplementedError

    def requests(
        self, rows: list[tuple[int, ...]], tags: Sequence[TagIds], saved: DecodeConfig
    ) -> list[Request | Empty]:
        """Returns one request per row of token ids; equal prompts in a list get different samples.

        Raises:
            UserError: settings contradict each other.
        """
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        changes: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        if changes or self.n > 1:
            changes["strategy"] = "sample"
        if self.temperature == 0:
            changes = {"strategy": "greedy"}
        if saved.glossary and changes.get("strategy", "beam") != "beam":
            given = next((name for name, value in sampling.items() if value is not None), "n")
            raise self.error(given, "the glossary of this model needs beam search: leave it out")
        if self.limit:
            changes |= limit_tokens(self.limit, saved)
        if self.stop is not None:
            changes["stop"] = self.stop
        for text in self.stop or ():
            if not self.prefix and text in saved.prefix:
                raise self.error("stop", f"{text!r} occurs in {saved.prefix!r}, with which every output starts")
        decodes = self.decode_settings(saved, changes, len(rows))
        seed = secrets.randbelow(INT32_MAX) if self.seed is None else self.seed
        parts = zip(rows, decodes, tags, self.inputs(), strict=True)
        return [
            Empty(self.n, "length")
            if ids and self.limit == 0
            else self.engine_request(number, ids, decode, both, text, num_outputs=self.n, seed=seed)
            for number, (ids, decode, both, text) in enumerate(parts)
        ]


@dataclasses.dataclass(frozen=True)
class Completion(Generated):
    """Fields of `POST /v1/completions`."""

    neutral: ClassVar[Mapping[str, Any]] = {
        "suffix": "",
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }

    prompt: tuple[Any, ...] = setting((), "a text, its token ids, or a list of them")
    best_of: int | None = setting(None, "number of candidates, which must be n")
    logprobs: int | None = setting(None, "number of most probable tokens to show", low=0, high=MAX_LOGPROBS)
    echo: bool = setting(False, "repeat the prompt before each output")

    def check(self) -> None:
        self.texts("prompt")
        super().check()
        if self.best_of not in (None, self.n):
            raise self.error("best_of", f"must equal n={self.n}: this server generates no further candidates")

    @property
    def shown_logprobs(self) -> int | None:
        return self.logprobs

    def inputs(self) -> list[Text]:
        return self.texts("prompt")

    def rows(self, served: ServedModel, tags: Sequence[TagIds]) -> list[tuple[int, ...]]:
        """Returns the token ids of each prompt, as the model reads them, with its language tags.

        Raises:
            RequestError: a prompt does not fit the model, or its log-probabilities cannot be computed.
        """
        if self.logprobs is not None and served.prefix_lm:
            raise self.error("logprobs", "is not supported for a model with prefix_lm=True; leave it out")
        if self.logprobs is not None and self.echo and served.translates:
            raise self.error("logprobs", "is not supported for the tokens of a source; leave out echo")
        scored_only = self.max_tokens == 0 and not served.translates
        limit = served.max_length + 1 if scored_only else served.longest_prompt
        return served.encode("prompt", self.texts("prompt"), limit, [source for source, _ in tags])


def text_or_empty(text: Text) -> str:
    """Returns a text; empty for token ids."""
    return text if isinstance(text, str) else ""


def without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: value for name, value in values.items() if value is not None}


def limit_tokens(count: int, saved: DecodeConfig) -> dict[str, int]:
    """Returns the settings that limit an output, and the minimum length of the run, to `count` tokens."""
    return {"max_new_tokens": count, "min_new_tokens": min(saved.min_new_tokens, count)}


def is_ids(value: Any) -> bool:
    """Returns whether a value is a tuple of at least one integer."""
    return isinstance(value, tuple) and bool(value) and all(type(i) is int for i in value)
