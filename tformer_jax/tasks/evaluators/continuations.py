"""Sample continuations of a language model."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config, DecodeConfig
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.chats import encode_prompt
from tformer_jax.inference.forced import first_tokens
from tformer_jax.inference.outputs import RowDecoder
from tformer_jax.inference.requests import EncodedRequest
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Sample

PROMPT_DIVISOR = 4
"""A prompt has 1 / PROMPT_DIVISOR of the model's maximum length, less if `decode.prefix` leaves less, and at most half
of its document."""
SAMPLE_TOKENS = 128
"""Maximum number of new tokens of a continuation if `decode.max_new_tokens` is None."""

Parts = tuple[list[int], str, str]
"""The tokens of a prompt, its text, and what follows it."""


class ContinuationEvaluator:
    """Generates continuations of held-out documents from their first tokens; computes no metrics."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self._model, self._tokenizers = model, tokenizers
        forced = len(first_tokens(cfg.decode, tokenizers.target, continues=True).ids)
        self._cfg = dataclasses.replace(cfg, decode=_short(cfg.decode, forced))
        self._parts = list(self._split(examples[: cfg.eval.samples], cfg.model.max_length, forced))

    def _split(self, examples: Sequence[Example], max_length: int, forced: int) -> Iterator[Parts]:
        """Yields the parts of documents; unknown tokens have their name.

        Args:
            forced: number of tokens with which outputs start.
        """
        special, encode = self._tokenizers.target.special, self._tokenizers.target.encode
        decode = functools.partial(self._tokenizers.target.decode, unknown=special.unknown_name)
        documents = (encode(example["text"][: 8 * max_length])[:max_length] for example in examples)
        room = max_length - special.added_to_text - forced
        length = max(min(max_length // PROMPT_DIVISOR, room), 1)
        for ids in documents:
            if prompt := ids[: min(length, -(-len(ids) // 2))]:
                yield special.wrap_text(prompt), decode(special.wrap_text(prompt)), decode(ids[len(prompt) :])

    def __call__(self, params: Any) -> Evaluation:
        """Returns prompts, reference continuations and generated continuations, without metrics."""
        if not self._parts:
            return Evaluation({})
        generate = RowDecoder(self._cfg, self._model, params, self._tokenizers)
        outputs = generate([EncodedRequest(ids) for ids, _, _ in self._parts])
        samples = [
            Sample(prompt, reference, output.text, None, output.finish_reason)
            for (_, prompt, reference), (output,) in zip(self._parts, outputs, strict=True)
        ]
        return Evaluation({}, samples)


class AnswerEvaluator(ContinuationEvaluator):
    """Generates the last answer of each held-out conversation whose prompt leaves room for an output.

    The prompt of a sample is the message before the answer; a conversation whose answer is the first message is left
    out.
    """

    def _split(self, examples: Sequence[Example], max_length: int, forced: int) -> Iterator[Parts]:
        tokenizer = self._tokenizers.target
        for example in examples:
            chat = Chat.from_json(example["messages"])
            last = chat.answers[-1]
            if last == 0:
                continue
            prompt = encode_prompt(tokenizer, chat.until(last))
            if len(prompt) + forced < max_length:
                asked, answer = (chat.messages[place].get("content") or "" for place in (last - 1, last))
                yield prompt, asked, answer


def _short(decode: DecodeConfig, forced: int) -> DecodeConfig:
    """Returns settings with a limit; `forced` is the number of tokens with which outputs start."""
    if decode.max_new_tokens is not None:
        return decode
    return dataclasses.replace(decode, max_new_tokens=max(SAMPLE_TOKENS, decode.min_new_tokens, forced + 1))
