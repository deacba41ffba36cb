"""Classification: one label for each text."""

from collections.abc import Sequence
from typing import Any

from tformer_jax.config import Config
from tformer_jax.tasks.task import Task


class Classification(Task):
    """Predicts the label of a text."""

    family = "classifier"
    keys = ("text", "label")
    batchings = ("buckets",)
    metrics = ("loss", "accuracy", "macro_f1")
    verb = "classify"
    verbs = ("classify",)
    route = "/classify"
    references = "labels"

    def check_fit(self, cfg: Config) -> None:
        super().check_fit(cfg)
        if cfg.train.loss_chunk:
            raise cfg.train.error("loss_chunk", "must be None for model.family='classifier', which has few logits")

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns the evaluator of the likelihood of labels and of predictions."""
        from tformer_jax.inference.text import LabelClassifier
        from tformer_jax.tasks.evaluators.classification import ClassificationEvaluator

        classify = LabelClassifier(parts.cfg, parts.model, parts.tokenizers, parts.corpus.labels)
        return [ClassificationEvaluator(classify, parts.examples[:], parts.likelihood)]


CLASSIFICATION = Classification()
