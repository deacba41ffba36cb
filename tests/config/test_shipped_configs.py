"""Every config in configs/ is valid in each of its variants, and the shapes of its parameters can be computed."""

import functools
import json
import shlex
from pathlib import Path

import jax
import pytest

from tests.helpers import rest_slow
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import config_file
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.models import registry

FOLDER = Path(__file__).resolve().parents[2] / "configs"


@functools.cache
def read_config(location: str, overrides: tuple[str, ...] = ()) -> Config:
    """Reads each config once for all tests."""
    return config_file.read_config(location, overrides)


VARIANTS = {
    "translate_cldr": ["", ":en-de", ":en-zh", ":en-fr", ":ar-ja", ":noisy"],
    "translate_multi30k": [
        "",
        ":fr-en",
        ":baseline",
        ":student",
        ":distilled",
        ":published",
        ":diversified",
        ":both_directions",
        ":bidirectional",
        ":vaswani2017_base",
        ":t5_v1_1_small",
    ],
    "translate_tatoeba_zh": ["", ":mixed"],
    "translate_gettext": ["", ":smoke"],
    "translate_debian": ["", ":zh_CN-en", ":smoke"],
    "classify_rt_polarity": ["", ":bag_of_words"],
    "classify_cldr": ["", ":sequence_classifier", ":bert_base"],
    "lm_stdlib": ["", ":gpt2", ":gemma3_1b"],
    "pretrain_stdlib": ["", ":span_corruption", ":denoising", ":bert_base_mlm", ":t5_small", ":bart_base"],
    "lm_tiny_shakespeare": ["", ":cpu", ":gpu", ":modern", ":modern_gpu"],
    "tutorials": [":gpt", ":basic_attention", ":classifier", ":imdb", ":rmsnorm", ":transformer", ":pre_norm"],
    "ladder": [":shakespeare:2017", ":shakespeare", ":multi30k"],
    "transfer": [":standard:64", ":mup:256"],
    **{name: [] for name in ("finetune_rt_polarity", "tune_chat")},  # they need a run
}
FILES = {path: VARIANTS.get(path.stem, [""]) for path in sorted(FOLDER.glob("*.py"))}
FIRST = [f"{path}{variants[0]}" for path, variants in FILES.items() if variants]
OTHERS = [f"{path}{variant}" for path, variants in FILES.items() for variant in variants[1:]]


def model_of(location: str):
    cfg = read_config(location)
    sizes = {"vocab_size": 300, "source_vocab_size": 300 if cfg.model.family == "seq2seq" else None}
    if cfg.model.family == "classifier":
        sizes["num_classes"] = 2
    return registry.build(ModelConfig(**{**vars(cfg.model), **sizes}))


@pytest.mark.parametrize("location", rest_slow({Path(each).name: each for each in FIRST + OTHERS}, len(FIRST)))
def test_parameters_have_shapes(location):
    model = model_of(location)
    params = jax.eval_shape(lambda: registry.init(model, jax.random.key(0)))
    assert jax.tree.leaves(params)


@pytest.mark.parametrize("location", OTHERS, ids=lambda location: Path(location).name)
def test_every_variant_is_valid(location):
    model_of(location)


@pytest.mark.parametrize("location", FIRST + OTHERS, ids=lambda location: Path(location).name)
def test_every_setting_has_an_effect(location):
    assert read_config(location).without_effect() == []


@pytest.mark.parametrize(
    "location",
    [
        *(
            "translate_cldr.py:german",
            "translate_tatoeba_zh.py:simplified",
            "translate_debian.py:de-fr",
            "translate_gettext.py:django",
            "lm_tiny_shakespeare.py:tpu",
            "tutorials.py:bert",
            "classify_rt_polarity.py:cnn",
        ),
        *("translate_multi30k.py:en-xx", "translate_multi30k.py:en-en", "translate_multi30k.py:gpt2"),
        *("pretrain_stdlib.py:noise", "pretrain_stdlib.py:gpt2", "lm_stdlib.py:t5_base", "classify_cldr.py:gpt2"),
    ],
)
def test_unknown_variants_are_named(location):
    with pytest.raises(UserError, match=f"^variant '{location.partition(':')[2]}' of configs/"):
        read_config(str(FOLDER / location))


def test_fine_tuning_keeps_the_architecture_of_a_run(tmp_path):
    location = f"{FOLDER / 'finetune_rt_polarity.py'}:{tmp_path}"
    with pytest.raises(UserError, match="^[^ ]*config.json does not exist: [^ ]* is not a run folder$"):
        read_config(location)
    sizes = {"dim": 8, "num_heads": 2, "token_types": 2, "num_classes": 2}
    encoder = ModelConfig(family="classifier", pooling="first", pooler=True, **sizes)
    config.save(Config(model=encoder, data=DataConfig(source="jsonl", train="a.jsonl")), tmp_path / "config.json")
    actual = read_config(location)
    changed = {name for name, value in vars(encoder).items() if getattr(actual.model, name) != value}
    assert changed == {"num_classes", "pooling", "pooler"}
    assert (actual.train.start_from, actual.data.tokenizer_file) == (str(tmp_path), str(tmp_path))


def test_fine_tuning_of_a_masked_language_model(tmp_path):
    encoder = ModelConfig(family="masked_lm", dim=8, num_heads=2, head_transform=True, output_bias=True)
    data = DataConfig(source="text", train="a", batching="windows", objective="masked_tokens")
    config.save(Config(model=encoder, data=data), tmp_path / "config.json")
    actual = read_config(f"{FOLDER / 'finetune_rt_polarity.py'}:{tmp_path}").model
    assert (actual.family, actual.dim, actual.head_transform, actual.output_bias) == ("classifier", 8, False, False)


def test_fine_tuning_needs_an_encoder(tmp_path):
    config.save(Config(data=DataConfig(source="tsv", train="a.tsv")), tmp_path / "config.json")
    with pytest.raises(UserError, match=" is a seq2seq: name the run of a classifier or a masked language model$"):
        read_config(f"{FOLDER / 'finetune_rt_polarity.py'}:{tmp_path}")


def test_every_config_shows_its_command():
    for path in FOLDER.glob("*.py"):
        assert f"python scripts/train.py --config configs/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.long
def test_recorded_results_are_those_of_the_present_configs():
    """By the number of steps, which most changes of a recipe change."""
    actual = 0
    for path in sorted((FOLDER / "results").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        _, *flags = shlex.split(record["command"])[1:]
        location = flags[flags.index("--config") + 1] if "--config" in flags else ""
        if not location or "finetune" in location:  # needs a run
            continue
        overrides = [flag for flag in flags if flag.startswith("--config.")]
        for run in record.get("runs", [record]):
            settings = [f"--config.{setting}" for setting in run.get("settings", []) if "seed=" not in setting]
            steps = read_config(str(FOLDER.parent / location), (*overrides, *settings)).train.steps
            assert steps == (record.get("common", {}) | run)["steps"], path.name
        actual += 1
    assert actual > 15
