"""Evaluation of translations."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers, normalizer, signature
from tformer_jax.data.tokenizers.normalization import MOSES
from tformer_jax.data.tokenizers.tokens import unknown_per_word
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.outputs import count_limits, describe_limits
from tformer_jax.inference.text import Translator
from tformer_jax.tasks.evaluators.bleu import bleu_metric, translation_metrics, unsplit
from tformer_jax.tasks.evaluators.evaluation import TOKENIZED, Evaluation, Sample


class TranslationEvaluator:
    """Translates each source and compares the output with its reference."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self._examples, self._bleu = examples, bleu_metric(cfg)
        self._unknown = unknown_per_word(tokenizers.target) > 0
        steps = _reference_steps(cfg)
        self._normalize = normalizer(steps, cfg.data.target_language)
        self._tokenized = MOSES in tokenizers.target.steps and not cfg.decode.detokenize
        self._signatures = {"references": signature(steps)}
        self._warn(cfg)
        self._translate = Translator(cfg, model, tokenizers)

    def _warn(self, cfg: Config) -> None:
        """Warns if BLEU compares tokens with texts, or texts whose words its tokenizer does not split."""
        if self._tokenized and cfg.eval.references == "raw":
            logging.getLogger(__name__).warning(
                "outputs are tokens of Moses, but references are not, which lowers BLEU: set decode.detokenize=True, "
                "or eval.references='normalized' and eval.bleu_tokenize='none' for tokenized BLEU"
            )
        references = [example["target"] for example in self._examples]
        used = self._bleu.tokenizer.signature()
        if better := unsplit(references, used):
            logging.getLogger(__name__).warning(
                "BLEU's tokenizer %s does not split the words of most references; set eval.bleu_tokenize=%r, or "
                "data.target_language (now %r)",
                *(used, better, cfg.data.target_language),
            )

    def __call__(self, params: Any) -> Evaluation:
        """Returns `bleu`, `chrf` and `exact_match`, with all translations.

        Also `unknown_outputs`, the share of outputs with an unknown token, if the target's tokenizer has such tokens.
        Signatures name tokenized texts.
        """
        sources = [example["source"] for example in self._examples]
        references = [self._normalize(example["target"]) for example in self._examples]
        outputs = self._translate.outputs(params, sources, long_texts=LongTexts("truncate"))
        found = translation_metrics([output.text for output in outputs], references, self._bleu)
        rows = zip(sources, references, outputs, strict=True)
        samples = [
            Sample(source, reference, output.text, output.score, output.finish_reason)
            for source, reference, output in rows
        ]
        metrics, signatures = found.metrics, found.signatures
        unknown = sum(output.unknown > 0 for output in outputs)
        if unknown or self._unknown:
            metrics = metrics | {"unknown_outputs": 100 * unknown / len(outputs)}
        if self._tokenized:
            signatures = {name: f"{text}|{TOKENIZED}" for name, text in signatures.items()}
        remarks = tuple(describe_limits(count_limits(outputs), self._translate.cfg, len(outputs)))
        signatures = signatures | self._signatures
        return dataclasses.replace(found, metrics=metrics, outputs=samples, signatures=signatures, remarks=remarks)


def _reference_steps(cfg: Config) -> tuple[str, ...]:
    """Returns the steps that normalize references: not `moses` if outputs are detokenized."""
    undone = (MOSES,) if cfg.decode.detokenize else ()
    steps = cfg.data.normalize if cfg.eval.references == "normalized" else ()
    return tuple(step for step in steps if step not in undone)
