"""Sample continuations of a language model."""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.eval.evaluation import Evaluation, Sample
from tformer_jax.inference.text import TextGenerator

PROMPT_DIVISOR = 4
"""A prompt has 1 / PROMPT_DIVISOR of the model's maximum length."""


class ContinuationEvaluator:
    """Generates continuations of held-out documents from their first tokens; computes no metrics."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        max_length = cfg.model.max_length
        prompt_length = max_length // PROMPT_DIVISOR
        self._texts = []
        for example in examples[: cfg.eval.samples]:
            ids = tokenizers.target.encode(example["text"][: 8 * max_length])
            prompt, reference = ids[:prompt_length], ids[prompt_length:max_length]
            if prompt:
                self._texts.append((tokenizers.target.decode(prompt), tokenizers.target.decode(reference)))
        self._generate = TextGenerator(cfg, model, tokenizers)

    def __call__(self, params: Any) -> Evaluation:
        """Returns prompts, reference continuations and generated continuations, without metrics."""
        outputs = self._generate(params, [prompt for prompt, _ in self._texts]) if self._texts else []
        return Evaluation({}, [Sample(*texts, output) for texts, output in zip(self._texts, outputs, strict=True)])
