"""Settings are declared once, validated when built, converted without loss, and clear about errors."""

import dataclasses
import json
import re

import pytest
from ml_collections import config_dict

from tformer_jax import config
from tformer_jax.config import Config, ConfigError, DataConfig, ModelConfig, OptimConfig, read_mesh


def sections(cfg: Config) -> list:
    return [cfg, *(value for value in vars(cfg).values() if dataclasses.is_dataclass(value))]


def test_every_setting_has_a_meaning():
    for section in sections(Config()):
        for field in dataclasses.fields(section):
            assert dataclasses.is_dataclass(field.type) or "meaning" in field.metadata or field.default_factory


def test_round_trip_through_a_config_dict():
    cfg = Config(seed=3, model=ModelConfig(num_kv_heads=2), data=DataConfig(bucket_lengths=(8, 16)))
    assert config.from_config_dict(config.to_config_dict(cfg)) == cfg


def test_round_trip_through_json(tmp_path):
    cfg = Config(name="größe", optim=OptimConfig(learning_rate=1e-3))
    config.save(cfg, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == cfg
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["learning_rate"] == 1e-3


def test_a_config_dict_refuses_new_keys():
    values = config.to_config_dict(Config())
    with pytest.raises(AttributeError):
        values.model.dimension = 3


def test_unset_settings_take_values_of_their_type():
    values = config.to_config_dict(Config())
    values.model.head_dim = 16
    values.optim.learning_rate = 1e-3
    cfg = config.from_config_dict(values)
    assert (cfg.model.head_size, cfg.optim.learning_rate) == (16, 1e-3)
    with pytest.raises(TypeError):
        values.model.head_dim = "sixteen"
    assert isinstance(config.to_config_dict(Config()), config_dict.ConfigDict)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"modle": {}}, "unknown setting 'modle'; did you mean 'model'?"),
        ({"model": {"dimm": 3}}, "unknown setting 'model.dimm'; did you mean 'dim'?"),
        ({"model": {"activation": "rellu"}}, "model.activation='rellu': is not a known value; did you mean 'relu'?"),
        ({"model": {"dim": "wide"}}, "model.dim='wide': must be int, not str"),
        ({"model": {"dim": 3.5}}, "model.dim=3.5: must be int, not float"),
        ({"model": {"dim": True}}, "model.dim=True: must be int, not bool"),
        ({"train": {"steps": 0}}, "train.steps=0: must be at least 1"),
        ({"model": {"num_heads": 7}}, "model.num_heads=7: must divide model.dim=512, or set model.head_dim"),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads=3: must divide model.num_heads=8"),
        ({"model": {"dim": 9, "num_heads": 3}}, "model.dim=9: must be even for model.position='sinusoidal'"),
        ({"data": {"bucket_lengths": [32, 16]}}, r"data.bucket_lengths=\(32, 16\): must be lengths in rising order"),
        ({"data": {"bucket_lengths": [512]}}, r"data.bucket_lengths=\(512,\): must not exceed model.max_length=256"),
        ({"model": {"attention": "basic", "num_heads": 1, "qk_norm": True}}, "model.qk_norm=True: is not applied by"),
        ({"model": {"ffn": "moe", "ffn_dropout": 0.1}}, "model.ffn_dropout=0.1: is not applied to experts; write 0.0"),
        ({"model": {"norm_eps": 0.0}}, "model.norm_eps=0.0: must be at least 1e-12"),
        ({"data": {"source": "text", "train": "x"}}, "data.source='text': does not fit model.family='seq2seq'"),
        ({"data": {"source": "parallel_lines", "train": "x"}}, "must contain {lang}"),
        ({"data": {"source": "tsv"}}, r"data.train=\(\): must say what data.source='tsv' reads"),
        ({"optim": {"schedule": "cosine"}}, "optim.learning_rate=None: must be a number"),
        ({"parallel": {"data": 0}}, "parallel.data=0: must be -1 or at least 1"),
        ({"decode": {"min_p": 1.5}}, "decode.min_p=1.5: must be at most 1.0"),
        ({"decode": {"repetition_penalty": 0}}, "decode.repetition_penalty=0.0: must be at least 0.01"),
        ({"decode": {"no_repeat_ngram": -1}}, "decode.no_repeat_ngram=-1: must be at least 0"),
        (
            {"decode": {"min_new_tokens": 9, "max_new_tokens": 8}},
            "decode.min_new_tokens=9: must not exceed decode.max_new_tokens=8",
        ),
        ({"decode": {"forbidden": ["a", ""]}}, r"decode.forbidden=\('a', ''\): must not contain an empty text"),
        ({"decode": {"stop": ""}}, r"decode.stop=\('',\): must not contain an empty text"),
        (
            {"decode": {"stop": ["x", "\n"], "prefix": "a\nb"}},
            r"decode.stop=\('x', '\\n'\): '\\n' stands in decode.prefix='a\\nb'",
        ),
        (
            {"decode": {"forbidden": "b", "prefix": "abc"}},
            r"decode.forbidden=\('b',\): 'b' stands in decode.prefix='abc'",
        ),
        (
            {"model": {"tie_embeddings": "all"}, "data": {"shared_vocab": False}},
            "data.shared_vocab=False: must be True for model.tie_embeddings='all'",
        ),
    ],
)
def test_mistakes_get_one_sentence(values, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        config.from_dict(values)
    assert "\n" not in str(caught.value)


def test_whole_numbers_serve_as_floats_and_lists_as_tuples():
    cfg = config.from_dict({"optim": {"learning_rate": 1}, "data": {"bucket_lengths": [8, 9]}})
    assert isinstance(cfg.optim.learning_rate, float)
    assert cfg.data.bucket_lengths == (8, 9)


def test_differences_are_named():
    changed = Config(seed=1, model=ModelConfig(dim=256))
    assert config.differences(Config(), changed) == ["seed: 0 -> 1", "model.dim: 512 -> 256"]
    assert config.differences(changed, changed) == []


@pytest.mark.parametrize(("content", "problem"), [(None, "does not exist"), ("{", "is not a saved config")])
def test_damaged_files_are_named(tmp_path, content, problem):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"config.json {problem}"):
        config.load(path)


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        ("tenser=2", "--mesh tenser=2: 'tenser' is not an axis of the mesh; did you mean 'tensor'?"),
        ("fsdpp", "--mesh fsdpp: 'fsdpp' is neither AXIS=SIZE nor a preset; did you mean 'fsdp'?"),
        ("tensor=0", "--mesh tensor=0: tensor needs a size from 1 on, such as tensor=8"),
    ],
)
def test_a_mesh_that_cannot_be_read(mesh, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_mesh(mesh)


def test_settings_of_an_older_version(tmp_path, caplog):
    path, cfg = tmp_path / "config.json", Config(model=ModelConfig(), data=DataConfig(source="cldr_translation"))
    config.save(cfg, path)
    saved = json.loads(path.read_text())
    saved["decode"]["draft_tokens"] = 4
    path.write_text(json.dumps(saved))
    assert config.load(path) == cfg
    assert caplog.messages == [f"{path}: ignored settings that this version does not have: decode.draft_tokens"]
    saved["model"]["old"] = 1
    path.write_text(json.dumps(saved))
    with pytest.raises(
        ConfigError, match=r"unknown setting 'model.old'.*; use the version that .*provenance.json names"
    ):
        config.load(path)
