"""Settings of data that contradict each other are explained when the config is built."""

import pytest

from tformer_jax.config import Config, ConfigError, DataConfig

LM = {"family": "decoder_lm"}
LINES = {"source": "lines", "train": "x", "batching": "packed"}
BLEU = {"bleu_tokenize": "zh"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"data": {"source": "lines", "train": "x", "batching": "windows", "transforms": ["case"]}},
            "data.transforms=.*: must be \\(\\) for data.batching='windows', which tokenizes texts only once",
        ),
        ({"data": {"source": "tsv", "train": "x", "validation_fraction": 1}}, "fraction=1.0: must be below 1"),
        ({"data": {"source": "tsv", "train": "x", "validation_fraction": 0}}, "fraction=0.0: must be above 0"),
        (
            {"data": {"validation": ["a.tsv"]}},
            r"data.validation=\('a.tsv',\): is used only by data.source='parallel_lines' or .*, not 'cldr_",
        ),
        ({"data": {"weights": [1.0]}}, r"data.weights=\(1.0,\): is used only by data.source="),
        (
            {"data": {"source": "parallel_lines", "train": "x.{lang}", "fields": ["1", "2"]}},
            r"data.fields=\('1', '2'\): is used only by data.source='tsv' or .*, not 'parallel_lines'; leave it out",
        ),
        (
            {"data": {"source": "text", "train": "x", "batching": "windows", "objective": "denoising", "window": 2}},
            "data.window=2: must be at least 3 for data.objective='denoising'",
        ),
        (
            {"data": {"source": "cldr_language", "languages": []}, "model": {"family": "classifier"}},
            r"data.languages=\(\): must name the CLDR locales to tell apart, such as \('en', 'de'\)",
        ),
        (
            {"data": {"languages": ["en", "de"]}},
            r"data.languages=\('en', 'de'\): is used only by data.source='cldr_language' or 'prepared', not 'cldr_t",
        ),
        ({"data": {"validation_fraction": 0.2}}, "data.validation_fraction=0.2: is used only by data.source="),
        (
            {"data": {"source": "tsv", "train": "x", "validation": "y", "validation_fraction": 0.2}},
            r"data.validation_fraction=0.2: is used only if data.validation is \(\); write 0.1",
        ),
        (
            {"data": {"source": "text", "train": "x", "batching": "windows", "heldout_examples": 9}, "model": LM},
            "data.heldout_examples=9: is used only by data.source='cldr_translation' or",
        ),
        (
            {"data": {"batching": "packed", "long_documents": "truncate"}},
            "data.long_documents='truncate': is used only by language models, not model.family='seq2seq'; write "
            "'split'",
        ),
        (
            {"data": {**LINES, "source_window": 8}, "model": LM},
            "data.source_window=8: must be None for model.family='decoder_lm': set data.window",
        ),
        (
            {"data": LINES, "model": LM, "eval": BLEU},
            "eval.bleu_tokenize='zh': must be None for model.family='decoder_lm', which has no BLEU",
        ),
        (
            {"data": {**LINES, "normalize": ["nfkc"]}, "model": LM, "eval": {"references": "normalized"}},
            "eval.references='normalized': must be 'raw' for model.family='decoder_lm'",
        ),
        (
            {"data": {"normalize": ["nfkc,lowercase"]}},
            r"data.normalize=.*: is not a known value; separate values are written \('nfkc', 'lowercase'\)",
        ),
    ],
)
def test_invalid_settings_are_explained_in_one_sentence(values, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        Config.from_dict(values)
    assert "\n" not in str(caught.value)


def test_a_target_language_that_has_its_default_is_said():
    told = "data.target_language='de' decides for BLEU and Moses' rules: change it if"
    unnamed = DataConfig(source="tsv", train="a.tsv", normalize=("moses",))
    assert any(sentence.startswith(told) for sentence in Config(data=unnamed).without_effect())
    for data in (DataConfig(source="tsv", train="a.tsv", target_language="fr"), DataConfig()):
        assert not any("target_language" in sentence for sentence in Config(data=data).without_effect())
