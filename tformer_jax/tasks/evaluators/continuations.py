"""Sample continuations of a language model."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config, DecodeConfig
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.forced import first_tokens
from tformer_jax.inference.outputs import RowDecoder
from tformer_jax.inference.requests import EncodedRequest
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Sample

PROMPT_DIVISOR = 4
"""A prompt has 1 / PROMPT_DIVISOR of the model's maximum length, or less if `decode.prefix` leaves less."""
SAMPLE_TOKENS = 128
"""Maximum number of new tokens of a continuation if `decode.max_new_tokens` is None."""


class ContinuationEvaluator:
    """Generates continuations of held-out documents from their first tokens; computes no metrics."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self._model, self._tokenizers = model, tokenizers
        max_length = cfg.model.max_length
        texts = (example["text"][: 8 * max_length] for example in examples[: cfg.eval.samples])
        documents = (tokenizers.target.encode(text)[:max_length] for text in texts)
        forced = len(first_tokens(cfg.decode, tokenizers.target, continues=True).ids)
        self._cfg = dataclasses.replace(cfg, decode=_short(cfg.decode, forced))
        room = max_length - tokenizers.target.special.added - forced
        prompt_length = max(min(max_length // PROMPT_DIVISOR, room), 1)
        self._parts = [(ids[:prompt_length], ids[prompt_length:]) for ids in documents if ids[:prompt_length]]

    def __call__(self, params: Any) -> Evaluation:
        """Returns prompts, reference continuations and generated continuations, without metrics.

        Unknown tokens of prompts and references have their name.
        """
        if not self._parts:
            return Evaluation({})
        tokenizer = self._tokenizers.target
        decode = functools.partial(tokenizer.decode, unknown=tokenizer.special.unknown_name)
        generate = RowDecoder(self._cfg, self._model, params, self._tokenizers)
        outputs = generate([EncodedRequest(tokenizer.special.wrap_text(prompt)) for prompt, _ in self._parts])
        samples = []
        for (prompt, reference), (output,) in zip(self._parts, outputs, strict=True):
            samples.append(Sample(decode(prompt), decode(reference), output.text, None, output.finish_reason))
        return Evaluation({}, samples)


def _short(decode: DecodeConfig, forced: int) -> DecodeConfig:
    """Returns settings with a limit; `forced` is the number of tokens with which outputs start."""
    if decode.max_new_tokens is not None:
        return decode
    return dataclasses.replace(decode, max_new_tokens=max(SAMPLE_TOKENS, decode.min_new_tokens, forced + 1))
