"""Translation quality, by sacreBLEU."""

from collections.abc import Sequence
from typing import Any

import sacrebleu
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.eval.evaluation import Evaluation, Sample
from tformer_jax.inference.text import Translator


def translation_metrics(outputs: Sequence[str], references: Sequence[str], tokenize: str) -> dict[str, float]:
    """Corpus BLEU and chrF (sacreBLEU, with its tokenizer `tokenize`) and the share of exact copies, all in percent."""
    exact = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    return {
        "bleu": sacrebleu.corpus_bleu(outputs, [references], tokenize=tokenize).score,
        "chrf": sacrebleu.corpus_chrf(outputs, [references]).score,
        "exact_match": 100 * exact / len(references),
    }


class TranslationEvaluator:
    """Translates every source and compares with the reference."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, examples: Sequence[Example]):
        self.cfg, self.examples = cfg, examples
        self._translate = Translator(cfg, model, tokenizers, cut=True)

    def __call__(self, params: Any) -> Evaluation:
        """`bleu`, `chrf` and `exact_match`, with the first translations as samples."""
        sources = [example["source"] for example in self.examples]
        references = [example["target"] for example in self.examples]
        outputs = self._translate(params, sources)
        samples = [Sample(*texts) for texts in zip(sources, references, outputs, strict=True)]
        return Evaluation(
            translation_metrics(outputs, references, self.cfg.eval.bleu_tokenize), samples[: self.cfg.eval.samples]
        )
