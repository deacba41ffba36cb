"""Metrics of translations against hand arithmetic and sacreBLEU."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import sacrebleu

from tests.helpers import score_texts
from tformer_jax.base.errors import UserError
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config, DataConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.tasks.evaluators.evaluation import Segment
from tformer_jax.tasks.evaluators.split import Evaluation
from tformer_jax.tasks.evaluators.translation import TranslationEvaluator
from tformer_jax.tasks.metrics.bleu import Bleu, unsplit


def scores(outputs, references, **settings) -> dict[str, float]:
    return scored(outputs, references, translating("de", **settings)).metrics


def scored(outputs, references, cfg: Config) -> Evaluation:
    return score_texts(outputs, [[text] for text in references], cfg, cfg.data.target_language)


def translating(language: str, **settings) -> Config:
    return Config(data=DataConfig(target_language=language), eval=EvalConfig(**settings))


def signatures_of(language: str, **settings) -> dict[str, str]:
    return scored(["a"], ["a"], translating(language, **settings)).signatures


class TestTranslationMetrics:
    """sacreBLEU's scores against hand arithmetic."""

    TEXTS: tuple[str, ...] = ("the cat sat on the mat today", "a dog ran after the big red ball")

    def test_copies_are_perfect(self):
        expected = {"bleu": pytest.approx(100), "chrf": pytest.approx(100), "exact_match": 100}
        assert scores(self.TEXTS, self.TEXTS) == expected

    def test_outputs_without_common_words(self):
        metrics = scores(["xx yy"] * 2, self.TEXTS)
        assert metrics["exact_match"] == 0
        assert max(metrics["bleu"], metrics["chrf"]) < 5

    def test_one_wrong_word_of_eight(self):
        # matched n-grams of "a b c d e f g X" against "a b c d e f g h": 7/8, 6/7, 5/6, 4/5; equal lengths
        metrics = scores(["a b c d e f g X"], ["a b c d e f g h"], bleu_tokenize="none")
        assert metrics["bleu"] == pytest.approx(100 * (7 / 8 * 6 / 7 * 5 / 6 * 4 / 5) ** 0.25)

    def test_the_config_of_two_locales_takes_the_tokenizer_of_the_second(self):
        for variant, tokenizer in (("en-zh", "zh"), ("zh-en", "13a")):
            cfg = read_config(f"configs/translate_cldr.py:{variant}")
            assert f"tok:{tokenizer}|" in scored(["a"], ["a"], cfg).signatures["bleu"]

    def test_one_wrong_character_of_twelve_in_chinese(self):
        """n-grams of 12 characters, the last of which is wrong: 11/12, 10/11, 9/10, 8/9."""
        reference = "我今天早上在家里吃了苹果"
        actual = scored([reference[:-1] + "梨"], [reference], translating("zh"))
        assert actual.metrics["bleu"] == pytest.approx(100 * (11 / 12 * 10 / 11 * 9 / 10 * 8 / 9) ** 0.25)
        assert scores([reference[:-1] + "梨"], [reference])["bleu"] == 0

    @pytest.mark.parametrize(("language", "tokenizer"), [("de", "13a"), ("zh", "zh")])
    def test_equal_to_the_sacrebleu_command(self, tmp_path, language, tokenizer):
        texts = {
            "de": ["Ein Mann, der liest.", "Zwei Hunde rennen am Strand."],
            "zh": ["我今天吃了苹果。", "他们在海边跑步。"],
        }
        references = texts[language]
        outputs = [references[0].replace("Mann", "Kind").replace("今天", "早上"), references[1][1:]]
        for name, lines in (("outputs", outputs), ("references", references)):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        command = f"-m sacrebleu references -i outputs -m bleu chrf -tok {tokenizer} --score-only -w 12 --format json"
        expected = json.loads(subprocess.check_output([sys.executable, *command.split()], cwd=tmp_path))
        actual = scored(outputs, references, translating(language)).metrics
        assert [actual["bleu"], actual["chrf"]] == pytest.approx(expected, abs=1e-11)
        assert 10 < min(expected) < max(expected) < 90

    @pytest.mark.parametrize(
        ("language", "tokenizer"), [("de", "13a"), ("zh", "zh"), ("zh_Hant", "zh"), ("zh-TW", "zh")]
    )
    def test_the_signatures_name_version_and_tokenizer(self, language, tokenizer):
        signatures, version = signatures_of(language), metadata.version("sacrebleu")
        assert signatures["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:{tokenizer}|smooth:exp|version:{version}"
        assert signatures["chrf"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"

    def test_a_configured_tokenizer_overrides_the_language(self):
        assert "tok:char|" in signatures_of("zh", bleu_tokenize="char")["bleu"]

    def test_tokenized_texts_without_a_warning_where_none_tokenizes(self, caplog):
        texts = ["ein mann ."] * 200
        scored(texts, texts, translating("de", bleu_tokenize="none"))
        assert not caplog.records
        scored(texts, texts, translating("de"))
        assert "detokenize" in caplog.text

    @pytest.mark.parametrize(("language", "installed"), [("ja", True), ("ko_KR", True), ("ja", False), ("ko", False)])
    def test_japanese_and_korean_by_mecab_where_it_is_installed(self, monkeypatch, language, installed):
        made, real = [], sacrebleu.BLEU

        def bleu(tokenize, force=False):
            made.append(tokenize)
            if "mecab" in tokenize and not installed:
                raise RuntimeError("requires extra dependencies")
            return real(tokenize="char")

        monkeypatch.setattr(sacrebleu, "BLEU", bleu)
        Bleu(translating("de").eval, language)
        assert made == [f"{language[:2]}-mecab"] + ([] if installed else ["char"])

    @pytest.mark.parametrize("language", ["zh", "zho_Hans", "cmn", "zh-TW", "yue_Hant", "Chinese", "zho", "chi"])
    def test_every_code_of_a_language_selects_its_tokenizer(self, language):
        assert Bleu(translating("de").eval, language).scorer.tokenizer.signature() == "zh"
        assert Bleu(translating("de").eval, "zh_Latn").scorer.tokenizer.signature() == "13a"

    @pytest.mark.parametrize(
        ("texts", "tokenize", "better"),
        [
            (["今天天气很好。", "OK"], "13a", "zh"),
            (["今天天气很好。"], "zh", None),
            (["きょうは天気がいい"], "zh", "ja-mecab"),
            (["วันนี้อากาศดี"], "intl", "char"),
            (["วันนี้อากาศดี"], "char", None),
            (["오늘 날씨가 좋다", "abc"], "13a", None),
            (["Heute ist 好 Wetter"], "13a", None),
            ([], "13a", None),
        ],
    )
    def test_scripts_that_a_tokenizer_does_not_split(self, texts, tokenize, better):
        assert unsplit(texts, tokenize) == better

    def test_references_that_the_tokenizer_does_not_split_are_reported(self, caplog):
        segments = [Segment("a", ("今天天气很好",))]
        TranslationEvaluator(translating("de"), None, Tokenizers(ByteTokenizer(), ByteTokenizer()), segments)
        assert "set eval.bleu_tokenize='zh', or data.target_language (now 'de')" in caplog.text

    def test_a_language_is_no_remedy_if_none_chooses_the_tokenizer(self, caplog):
        segments = [Segment("a", ("วันนี้อากาศดี",))]
        TranslationEvaluator(translating("th"), None, Tokenizers(ByteTokenizer(), ByteTokenizer()), segments)
        assert caplog.messages == [
            "BLEU's tokenizer 13a does not split the words of most references in 'th'; set eval.bleu_tokenize='char'"
        ]

    def test_a_configured_tokenizer_that_is_not_installed(self, monkeypatch):
        def bleu(**_):
            raise RuntimeError("\nMissing.\n\n    pip install sacrebleu[ja]\n")

        monkeypatch.setattr(sacrebleu, "BLEU", bleu)
        with pytest.raises(UserError, match=r"eval.bleu_tokenize='ja-mecab': Missing. pip install sacrebleu\[ja\]"):
            Bleu(translating("ja", bleu_tokenize="ja-mecab").eval, "ja")
