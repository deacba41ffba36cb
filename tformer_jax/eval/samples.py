"""What a language model writes."""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.eval.evaluation import Evaluation, Sample
from tformer_jax.inference.text import TextGenerator

PROMPT_SHARE = 4
"""A prompt takes one in so many of the tokens that the model reads."""


class ContinuationEvaluator:
    """Continues the beginnings of held-out documents; measures nothing."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        room = cfg.model.max_length
        self._texts = []
        for example in examples[: cfg.eval.samples]:
            ids = tokenizers.target.encode(example["text"][: 8 * room])
            prompt, rest = ids[: room // PROMPT_SHARE], ids[room // PROMPT_SHARE : room]
            if prompt:
                self._texts.append((tokenizers.target.decode(prompt), tokenizers.target.decode(rest)))
        self._generate = TextGenerator(cfg, model, tokenizers)

    def __call__(self, params: Any) -> Evaluation:
        """No numbers; samples of prompt, true continuation and the model's."""
        outputs = self._generate(params, [prompt for prompt, _ in self._texts]) if self._texts else []
        samples = [Sample(prompt, rest, output) for (prompt, rest), output in zip(self._texts, outputs, strict=True)]
        return Evaluation({}, samples)
