"""BLEU and chrF of translations, computed by sacreBLEU."""

import collections
import unicodedata
from collections.abc import Sequence

import sacrebleu

from tformer_jax.base.errors import one_line
from tformer_jax.config import Config
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.data.languages import read_language
from tformer_jax.tasks.evaluators.evaluation import Evaluation

BY_SCRIPT = {"Hans": "zh", "Hant": "zh", "Hani": "zh", "Jpan": "ja-mecab", "Kore": "ko-mecab", "Hang": "ko-mecab"}
"""SacreBLEU's tokenizers of scripts that its default, 13a, does not split into words."""
UNSPACED = {
    "CJK": "zh",
    "HIRAGANA": "ja-mecab",
    "KATAKANA": "ja-mecab",
    **dict.fromkeys(("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"), "char"),
}
"""Tokenizers to choose for texts without spaces between words, by the first word of their characters' names."""
SPLIT = {"zh": {"CJK"}, "ja-mecab": {"CJK", "HIRAGANA", "KATAKANA"}, "char": {*UNSPACED}, "flores200": {*UNSPACED}}
"""Scripts of `UNSPACED` that a tokenizer splits."""


def bleu_metric(cfg: Config) -> sacrebleu.BLEU:
    """Returns BLEU with the tokenizer `eval.bleu_tokenize`; if None, sacreBLEU's choice for the target's script.

    Japanese and Korean are tokenized into characters if MeCab is not installed.

    Raises:
        UserError: `eval.bleu_tokenize` needs a package or file that is not installed.
    """
    language = read_language(cfg.data.target_language)
    by_script = BY_SCRIPT.get((language and language.script) or "", "13a")
    try:
        return bleu_tokenizing(cfg.eval.bleu_tokenize or by_script)
    except (RuntimeError, ImportError, OSError) as error:
        if cfg.eval.bleu_tokenize is None:
            return sacrebleu.BLEU(tokenize="char")
        raise cfg.eval.error("bleu_tokenize", one_line(error, None)) from error


def bleu_tokenizing(tokenize: str) -> sacrebleu.BLEU:
    """Returns BLEU with sacreBLEU's tokenizer of that name; "none" does not warn about tokenized texts."""
    return sacrebleu.BLEU(tokenize=tokenize, force=tokenize == "none")


def unsplit(references: Sequence[str], tokenize: str) -> str | None:
    """Returns the tokenizer to choose if most letters are of a script whose words `tokenize` does not split."""
    letters = (c for text in references for c in text if unicodedata.category(c) == "Lo")
    scripts = collections.Counter(unicodedata.name(letter, " ").split()[0] for letter in letters)
    missed = {name: count for name, count in scripts.items() if name in UNSPACED.keys() - SPLIT.get(tokenize, set())}
    total = sum(c.isalpha() for text in references for c in text)
    if 2 * sum(missed.values()) <= total or not missed:
        return None
    return UNSPACED["HIRAGANA" if {"HIRAGANA", "KATAKANA"} & scripts.keys() else max(missed, key=missed.__getitem__)]


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
