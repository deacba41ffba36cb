"""Request bodies of the routes that generate nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from tformer_jax.base.errors import UserError
from tformer_jax.config.fields import setting
from tformer_jax.inference import requests
from tformer_jax.serving.bodies import Body, ModelBody, is_ids

MAX_INPUTS = 2048
"""Maximum number of texts to classify or embed at once."""


@dataclasses.dataclass(frozen=True)
class Classification(ModelBody):
    """Fields of `POST /classify`, as in vLLM's API."""

    input: tuple[Any, ...] = setting((), "a text, its token ids, or a list of them")

    def check(self) -> None:
        if len(self.texts("input")) > MAX_INPUTS:
            raise self.error("input", f"at most {MAX_INPUTS} texts at once")


@dataclasses.dataclass(frozen=True)
class Embedding(Classification):
    """Fields of `POST /v1/embeddings`, as in OpenAI's API."""

    neutral: ClassVar[Mapping[str, Any]] = {"dimensions": None}

    encoding_format: str = setting("float", "a list of numbers, or little-endian float32", choices=("float", "base64"))


@dataclasses.dataclass(frozen=True)
class Attention(Body):
    """Fields of `POST /attention`."""

    text: str = setting("", "the source, prompt or text")
    output: str = setting("", "the output made of it; a classifier has none")
    target_language: str | None = setting(None, "language of the output, a code or an English name")
    source_language: str | None = setting(None, "language of the text, a code or an English name")

    @property
    def source(self) -> str | requests.Request:
        """The text, with its languages if they are given."""
        languages = self.target_language, self.source_language
        return requests.Request(self.text, *languages) if any(languages) else self.text


@dataclasses.dataclass(frozen=True)
class Tokenization(Body):
    """Fields of `POST /tokenize`, as in vLLM's API."""

    model: str | None = setting(None, "name of the model")
    prompt: str | None = setting(None, "a text")
    add_special_tokens: bool = setting(True, "with the special tokens around a text")

    def check(self) -> None:
        if self.prompt is None:
            raise self.error("prompt", "must be a text")


@dataclasses.dataclass(frozen=True)
class Detokenization(Body):
    """Fields of `POST /detokenize`, as in vLLM's API."""

    model: str | None = setting(None, "name of the model")
    tokens: tuple[Any, ...] | None = setting(None, "token ids")

    def check(self) -> None:
        if self.tokens is None or (self.tokens and not is_ids(self.tokens)):
            raise self.error("tokens", "must be a list of token ids")

    def error(self, name: str, problem: str) -> UserError:
        """Returns the error for a field; a text is not a list of token ids."""
        return super().error(name, "must be a list of token ids" if name == "tokens" else problem)
