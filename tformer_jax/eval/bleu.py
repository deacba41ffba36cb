"""Evaluation of translations with sacreBLEU."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import sacrebleu
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers, normalizer, signature
from tformer_jax.eval.evaluation import Evaluation, Sample
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.text import Translator


def bleu_metric(cfg: Config) -> sacrebleu.BLEU:
    """Returns BLEU with the tokenizer `eval.bleu_tokenize`; if None, sacreBLEU's choice for the target language.

    Japanese and Korean are tokenized into characters if MeCab is not installed.

    Raises:
        ConfigError: `eval.bleu_tokenize` needs a package or file that is not installed.
    """
    tokenize, language = cfg.eval.bleu_tokenize, re.split("[-_]", cfg.data.target_language)[0]
    try:
        return bleu_tokenizing(tokenize) if tokenize else sacrebleu.BLEU(trg_lang=language)
    except (RuntimeError, ImportError, OSError) as error:
        if tokenize is None:
            return sacrebleu.BLEU(tokenize="char")
        raise cfg.eval.error("bleu_tokenize", " ".join(str(error).split())) from error


def bleu_tokenizing(tokenize: str) -> sacrebleu.BLEU:
    """Returns BLEU with sacreBLEU's tokenizer of that name; "none" does not warn about tokenized texts."""
    return sacrebleu.BLEU(tokenize=tokenize, force=tokenize == "none")


def translation_metrics(outputs: Sequence[str], references: Sequence[str], bleu: sacrebleu.BLEU) -> Evaluation:
    """Computes corpus BLEU and chrF, with sacreBLEU's signatures, and the share of exact matches, all in percent."""
    chrf = sacrebleu.CHRF()
    exact = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    metrics = {
        "bleu": bleu.corpus_score(outputs, [references]).score,
        "chrf": chrf.corpus_score(outputs, [references]).score,
        "exact_match": 100 * exact / len(references),
    }
    return Evaluation(metrics, signatures={"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())})


class TranslationEvaluator:
    """Translates each source and compares the output with its reference."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self._examples, self._bleu = examples, bleu_metric(cfg)
        self._normalize = normalizer(_reference_steps(cfg), cfg.data.target_language)
        self._signatures = {"references": signature(_reference_steps(cfg))}
        self._translate = Translator(cfg, model, tokenizers)

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
