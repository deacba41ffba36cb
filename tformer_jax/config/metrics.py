"""Metrics: their names, such as `chrf`, or `chrf:to-en` for a group of directions; and the kinds that score texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds

if TYPE_CHECKING:
    import numpy as np

PER_TOKEN = ("loss", "perplexity", "token_accuracy")
"""Metrics of predicted tokens."""
PER_TEXT_SIZE = ("bits_per_byte", "bits_per_character")
"""Metrics of predicted texts that compare across tokenizers."""
LOWER_IS_BETTER = ("loss", "perplexity", *PER_TEXT_SIZE, "unknown_outputs")
"""Metrics for which lower is better, except kinds, which set `Metric.lower_is_better`."""
DEFAULT = ("bleu", "chrf", "exact_match")
"""Metrics of all translations."""
TAKEN = frozenset(("", "step", "group", "accuracy", "macro_f1", *DEFAULT, *PER_TOKEN, *LOWER_IS_BETTER))
"""Names of other quantities and keys of their records, which no metric of one's own may have."""
PROGRAMS = frozenset(("command", "command_error"))
"""Metrics whose scores a program writes (`eval.command`)."""

EvalConfig = Any
"""The section `eval`, whose module comes after this one."""
References = Sequence[Sequence[str]]
"""One or several of each output."""


class Metric:
    """A kind of `kinds.METRICS`: compares outputs in one language with references.

    Args:
        evaluation: the settings `eval`.
        languages: all languages of the evaluated directions.
    """

    name: str = ""
    """Its name in `kinds.METRICS`."""
    lower_is_better: ClassVar[bool] = False
    bounds: ClassVar[tuple[float, float]] = (-float("inf"), float("inf"))
    """Smallest and largest possible value."""
    by_language: ClassVar[bool] = False
    """Whether the scores depend on the language; otherwise, outputs in all languages are scored by one call."""
    stored: ClassVar[bool] = True
    """Whether a run stores the scores of its texts, which comparisons read; otherwise, they compute them again."""
    signature: str = ""
    """What determines the scores, besides the references, if that is more than the name."""

    def __init__(self, evaluation: EvalConfig, language: str, languages: Sequence[str] = ()):
        self.evaluation, self.language, self.languages = evaluation, language, languages

    @property
    def applies(self) -> bool:
        """Whether the metric has a value for the language."""
        return True

    def score_texts(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> Sequence[float]:
        """Returns the score of each output alone."""
        return [self.score_alone(row) for row in self.statistics(sources, outputs, references)]

    def statistics(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> "np.ndarray":
        """Returns numbers for each output, float64 [N, S]; their sums over texts determine the score of these texts."""
        import numpy as np

        scores = self.checked_scores(sources, outputs, references)
        return np.stack([scores, np.ones(len(scores))], axis=1)

    def checked_scores(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> "np.ndarray":
        """Returns `score_texts` as float64 [N].

        Raises:
            UserError: it is not a finite number for each output.
        """
        import numpy as np

        scores, metric = self.score_texts(sources, outputs, references), f"the metric {self.name!r}"
        try:
            values = np.asarray(scores, np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{metric} returns something else than a number for each output") from None
        if values.shape != (len(outputs),):
            raise UserError(f"{metric} has {values.size:,} scores of {len(outputs):,} outputs")
        if not np.isfinite(values).all():
            worst = outputs[int(np.argmin(np.isfinite(values)))]
            raise UserError(f"{metric} has a score that is not finite, for the output {worst[:80]!r}")
        return values

    def score(self, sums: "np.ndarray") -> float:
        """Returns the score of texts, given the sums of their `statistics`, float64 [S]; here the mean."""
        return float(sums[0] / sums[1])

    def score_alone(self, row: "np.ndarray") -> float:
        """Returns the score of one text, given its `statistics`, float64 [S]."""
        return self.score(row)

    def signature_of(self, references: References) -> str:
        """Returns what determines the scores against these references; "": only the name."""
        return self.signature

    def problem(self, references: Sequence[str]) -> str | None:
        """Returns a sentence about references that the metric does not fit, for a warning."""
        return None

    def remarks(self, references: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """Returns sentences about the values, given each language with a reference in it."""
        return ()


def build_metric(evaluation: EvalConfig, name: str, language: str, languages: Sequence[str] = ()) -> Metric:
    """Returns the metric `name` of `kinds.METRICS`; the other arguments are as for `Metric`.

    Raises:
        UserError: a package or file that it needs is missing.
    """
    kind = kinds.load(kinds.METRICS, name)
    metric: Metric = (kind if isinstance(kind, type) else Metric)(evaluation, language, languages)
    metric.name = name
    if not isinstance(kind, type):  # a function of sources, outputs and references
        metric.score_texts = kind  # type: ignore[method-assign]
    return metric


def base_metric(name: str) -> str:
    """Returns the name of a metric without its direction or group."""
    return name.partition(":")[0]


def group_of_metric(name: str) -> str:
    """Returns the direction or group of a metric; "" if it is over all directions."""
    return name.partition(":")[2]


def lower_is_better(name: str) -> bool:
    """Returns whether lower values of a metric are better."""
    base = base_metric(name)
    if base in LOWER_IS_BETTER or base not in kinds.METRICS:
        return base in LOWER_IS_BETTER
    return bool(getattr(kinds.load(kinds.METRICS, base), "lower_is_better", False))
