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
"""A prompt has 1 / PROMPT_DIVISOR of the model's maximum length, or less if `decode.prefix` leaves less."""
SAMPLE_TOKENS = 128
"""Maximum number of new tokens of a continuation if `decode.max_new_tokens` is None."""

Parts = tuple[list[int], list[int]]
"""The tokens of a prompt, and of what follows it."""


class ContinuationEvaluator:
    """Generates continuations of held-out documents from their first tokens; computes no metrics."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self._model, self._tokenizers = model, tokenizers
        forced = len(first_tokens(cfg.decode, tokenizers.target, continues=True).ids)
        self._cfg = dataclasses.replace(cfg, decode=_short(cfg.decode, forced))
        self._parts = list(self._split(examples[: cfg.eval.samples], cfg.model.max_length, forced))

    def _split(
        self, examples: Sequence[Example], max_length: int, forced: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the parts of documents.

        Args:
            forced: number of tokens with which outputs start.
        """
        special, encode = self._tokenizers.target.special, self._tokenizers.target.encode
        documents = (encode(example["text"][: 8 * max_length])[:max_length] for example in examples)
        room = max_length - special.added - forced
        length = max(min(max_length // PROMPT_DIVISOR, room), 1)
        return ((special.wrap_text(ids[:length]), ids[length:]) for ids in documents if ids[:length])

    def __call__(self, params: Any) -> Evaluation:
        """Returns prompts, reference continuations and generated continuations, without metrics.

        Unknown tokens of prompts and references have their name.
        """
        if not self._parts:
            return Evaluation({})
        tokenizer = self._tokenizers.target
        decode = functools.partial(tokenizer.decode, unknown=tokenizer.special.unknown_name)
        generate = RowDecoder(self._cfg, self._model, params, self._tokenizers)
        outputs = generate([EncodedRequest(prompt) for prompt, _ in self._parts])
        samples = []
        for (prompt, reference), (output,) in zip(self._parts, outputs, strict=True):
            samples.append(Sample(decode(prompt), decode(reference), output.text, None, output.finish_reason))
        return Evaluation({}, samples)


class AnswerEvaluator(ContinuationEvaluator):
    """Generates the last answers of held-out conversations, of those whose prompts leave room for an output."""

    def _split(
        self, examples: Sequence[Example], max_length: int, forced: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        tokenizer = self._tokenizers.target
        for example in examples:
            chat = Chat.from_json(example["messages"])
            last = chat.answers[-1]
            prompt = encode_prompt(tokenizer, chat.until(last))
            if len(prompt) + forced < max_length:
                yield prompt, tokenizer.encode(chat.messages[last].get("content", ""))


def _short(decode: DecodeConfig, forced: int) -> DecodeConfig:
    """Returns settings with a limit; `forced` is the number of tokens with which outputs start."""
    if decode.max_new_tokens is not None:
        return decode
    return dataclasses.replace(decode, max_new_tokens=max(SAMPLE_TOKENS, decode.min_new_tokens, forced + 1))
