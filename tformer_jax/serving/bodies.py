"""Request bodies: each field is declared once, with its default and allowed values."""

import dataclasses
import re
import reprlib
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tformer_jax.config import ConfigError, DecodeConfig
from tformer_jax.config.fields import Section, nearest, setting
from tformer_jax.inference.engine import Request
from tformer_jax.serving.refusal import Refusal

MOST = 2**31 - 1
"""Largest integer, since the device counts in int32."""
MOST_OUTPUTS = 64
MOST_BEAMS = 16
"""Maximum beam width: each width has its own cache, whose size grows with it."""
STOPS, STOP_LENGTH = 16, 200
WRONG_TYPE = re.compile(r"must be [\w ]+, not \w+")
JSON_WORDS = {
    "str": "a text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "tuple": "a text or a list of texts",
    "list": "a list",
    "dict": "an object",
    "None": "null",
}


@dataclasses.dataclass(frozen=True)
class Body(Section):
    """Fields of the request body of one route."""

    not_offered: ClassVar[tuple[str, ...]] = ()
    """Fields that other servers support for this route, and this one does not."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Reads the fields that a client sent; null selects the default.

        Raises:
            Refusal: a field is unknown, or its value has the wrong type or is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        given = {name: value for name, value in values.items() if value is not None}
        for name in given:
            if name in cls.not_offered:
                raise Refusal(f"{name}: this server does not offer it; leave it out", param=name)
            if name not in known:
                raise Refusal(f"{reprlib.repr(name)}: unknown field{nearest(name[:100], known)}", param=name[:100])
        return cls(**given)

    def error(self, name: str, problem: str) -> ConfigError:
        """Returns the error for a field, with JSON's names of types."""
        if WRONG_TYPE.fullmatch(problem):
            problem = re.sub(r"\w+", lambda word: JSON_WORDS.get(word[0], word[0]), problem)
        return Refusal(f"{name}: {problem}", param=name)

    def check_texts(self, name: str) -> None:
        """Raises `Refusal` unless a field is one text, or a list of at least one text."""
        texts = getattr(self, name)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise self.error(name, "must be a text, or a list of texts")


@dataclasses.dataclass(frozen=True)
class Translation(Body):
    """Fields of `POST /translate`."""

    text: tuple[str, ...] = setting((), "a text, or a list of texts")
    beams: int | None = setting(None, "beam width (default: that of the run)", low=1, high=MOST_BEAMS)
    n_best: int = setting(1, "translations of each text", low=1, high=MOST_BEAMS)
    max_new_tokens: int | None = setting(None, "maximum number of tokens (default: that of the run)", low=1, high=MOST)
    stream: bool = setting(False, "respond with server-sent events")

    def check(self) -> None:
        self.check_texts("text")
        if self.beams is not None and self.n_best > self.beams:
            raise self.error("n_best", f"needs at least as many beams: write {self.n_best} for beams")

    def requests(self, saved: DecodeConfig) -> list[Request]:
        """Returns one request per text; more than one translation of a text requires beam search.

        Raises:
            ConfigError: settings contradict each other.
        """
        changes: dict[str, Any] = {}
        beams = self.beams or (saved.beams if saved.strategy == "beam" else 1)
        if self.beams or self.n_best > 1:
            changes |= {"strategy": "beam", "beams": max(beams, self.n_best)}
        if self.max_new_tokens:
            changes["max_new_tokens"] = self.max_new_tokens
        decode = dataclasses.replace(saved, **changes)
        return [Request(text, decode, samples=self.n_best, scored=True) for text in self.text]


@dataclasses.dataclass(frozen=True)
class Completion(Body):
    """Fields of `POST /v1/completions`: those of OpenAI's API, `top_k` and `min_p`.

    Without `temperature`, `top_p`, `top_k`, `min_p` and `n`, the strategy of the run is used; any of them selects
    sampling, and a temperature of 0 selects greedy decoding.
    """

    not_offered: ClassVar[tuple[str, ...]] = (
        *("logprobs", "suffix", "best_of", "logit_bias", "presence_penalty", "frequency_penalty"),
        *("stream_options", "user"),
    )

    model: str | None = setting(None, "name of the model")
    prompt: tuple[str, ...] = setting((), "a text, or a list of texts")
    max_tokens: int | None = setting(None, "maximum number of tokens (default: that of the run)", low=1, high=MOST)
    temperature: float | None = setting(None, "logits are divided by it; 0: greedy", low=0.0, high=100.0)
    top_p: float | None = setting(None, "only the most probable tokens with this total mass", low=0.0, high=1.0)
    top_k: int | None = setting(None, "only the k most probable tokens", low=1, high=MOST)
    min_p: float | None = setting(None, "minimum probability relative to the largest one", low=0.0, high=1.0)
    n: int = setting(1, "outputs of each prompt", low=1, high=MOST_OUTPUTS)
    stop: tuple[str, ...] = setting((), "texts that end an output")
    seed: int | None = setting(None, "random seed; None: a new one for each request", low=0, high=MOST)
    stream: bool = setting(False, "respond with server-sent events")
    echo: bool = setting(False, "repeat the prompt before each output")

    def check(self) -> None:
        self.check_texts("prompt")
        fits = all(isinstance(text, str) and 0 < len(text) <= STOP_LENGTH for text in self.stop)
        if not fits or len(self.stop) > STOPS:
            limits = f"at most {STOPS} texts of 1 to {STOP_LENGTH} characters"
            raise self.error("stop", f"must be a text, or a list of {limits}")
        if self.temperature is not None and 0 < self.temperature < 1e-4:
            raise self.error("temperature", "must be 0 (greedy) or at least 0.0001")
        if self.temperature == 0 and self.n > 1:
            raise self.error("n", "must be 1 for temperature 0, where all outputs are alike")

    def requests(self, saved: DecodeConfig) -> list[Request]:
        """Returns one request per prompt; equal prompts in a list get different samples.

        Raises:
            ConfigError: settings contradict each other.
        """
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        changes: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        if changes or self.n > 1:
            changes["strategy"] = "sample"
        if self.temperature == 0:
            changes = {"strategy": "greedy"}
        if self.max_tokens:
            changes["max_new_tokens"] = self.max_tokens
        if self.stop:
            changes["stop"] = self.stop
        decode = dataclasses.replace(saved, **changes)
        seed = secrets.randbelow(MOST) if self.seed is None else self.seed
        return [
            Request(text, decode, seed=seed, index=number * self.n, samples=self.n)
            for number, text in enumerate(self.prompt)
        ]
