"""BLEU with the tokenizer of a language, computed by sacreBLEU."""

import collections
import hashlib
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu

from tformer_jax.base import checks
from tformer_jax.base.errors import UserError, one_line
from tformer_jax.config import EvalConfig
from tformer_jax.data.languages import read_language
from tformer_jax.tasks.metrics.sacre import SacreMetric

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
FLORES200 = "https://tinyurl.com/flores200sacrebleuspm"
"""The SentencePiece model of sacreBLEU's tokenizer flores200."""


class Bleu(SacreMetric):
    """BLEU with the tokenizer `eval.bleu_tokenize`; if None, sacreBLEU's choice for the script of the language.

    Japanese and Korean are tokenized into characters if MeCab is not installed.

    Raises:
        UserError: `eval.bleu_tokenize` needs a package or file that is not installed.
    """

    def build_scorer(self) -> sacrebleu.BLEU:
        target, chosen = read_language(self.language), self.evaluation.bleu_tokenize
        by_script = BY_SCRIPT.get((target and target.script) or "", "13a")
        try:
            return bleu_tokenizing(chosen or by_script)
        except (RuntimeError, ImportError, OSError) as error:
            if chosen is None:
                return sacrebleu.BLEU(tokenize="char")
            raise self.evaluation.error("bleu_tokenize", one_line(error, None)) from error

    def problem(self, references: Sequence[str]) -> str | None:
        used = self.scorer.tokenizer.signature()
        if better := unsplit(references, used):
            by_language = f", or data.target_language (now {self.language!r})" if better in BY_SCRIPT.values() else ""
            return (
                f"BLEU's tokenizer {used} does not split the words of most references in {self.language!r}; "
                f"set eval.bleu_tokenize={better!r}{by_language}"
            )
        return None


def bleu_tokenizing(tokenize: str) -> sacrebleu.BLEU:
    """Returns BLEU with sacreBLEU's tokenizer of that name; "none" does not warn about tokenized texts."""
    return sacrebleu.BLEU(tokenize=tokenize, force=tokenize == "none")


class SpBleu(SacreMetric):
    """BLEU of the pieces of a SentencePiece model (Goyal et al., 2022), whose checksum the signature has.

    Raises:
        UserError: the file is not such a model, or sentencepiece is not installed.
    """

    settings = ("spbleu_model",)

    @staticmethod
    def check(section: EvalConfig) -> None:
        """Requires the model."""
        if section.spbleu_model is None:
            raise section.error("spbleu_model", "must name the file of a SentencePiece model for eval.metrics='spbleu'")

    def build_scorer(self) -> sacrebleu.BLEU:
        checks.require("spbleu", ("sentencepiece",), "tokenizers")
        import sentencepiece

        path = Path(self.evaluation.spbleu_model).expanduser()
        try:
            content = path.read_bytes()
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"eval.spbleu_model={str(path)!r}: is not a SentencePiece model that can be read; name the file "
                f"{FLORES200}, from which sacreBLEU computes spBLEU"
            ) from error
        metric = bleu_tokenizing("none")
        metric.tokenizer = _Pieces(model, f"spm-{hashlib.sha256(content).hexdigest()[:8]}")
        metric.tokenizer_signature = metric.tokenizer.signature()
        return metric


class _Pieces(NamedTuple):
    """A tokenizer for sacreBLEU."""

    model: Any
    name: str

    def __call__(self, line: str) -> str:
        return " ".join(self.model.encode_as_pieces(line))

    def signature(self) -> str:
        return self.name


def unsplit(references: Sequence[str], tokenize: str) -> str | None:
    """Returns the tokenizer to choose if most letters are of a script whose words `tokenize` does not split."""
    letters = (c for text in references for c in text if unicodedata.category(c) == "Lo")
    scripts = collections.Counter(unicodedata.name(letter, " ").split()[0] for letter in letters)
    missed = {name: count for name, count in scripts.items() if name in UNSPACED.keys() - SPLIT.get(tokenize, set())}
    total = sum(c.isalpha() for text in references for c in text)
    if 2 * sum(missed.values()) <= total or not missed:
        return None
    return UNSPACED["HIRAGANA" if {"HIRAGANA", "KATAKANA"} & scripts.keys() else max(missed, key=missed.__getitem__)]
