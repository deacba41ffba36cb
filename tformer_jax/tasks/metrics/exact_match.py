"""Outputs that equal a reference."""

from collections.abc import Sequence

from tformer_jax.config.metrics import Metric, References
from tformer_jax.data.characters import clean_whitespace


class ExactMatch(Metric):
    """The percentage of outputs with the characters of a reference after `clean_whitespace`, as in BLEU."""

    bounds = (0.0, 100.0)
    stored = False

    def score_texts(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> Sequence[float]:
        return [
            100.0 * (clean_whitespace(output) in map(clean_whitespace, each))
            for output, each in zip(outputs, references, strict=True)
        ]
