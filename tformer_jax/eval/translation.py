"""Evaluation of translations."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers, normalizer, signature
from tformer_jax.eval.bleu import bleu_metric, translation_metrics, unsplit
from tformer_jax.eval.evaluation import Evaluation, Sample
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.text import Translator


class TranslationEvaluator:
    """Translates each source and compares the output with its reference."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self._examples, self._bleu = examples, bleu_metric(cfg)
        self._warn(cfg)
        self._normalize = normalizer(_reference_steps(cfg), cfg.data.target_language)
        self._signatures = {"references": signature(_reference_steps(cfg))}
        self._translate = Translator(cfg, model, tokenizers)

    def _warn(self, cfg: Config) -> None:
        """Warns if BLEU compares texts whose words its tokenizer does not split."""
        references = [example["target"] for example in self._examples]
        used = self._bleu.tokenizer.signature()
        if better := unsplit(references, used):
            logging.getLogger(__name__).warning(
                "BLEU's tokenizer %s does not split the words of most references; set eval.bleu_tokenize=%r, or "
                "data.target_language (now %r)",
                *(used, better, cfg.data.target_language),
            )

    def __call__(self, params: Any) -> Evaluation:
        """Returns `bleu`, `chrf` and `exact_match`, with all translations."""
        sources = [example["source"] for example in self._examples]
        references = [self._normalize(example["target"]) for example in self._examples]
        outputs = self._translate.outputs(params, sources, long_texts=LongTexts("truncate"))
        found = translation_metrics([output.text for output in outputs], references, self._bleu)
        rows = zip(sources, references, outputs, strict=True)
        samples = [Sample(source, reference, output.text, output.score) for source, reference, output in rows]
        return dataclasses.replace(found, outputs=samples, signatures=found.signatures | self._signatures)


def _reference_steps(cfg: Config) -> tuple[str, ...]:
    return cfg.data.normalize if cfg.eval.references == "normalized" else ()
