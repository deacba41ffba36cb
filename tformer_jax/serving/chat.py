"""`POST /v1/chat/completions`, as in OpenAI's API: its fields, and its reply."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tformer_jax.base.errors import UserError
from tformer_jax.config.fields import INT32_MAX, setting
from tformer_jax.data.chat.messages import ASSISTANT, Chat
from tformer_jax.serving.bodies import MAX_LOGPROBS, Generated
from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.model import Text
from tformer_jax.serving.replies import CompletionReply


@dataclasses.dataclass(frozen=True)
class ChatCompletion(Generated):
    """Fields of `POST /v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, Any]] = {
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "store": False,
        "metadata": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "service_tier": "auto",
    }

    messages: tuple[Any, ...] = setting((), "the conversation: objects with role and content")
    tools: tuple[Any, ...] = setting((), "descriptions of functions, which the chat template may show the model")
    tool_choice: str = setting("auto", "accepted; answers are texts", choices=("auto", "none"))
    max_completion_tokens: int | None = setting(None, "as max_tokens, its new name", low=0, high=INT32_MAX)
    logprobs: bool = setting(False, "with the log-probabilities of tokens")
    top_logprobs: int | None = setting(None, "number of most probable tokens to show", low=0, high=MAX_LOGPROBS)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """As `Generated.read`; a text is no list of messages or tools."""
        for name in ("messages", "tools"):
            if isinstance(values.get(name), str):
                raise RequestError(f"{name}: must be a list, not a text", param=name)
        return super().read(values)

    def check(self) -> None:
        super().check()
        try:
            Chat.read(self.messages)
        except UserError as error:
            raise self.error("messages", str(error)) from None
        if self.top_logprobs is not None and not self.logprobs:
            raise self.error("top_logprobs", "needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise self.error("max_completion_tokens", "is max_tokens by its new name: write one of them")

    @property
    def chat(self) -> Chat:
        """The conversation."""
        return Chat.read(self.messages, list(self.tools))

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def inputs(self) -> list[Text]:
        return [""]


class ChatReply(CompletionReply):
    """Reply of `POST /v1/chat/completions`: OpenAI's chat completion object, or its chunks."""

    kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole_choice(self, index: int, text: str, finish: str | None, scores: Any = None) -> dict[str, Any]:
        message = {"role": ASSISTANT, "content": text, "refusal": None}
        return {"index": index, "message": message, **self._end(finish, scores)}

    def piece_of_choice(self, index: int, text: str, finish: str | None, scores: Any = None) -> dict[str, Any]:
        delta = {} if index in self._started else {"role": ASSISTANT}
        self._started.add(index)
        return {"index": index, "delta": delta | ({"content": text} if text else {}), **self._end(finish, scores)}

    def _end(self, finish: str | None, scores: Any) -> dict[str, Any]:
        count = self.body.shown_logprobs or 0
        return {"logprobs": None if scores is None else chat_logprobs(scores, count), "finish_reason": finish}


def chat_logprobs(scores: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns log-probabilities of `logprobs` in the format of OpenAI's chat completions.

    Args:
        count: number of most probable tokens to show.
    """
    rows = zip(*(scores[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    content = []
    for token, value, top in rows:
        best = sorted(top.items(), key=lambda item: -item[1])[:count]
        content.append(_entry(token, value) | {"top_logprobs": [_entry(*item) for item in best]})
    return {"content": content, "refusal": None}


def _entry(token: str, value: float) -> dict[str, Any]:
    """Returns a token with its bytes; null for parts of characters, and for tokens that are named by their ids."""
    unknown = "\ufffd" in token or token.startswith("token_id:")
    return {"token": token, "logprob": value, "bytes": None if unknown else list(token.encode())}
