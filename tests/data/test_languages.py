"""Codes of languages."""

import pytest

from tformer_jax.data.languages import describe_unknown, english_name, read_language


@pytest.mark.parametrize(
    ("name", "code", "script", "written"),
    [
        ("de", "de", "Latn", "de"),
        ("deu", "de", "Latn", "de"),
        ("ger", "de", "Latn", "de"),
        ("German", "de", "Latn", "de"),
        ("zho_Hans", "zh", "Hans", "zh_Hans"),
        ("zh-TW", "zh", "Hant", "zh_TW"),
        ("cmn", "zh", "Hans", "zh"),
        ("yue_Hant", "yue", "Hant", "yue_Hant"),
        ("jpn_Jpan", "ja", "Jpan", "ja_Jpan"),
        ("kor_Hang", "ko", "Hang", "ko_Hang"),
        ("kor", "ko", "Kore", "ko"),
        ("fre", "fr", "Latn", "fr"),
        ("ces", "cs", "Latn", "cs"),
        ("PT_br", "pt", "Latn", "pt_BR"),
        ("es_419", "es", "Latn", "es_419"),
        ("zsm_Latn", "ms", "Latn", "ms_Latn"),
        ("acm_Arab", "acm", "Arab", "acm_Arab"),
        ("sh", "sr", "Latn", "sr_Latn"),
        ("sr@latin", "sr", "Latn", "sr_Latn"),
        ("sr_RS@latin", "sr", "Latn", "sr_Latn_RS"),
        ("uz@Cyrillic", "uz", "Cyrl", "uz_Cyrl"),
        ("prs_Arab", "fa", "Arab", "fa_Arab_AF"),
        ("pes_Arab", "fa", "Arab", "fa_Arab"),
        ("no", "nb", "Latn", "nb"),
        ("nor", "nb", "Latn", "nb"),
        ("Norwegian", "nb", "Latn", "nb"),
        ("nob_Latn", "nb", "Latn", "nb_Latn"),
        ("nno_Latn", "nn", "Latn", "nn_Latn"),
    ],
)
def test_codes_of_different_standards(name, code, script, written):
    language = read_language(name)
    assert (language.code, language.script, language.written) == (code, script, written)


@pytest.mark.parametrize("name", ["src", "tgt", "trg", "a", "source", "x-y-z", "ca@valencia", "@latin", ""])
def test_other_names_are_no_languages(name):
    assert read_language(name) is None


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("de", "German"),
        ("deu_Latn", "German (Latin)"),
        ("pt_BR", "Portuguese (Brazil)"),
        ("zh_Hant_TW", "Chinese (Traditional, Taiwan)"),
        ("xx", "xx"),
    ],
)
def test_names_in_english(code, name):
    assert english_name(code) == name


@pytest.mark.parametrize("code", ["de", "pt_BR", "zh_Hans", "zh_Hant_TW", "sr_Latn", "es_419", "he"])
def test_names_in_english_are_read(code):
    """Regression test: a name with a region or a script, as the server lists it, was refused."""
    assert read_language(english_name(code)).written == code
    assert read_language(f"{english_name(code)} (Nowhere)") is None


def test_codes_that_no_standard_names():
    assert describe_unknown(["de", "ca@valencia", "pt_BR"]) == ""
    unknown = ["germna", "xx", "a", "b", "c", "d"]
    expected = "no standard names the languages 'germna', 'xx', 'a', 'b', 'c' and 1 more"
    assert describe_unknown(["de", *unknown]) == expected
