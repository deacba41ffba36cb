"""The evaluators of each model family and of pre-training objectives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.corpora.corpus import Part, spread
from tformer_jax.data.pipeline import evaluation_batches
from tformer_jax.data.rows import WHOLE_BATCH, Shards
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.eval.accuracy import ClassificationEvaluator
from tformer_jax.eval.bleu import bleu_metric
from tformer_jax.eval.evaluation import Evaluation, Evaluator, Sample
from tformer_jax.eval.likelihood import Likelihood
from tformer_jax.eval.perplexity import PerplexityEvaluator
from tformer_jax.eval.samples import ContinuationEvaluator
from tformer_jax.eval.translation import TranslationEvaluator

__all__ = ["Evaluation", "Evaluator", "Sample", "evaluators_for"]

Build = Callable[[Config, nn.Module, Corpus, Tokenizers, Sequence[Example], Likelihood], list[Evaluator]]


def evaluators_for(
    cfg: Config,
    model: nn.Module,
    corpus: Corpus,
    tokenizers: Tokenizers,
    split: str,
    limit: int,
    *,
    shards: Shards = WHOLE_BATCH,
) -> list[Evaluator]:
    """Returns the evaluators of the model's family, or of its objective, for `split`, "validation" or "test".

    Args:
        limit: number of examples to evaluate, evenly spread over the split; 0: all.
        shards: the shards of a batch, and those that this process prepares.
    """
    whole = getattr(corpus, split)
    examples = Part(whole, spread(len(whole), limit))
    batches = functools.partial(evaluation_batches, cfg, whole, tokenizers, corpus.labels, limit=limit, shards=shards)
    own = shards.own if shards.count > 1 else None
    likelihood = Likelihood(model, batches, own, chunk=cfg.train.loss_chunk)
    of_split: list[Evaluator] = [_no_test] if split == "test" and corpus.test is corpus.validation else []
    if cfg.data.objective:
        return [PerplexityEvaluator(likelihood), *of_split]
    return [*BUILDERS[cfg.model.family](cfg, model, corpus, tokenizers, examples, likelihood), *of_split]


def _no_test(params: Any) -> Evaluation:
    """Remarks on metrics of a test split that is the validation split."""
    remark = "the test split is the validation split (data.test=()): name other examples to report a test result"
    return Evaluation({}, remarks=(remark,))


def described(cfg: Config, corpus: Corpus, split: str) -> str:
    """Returns the name of a split, with the part of it that is evaluated during training if it is not all."""
    size, used = len(getattr(corpus, split)), cfg.eval.examples
    if split == "test":
        return "test, which is validation" if corpus.test is corpus.validation else split
    return f"{split} ({used:,} of {size:,})" if 0 < used < size else split


def check_installed(cfg: Config) -> None:
    """Raises `UserError` if a metric of this family needs a package that is not installed."""
    if cfg.model.family == "seq2seq" and not cfg.data.objective:
        bleu_metric(cfg)


def _seq2seq(cfg, model, corpus, tokenizers, examples, likelihood) -> list[Evaluator]:
    return [PerplexityEvaluator(likelihood), TranslationEvaluator(cfg, model, tokenizers, examples[:])]


def _decoder_lm(cfg, model, corpus, tokenizers, examples, likelihood) -> list[Evaluator]:
    return [PerplexityEvaluator(likelihood), ContinuationEvaluator(cfg, model, tokenizers, examples)]


def _classifier(cfg, model, corpus, tokenizers, examples, likelihood) -> list[Evaluator]:
    return [ClassificationEvaluator(cfg, model, tokenizers, corpus.labels, examples[:], likelihood)]


BUILDERS: dict[str, Build] = {"seq2seq": _seq2seq, "decoder_lm": _decoder_lm, "classifier": _classifier}
