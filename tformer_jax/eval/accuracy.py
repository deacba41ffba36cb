"""Quality of a classifier."""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.eval.evaluation import Evaluation, Sample
from tformer_jax.eval.likelihood import Batches, Likelihood
from tformer_jax.inference.text import LabelClassifier


class ClassificationEvaluator:
    """Classifies every text and compares with its label."""

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        tokenizers: Tokenizers,
        labels: Sequence[str],
        examples: Sequence[Example],
        batches: Batches,
    ):
        self._shown = examples[: cfg.eval.samples]
        self._likelihood = Likelihood(model, batches)
        self._classify = LabelClassifier(cfg, model, tokenizers, labels, cut=True)

    def __call__(self, params: Any) -> Evaluation:
        """`loss` in nats a text and `accuracy` in percent, with the first texts as samples."""
        loss, accuracy = self._likelihood(params)
        found = self._classify(params, [example["text"] for example in self._shown])
        samples = [
            Sample(example["text"], example["label"], label)
            for example, (label, _) in zip(self._shown, found, strict=True)
        ]
        return Evaluation({"loss": loss, "accuracy": accuracy}, samples)
