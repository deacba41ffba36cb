"""BLEU and chrF of translations, computed by sacreBLEU."""

import re
from collections.abc import Sequence

import sacrebleu

from tformer_jax.config import Config
from tformer_jax.config.fields import one_line
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.eval.evaluation import Evaluation


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
        raise cfg.eval.error("bleu_tokenize", one_line(error, None)) from error


def bleu_tokenizing(tokenize: str) -> sacrebleu.BLEU:
    """Returns BLEU with sacreBLEU's tokenizer of that name; "none" does not warn about tokenized texts."""
    return sacrebleu.BLEU(tokenize=tokenize, force=tokenize == "none")


def translation_metrics(outputs: Sequence[str], references: Sequence[str], bleu: sacrebleu.BLEU) -> Evaluation:
    """Computes corpus BLEU and chrF, with sacreBLEU's signatures, and the share of exact matches, all in percent.

    Exact matches have the same characters after `clean_whitespace`, as BLEU does not compare white space either.
    """
    chrf = sacrebleu.CHRF()
    cleaned = [list(map(clean_whitespace, texts)) for texts in (outputs, references)]
    exact = sum(output == reference for output, reference in zip(*cleaned, strict=True))
    metrics = {
        "bleu": bleu.corpus_score(outputs, [references]).score,
        "chrf": chrf.corpus_score(outputs, [references]).score,
        "exact_match": 100 * exact / len(references),
    }
    return Evaluation(metrics, signatures={"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())})
