"""The languages of vocabularies, as published models write their tags."""

import dataclasses

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.data.tags import tag_ids
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.language_tags import find_language, languages_of
from tformer_jax.special_tokens import SpecialTokens


def vocabulary(*names: str) -> Tokenizer:
    """Returns a tokenizer with these special tokens, from id 4 on."""
    tokenizer = Tokenizer()
    tokenizer.special = SpecialTokens(names=((0, "<pad>"), *enumerate(names, 4)))
    return tokenizer


FORMATS = {
    "own": ("<2de>", "<2zh>", "<2pt_BR>"),
    "MADLAD-400": ("<2de>", "<2zh>", "<2zh_Hant>", "<2pt>"),
    "M2M-100": ("__de__", "__zh__", "__ast__"),
    "mBART": ("de_DE", "en_XX", "zh_CN", "<mask>"),
    "NLLB": ("deu_Latn", "eng_Latn", "srp_Cyrl", "zho_Hans", "zho_Hant", "pes_Arab", "prs_Arab", "nob_Latn", "<mask>"),
    "Marian": (">>deu<<", ">>cmn_Hans<<", ">>pt_br<<", "<unk>"),
}
MEANT = [
    ("own", "German", "de"),
    ("own", "pt", "pt_BR"),
    ("MADLAD-400", "Chinese", "zh"),
    ("MADLAD-400", "zho_Hant", "zh_Hant"),
    ("M2M-100", "deu_Latn", "de"),
    ("M2M-100", "ast", "ast"),
    ("mBART", "de", "de_DE"),
    ("mBART", "English", "en_XX"),
    ("mBART", "zh", "zh_CN"),
    ("NLLB", "de", "deu_Latn"),
    ("NLLB", "German", "deu_Latn"),
    ("NLLB", "sr", "srp_Cyrl"),
    ("NLLB", "zh_Hant", "zho_Hant"),
    ("NLLB", "pes_Arab", "pes_Arab"),
    ("NLLB", "no", "nob_Latn"),
    ("Marian", "German", "deu"),
    ("Marian", "zh", "cmn_Hans"),
    ("Marian", "pt-BR", "pt_br"),
]


@pytest.mark.parametrize("case", MEANT, ids=" ".join)
def test_a_language_may_be_named_by_any_code_or_in_english(case):
    kind, name, meant = case
    assert find_language(vocabulary(*FORMATS[kind]), name) == meant


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("NLLB", "zh", "the model has the language 'zh' as 'zho_Hans' and 'zho_Hant': name one of them"),
        ("NLLB", "Chinese", "the model has the language 'Chinese' as 'zho_Hans' and 'zho_Hant': name one of them"),
        ("NLLB", "fa", "the model has the language 'fa' as 'pes_Arab' and 'prs_Arab': name one of them"),
        ("NLLB", "sr_Latn", "the model has no language 'sr_Latn'; did you mean 'srp_Cyrl'?"),
        ("MADLAD-400", "pt_BR", "the model has no language 'pt_BR'; did you mean 'pt'?"),
        ("mBART", "Klingon", "the model has no language 'Klingon'; it has de_DE, en_XX, zh_CN"),
    ],
)
def test_a_name_that_means_none_or_several_is_one_sentence(kind, name, sentence):
    with pytest.raises(UserError) as error:
        find_language(vocabulary(*FORMATS[kind]), name)
    assert str(error.value).startswith(sentence)


def test_other_special_tokens_are_no_languages():
    names = "<s>", "</s>", "<extra_id_0>", "<mask>", "[CLS]", "<|endoftext|>", "__media__", "pad_id"
    assert languages_of(vocabulary(*names)) == {}


def test_tags_are_placed_before_or_after_a_text():
    """As fairseq places them: of M2M-100 around `start`, of mBART instead of it."""
    tokenizer = vocabulary(*FORMATS["NLLB"])
    data = DataConfig(
        source="jsonl",
        train=("a",),
        validation=("b",),
        language_fields=("1", "2"),
        source_tags=("source",),
        target_tags=("target",),
    )
    assert (actual := tag_ids(data, Tokenizers(tokenizer, tokenizer), Direction("en", "de"))) == ((5,), (4,))
    special = tokenizer.special
    assert special.wrap_side([7, 8], actual[0]) == [5, 7, 8, special.eos[0]]
    assert special.start_target(actual[1]) == (special.start, (4,))
    last = dataclasses.replace(special, tags_last=True)
    assert last.wrap_side([7, 8], actual[0]) == [7, 8, special.eos[0], 5]
    assert last.start_target(actual[1]) == (4, ())
    assert last.start_target(()) == (special.start, ())
