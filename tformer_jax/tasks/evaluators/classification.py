"""Evaluation of classifiers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tformer_jax.data.corpora import Example
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.text import LabelClassifier
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Sample
from tformer_jax.tasks.evaluators.likelihood import Likelihood


class ClassificationEvaluator(NamedTuple):
    """Classifies each text and compares the prediction with its label."""

    classify: LabelClassifier
    examples: Sequence[Example]
    likelihood: Likelihood

    def __call__(self, params: Any) -> Evaluation:
        """Returns `loss` in nats per text, `accuracy` and `macro_f1` in percent, with the predicted labels.

        Texts are truncated to the model's maximum length, and their number is remarked on.
        """
        loss, accuracy, losses, _ = self.likelihood(params)
        texts = [example["text"] for example in self.examples]
        long_texts = LongTexts("truncate")
        predictions = self.classify(params, texts, long_texts=long_texts)
        outputs = [
            Sample(example["text"], example["label"], label, probability)
            for example, (label, probability) in zip(self.examples, predictions, strict=True)
        ]
        remarks = long_texts.remarks(len(texts), "texts", self.classify.cfg.model.max_length)
        f1 = macro_f1([output.reference for output in outputs], [output.output for output in outputs])
        metrics = {"loss": loss, "accuracy": accuracy, "macro_f1": f1}
        return Evaluation(metrics, outputs, losses=losses, remarks=remarks)


def macro_f1(labels: Sequence[str], predictions: Sequence[str]) -> float:
    """Returns the mean F1 of the labels that occur or are predicted, in percent: 2 hits / (occurrences + predictions).

    Every label has the same weight, however rare it is.
    """
    hits = Counter(label for label, prediction in zip(labels, predictions, strict=True) if label == prediction)
    sizes = Counter(labels) + Counter(predictions)
    return 100 * sum(2 * hits[label] / size for label, size in sizes.items()) / len(sizes)
