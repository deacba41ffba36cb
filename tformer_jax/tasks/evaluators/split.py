"""The evaluators of a split."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.corpora.corpus import Part, evaluated_indices
from tformer_jax.data.pipeline import evaluation_batches
from tformer_jax.data.rows import WHOLE_BATCH, Shards
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Evaluator, Sample
from tformer_jax.tasks.evaluators.likelihood import Likelihood

__all__ = ["Evaluation", "Evaluator", "Sample", "evaluators_for"]


class Parts(NamedTuple):
    """What the evaluators of a split are built from."""

    cfg: Config
    model: nn.Module
    corpus: Corpus
    tokenizers: Tokenizers
    examples: Sequence[Example]
    likelihood: Likelihood
    scored: bool = False
    """Whether to compute the model's score of each output, also where decoding does not need it."""


def evaluators_for(
    cfg: Config,
    model: nn.Module,
    corpus: Corpus,
    tokenizers: Tokenizers,
    split: str,
    limit: int,
    *,
    shards: Shards = WHOLE_BATCH,
    scored: bool = False,
) -> list[Evaluator]:
    """Returns the evaluators of the task for `split`, "validation" or "test".

    Args:
        limit: number of examples to evaluate, see `evaluated_indices`; 0: all.
        shards: the shards of a batch, and which of them this process prepares.
        scored: as in `Parts`.
    """
    whole = getattr(corpus, split)
    indices = evaluated_indices(whole, limit)
    examples, arguments = Part(whole, indices), (cfg, whole, tokenizers, corpus.labels)
    batches = functools.partial(evaluation_batches, *arguments, indices=indices, shards=shards)
    own = shards.own if shards.count > 1 else None
    likelihood = Likelihood(model, batches, own, chunk=cfg.train.loss_chunk)
    remarks: list[Evaluator] = [_no_test] if split == "test" and corpus.test is corpus.validation else []
    parts = Parts(cfg, model, corpus, tokenizers, examples, likelihood, scored)
    return [*task_of(cfg).evaluators(parts), *remarks]


def _no_test(params: Any) -> Evaluation:
    remark = "the test split is the validation split (data.test=()): name other examples to report a test result"
    return Evaluation({}, remarks=(remark,))


def described(cfg: Config, corpus: Corpus, split: str) -> str:
    """Returns the name of a split, with the part of it that is evaluated during training if it is not all."""
    size, used = len(getattr(corpus, split)), cfg.eval.examples
    if split == "test":
        return "test, which is validation" if corpus.test is corpus.validation else split
    return f"{split} ({used:,} of {size:,})" if 0 < used < size else split
