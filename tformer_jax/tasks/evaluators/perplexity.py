"""Evaluation of the prediction of tokens."""

from typing import Any

import numpy as np

from tformer_jax.tasks.evaluators.evaluation import Evaluation
from tformer_jax.tasks.evaluators.likelihood import Likelihood


class PerplexityEvaluator:
    """Predicts each token from the reference tokens before it (teacher forcing), or masked tokens from the others."""

    def __init__(self, likelihood: Likelihood):
        self._likelihood = likelihood

    def __call__(self, params: Any) -> Evaluation:
        """Returns `loss` in nats per token, `perplexity` = exp(loss) and `token_accuracy` in percent."""
        loss, accuracy, losses = self._likelihood(params)
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(loss))
        return Evaluation({"loss": loss, "perplexity": perplexity, "token_accuracy": accuracy}, losses=losses)
