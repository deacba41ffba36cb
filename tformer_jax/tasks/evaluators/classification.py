"""Evaluation of classifiers."""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.text import LabelClassifier
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Sample
from tformer_jax.tasks.evaluators.likelihood import Likelihood


class ClassificationEvaluator:
    """Classifies each text and compares the prediction with its label."""

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        tokenizers: Tokenizers,
        labels: Sequence[str],
        examples: Sequence[Example],
        likelihood: Likelihood,
    ):
        self._examples = examples
        self._likelihood = likelihood
        self._classify = LabelClassifier(cfg, model, tokenizers, labels)

    def __call__(self, params: Any) -> Evaluation:
        """Returns `loss` in nats per text and `accuracy` in percent, with the predicted labels.

        Texts are truncated to the model's maximum length, and their number is remarked on.
        """
        loss, accuracy, losses, _ = self._likelihood(params)
        texts = [example["text"] for example in self._examples]
        long_texts = LongTexts("truncate")
        predictions = self._classify(params, texts, long_texts=long_texts)
        outputs = [
            Sample(example["text"], example["label"], label, probability)
            for example, (label, probability) in zip(self._examples, predictions, strict=True)
        ]
        remarks = long_texts.remarks(len(texts), "texts", self._classify.cfg.model.max_length)
        return Evaluation({"loss": loss, "accuracy": accuracy}, outputs, losses=losses, remarks=remarks)
