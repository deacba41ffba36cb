"""Settings are declared once, validated when built, converted without loss, and clear about errors."""

import dataclasses
import json
import re

import pytest
from ml_collections import config_dict

from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    read_mesh,
)
from tformer_jax.config.fields import Section


def sections(kind: type[Section]) -> list[type[Section]]:
    return [kind, *(inner for section in kind.nested().values() for inner in sections(section))]


def test_every_setting_has_a_meaning():
    assert len(sections(Config)) == 16
    for section in sections(Config):
        for field in dataclasses.fields(section):
            assert field.name in section.nested() or field.metadata["meaning"]


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


def test_unset_settings_accept_values_of_their_type():
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
        ({"train": {"steps": 2**31}}, "train.steps=2147483648: must be at most 2147483647"),
        ({"model": {"dimm": 3}}, "unknown setting 'model.dimm'; did you mean 'model.dim'?"),
        ({"model": {"activation": "rellu"}}, "model.activation='rellu': is not a known value; did you mean 'relu'?"),
        ({"model": {"dim": "wide"}}, "model.dim='wide': must be int, not str"),
        ({"model": {"dim": 3.5}}, "model.dim=3.5: must be int, not float"),
        ({"data": {"bucket_lengths": [16, 32.5]}}, r"data.bucket_lengths=\(16, 32.5\): must hold int, not float"),
        ({"data": {"weights": ["a", "b"]}}, r"data.weights=\('a', 'b'\): must hold float, not str"),
        ({"data": {"train": [1]}}, r"data.train=\(1,\): must hold str, not int"),
        ({"model": {"dim": True}}, "model.dim=True: must be int, not bool"),
        ({"train": {"steps": 0}}, "train.steps=0: must be at least 1"),
        ({"name": ""}, "name='': must name a folder below runs, such as 'baseline'"),
        ({"name": "../runs"}, "name='../runs': must name a folder below runs"),
        ({"seed": 2**32}, "seed=4294967296: must be at most 4294967295"),
        ({"model": {"num_heads": 7}}, "model.num_heads=7: must divide model.dim=512, or set model.head_dim"),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads=3: must divide model.num_heads=8"),
        ({"model": {"dim": 9, "num_heads": 3}}, "model.dim=9: must be even for model.position='sinusoidal'"),
        ({"data": {"bucket_lengths": [32, 16]}}, r"data.bucket_lengths=\(32, 16\): must be lengths in ascending order"),
        ({"data": {"bucket_lengths": [512]}}, r"data.bucket_lengths=\(512,\): must not exceed model.max_length=256"),
        ({"model": {"attention": "basic", "num_heads": 1, "qk_norm": True}}, "model.qk_norm=True: is used only by"),
        ({"model": {"rotary_base": 5.0}}, "unknown setting 'model.rotary_base'; did you mean 'model.rotary.base'?"),
        ({"model": {"num_experts": 4}}, "unknown setting 'model.num_experts'; did you mean 'model.moe.num_experts'?"),
        ({"model": {"moe": {"num_expert": 4}}}, "'model.moe.num_expert'; did you mean 'model.moe.num_experts'?"),
        ({"model": {"moe": 4}}, "model.moe=4: must be MoEConfig, not int"),
        (
            {"model": {"ffn": "moe", "moe": {"num_experts": 1}}},
            "model.moe.experts_per_token=2: must be at most model.moe.num_experts=1",
        ),
        ({"model": {"norm_eps": 0.0}}, "model.norm_eps=0.0: must be at least 1e-12"),
        ({"data": {"source": "text", "train": "x"}}, "data.source='text': does not fit model.family='seq2seq'"),
        ({"data": {"source": "parallel_lines", "train": "x"}}, "must contain {lang}"),
        (
            {"data": {"source": "parallel_lines", "train": "x.{lang}", "validation": "y"}},
            r"data.validation=\('y',\): 'y' must contain {lang}",
        ),
        (
            {"data": {"batching": "packed", "window": 8, "source_window": 512}, "model": {"max_length": 256}},
            "data.source_window=512: must not exceed model.max_length=256",
        ),
        (
            {
                "model": {"family": "decoder_lm"},
                "data": {
                    "source": "stdlib_text",
                    "batching": "windows",
                    "target_tokenizer": "bytes",
                    "shared_vocab": False,
                },
            },
            "data.target_tokenizer='bytes': must be None for model.family='decoder_lm': set data.tokenizer",
        ),
        (
            {
                "model": {"family": "classifier"},
                "data": {"source": "tsv", "train": "a.tsv", "source_tokenizer": "bytes", "shared_vocab": False},
            },
            "data.source_tokenizer='bytes': must be None for model.family='classifier': set data.tokenizer",
        ),
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
            r"decode.stop=\('x', '\\n'\): '\\n' occurs in decode.prefix='a\\nb'",
        ),
        (
            {"decode": {"forbidden": "b", "prefix": "abc"}},
            r"decode.forbidden=\('b',\): 'b' occurs in decode.prefix='abc'",
        ),
        (
            {"model": {"tie_embeddings": "all"}, "data": {"shared_vocab": False}},
            "data.shared_vocab=False: must be True for model.tie_embeddings='all'",
        ),
        ({"data": {"tokenizer_file": "a.json"}}, "data.tokenizer_file='a.json': is used only by data.tokenizer='file'"),
        ({"data": {"tokenizer": "words", "split_digits": True}}, "data.split_digits=True: needs data.tokenizer='bpe'"),
        ({"data": {"dataset": "imdb_reviews"}}, "data.dataset='imdb_reviews': is used only by data.source='tfds'"),
        ({"optim": {"beta2": 1}}, "optim.beta2=1.0: must be below 1"),
        ({"optim": {"eps": 0}}, "optim.eps=0.0: must be above 0"),
        ({"model": {"ffn_dropout": 1}}, "model.ffn_dropout=1.0: must be below 1"),
        ({"train": {"ema_decay": 1}}, "train.ema_decay=1.0: must be below 1"),
        (
            {"train": {"lora_rank": 2, "start_from": "run"}, "optim": {"optimizer": "muon"}},
            "train.lora_rank=2: is not supported by optimizer 'muon': would use AdamW for all factors; write 0",
        ),
        ({"train": {"lora_rank": 2}}, "train.lora_rank=2: updates the weights of a trained run"),
        (
            {"train": {"weights": "average_last", "average": 2, "steps": 9, "checkpoint_every": 9}},
            "train.average=2: only 1 checkpoints in train.steps=9: decrease it or train.checkpoint_every",
        ),
        (
            {
                "optim": {"optimizer": "schedule_free_adamw", "schedule": "constant", "learning_rate": 1e-3},
                "train": {"weights": "ema", "ema_decay": 0.9},
            },
            "train.weights='ema': is not supported by optimizer 'schedule_free_adamw': evaluates its own average",
        ),
        (
            {
                "optim": {"optimizer": "schedule_free_adamw", "schedule": "constant", "learning_rate": 1e-3},
                "model": {"param_dtype": "bfloat16"},
            },
            "model.param_dtype='bfloat16': is not supported by optimizer 'schedule_free_adamw': computes its",
        ),
    ],
)
def test_invalid_settings_are_explained_in_one_sentence(values, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        Config.from_dict(values)
    assert "\n" not in str(caught.value)


def test_integers_become_floats_and_lists_become_tuples():
    cfg = Config.from_dict({"optim": {"learning_rate": 1}, "data": {"bucket_lengths": [8, 9]}})
    assert isinstance(cfg.optim.learning_rate, float)
    assert cfg.data.bucket_lengths == (8, 9)


def test_differences_are_named():
    changed = Config(seed=1, model=ModelConfig(dim=256))
    assert config.differences(Config(), changed) == ["seed: 0 -> 1", "model.dim: 512 -> 256"]
    assert config.differences(changed, changed) == []


WITHOUT_USE = {
    "optim.eps=1e-06: is used only by optim.optimizer='adamw' or": {"optimizer": "sgd", "eps": 1e-6},
    "optim.beta2=0.9: is used only by optim.optimizer='adamw' or": {"optimizer": "adafactor", "beta2": 0.9},
    "optim.muon_beta=0.9: is used only by optim.optimizer='muon', not 'lion'; leave it out, or write 0.95": {
        "optimizer": "lion",
        "muon_beta": 0.9,
    },
    "optim.decay_fraction=0.1: is used only by optim.schedule='warmup_stable_decay', not 'inverse_sqrt'": {
        "decay_fraction": 0.1
    },
}


@pytest.mark.parametrize("sentence", WITHOUT_USE)
def test_a_setting_that_the_optimizer_does_not_use_is_refused(sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        OptimConfig(**WITHOUT_USE[sentence])


@pytest.mark.parametrize(
    ("section", "unused"),
    [
        (DataConfig(batch_size=4), ["data.batch_size=4 has no effect with data.batching='buckets'"]),
        (DataConfig(batching="packed", batch_size=4, window=64, source_window=32), []),
        (
            DataConfig(batching="packed", batch_tokens=2048, window=64),
            ["data.batch_tokens=2048 has no effect with data.batching='packed'"],
        ),
        (
            DataConfig(tokenizer="bytes", vocab_size=99),
            ["data.vocab_size=99 has no effect with data.tokenizer='bytes'"],
        ),
        (DataConfig(tokenizer="bytes", target_tokenizer="bpe", vocab_size=99, shared_vocab=False), []),
        (DecodeConfig(beams=8), ["decode.beams=8 has no effect with decode.strategy='greedy'"]),
        (DecodeConfig(strategy="beam", beams=8), []),
        (DecodeConfig(strategy="beam", top_k=9), ["decode.top_k=9 has no effect with decode.strategy='beam'"]),
    ],
)
def test_settings_that_another_one_makes_useless_are_named(section, unused):
    assert Config(**{section.path: section}).without_effect() == unused


@pytest.mark.parametrize(
    ("train", "unused"),
    [
        ({"ema_decay": 0.9}, ["train.ema_decay=0.9 has no effect with train.weights='last'"]),
        ({"ema_decay": 0.9, "weights": "ema"}, []),
        ({"average": 3}, ["train.average=3 has no effect with train.weights='last'"]),
        ({"average": 2, "weights": "average_last"}, []),
        (
            {"patience": 2, "eval_every": 5, "steps": 10},
            ["train.patience=2 has no effect with train.eval_every=5 and train.steps=10"],
        ),
        ({"patience": 2, "eval_every": 5, "steps": 11}, []),
        (
            {"teacher": "run", "teacher_weight": 1.0, "label_smoothing": 0.1},
            ["train.label_smoothing=0.1 has no effect with train.teacher_weight=1.0"],
        ),
    ],
)
def test_settings_of_training_that_are_not_used_are_named(train, unused):
    sections = {"optim": OptimConfig(warmup_steps=1), "data": DataConfig(source="cldr_translation")}
    assert Config(train=TrainConfig(**train), **sections).without_effect() == unused


@pytest.mark.parametrize(
    ("schedule", "steps", "unused"),
    [("cosine", 20, ""), ("cosine", 10, "schedule"), ("inverse_sqrt", 10, ""), ("inverse_sqrt", 9, "warmup_steps")],
)
def test_a_warm_up_that_leaves_no_steps_is_named(schedule, steps, unused):
    optim = OptimConfig(schedule=schedule, learning_rate=1e-3, warmup_steps=10)
    actual = Config(optim=optim, train=TrainConfig(steps=steps), data=DataConfig(source="cldr_translation"))
    assert [sentence.split("=")[0] for sentence in actual.without_effect()] == [f"optim.{unused}"] * bool(unused)


@pytest.mark.parametrize(
    ("model", "unused"),
    [
        ({"scan_layers": True, "decoder_layers": 2}, []),
        (
            {"scan_layers": True, "decoder_layers": 1},
            ["model.scan_layers=True has no effect, because no stack repeats"],
        ),
        ({"scan_layers": True, "decoder_layers": 3, "window": 4, "layer_pattern": ("window", "full")}, ["model.scan"]),
        ({"ffn": "moe", "moe": {"experts_per_token": 1}}, ["model.moe.router_normalize=True with model.moe.experts"]),
        ({"ffn": "moe", "moe": {"experts_per_token": 1, "router_normalize": False}}, []),
        ({"ffn": "moe", "moe": {"experts_per_token": 1, "num_experts": 1}}, []),
    ],
)
def test_choices_of_the_architecture_without_effect_are_named(model, unused):
    data = DataConfig(source="stdlib_text", batching="windows")
    actual = Config(model=ModelConfig(family="decoder_lm", **model), data=data).without_effect()
    assert len(actual) == len(unused) and all(map(str.startswith, actual, unused))


def test_only_translation_has_two_vocabularies():
    data = DataConfig(source="stdlib_text", batching="windows", shared_vocab=False)
    unused = Config(model=ModelConfig(family="decoder_lm"), data=data).without_effect()
    assert unused == ["data.shared_vocab=False has no effect without translation"]


TABLE = {"source": "tsv", "train": "a", "validation": "b"}
OBJECTIVE = {"data": {"source": "stdlib_text", "batching": "windows", "objective": "masked_tokens"}}


@pytest.mark.parametrize(
    ("values", "unused"),
    [
        ({"optim": {"decayed": ["*kernel"]}}, "optim.decayed=('*kernel',) has no effect with optim.weight_decay=0.0"),
        (
            {"model": {"family": "masked_lm"}, **OBJECTIVE, "decode": {"prefix": "a"}},
            "decode.prefix='a' has no effect with data.objective='masked_tokens'",
        ),
        (
            {"model": {"family": "masked_lm"}, **OBJECTIVE, "eval": {"samples": 1}},
            "eval.samples=1 has no effect with data.objective='masked_tokens'",
        ),
        (
            {"model": {"family": "classifier"}, "data": {"source": "cldr_language", "target_language": "fr"}},
            "data.target_language='fr' has no effect without translation",
        ),
        (
            {
                "model": {"family": "classifier"},
                "data": {"source": "cldr_language", "normalize": ("moses",), "source_language": "de"}
                | {"target_language": "fr"},
            },
            "data.target_language='fr' has no effect without translation",
        ),
        (
            {"model": {"family": "classifier"}, "data": {**TABLE, "filters": {"identical_sides": True}}},
            "data.filters.identical_sides=True has no effect without translation",
        ),
        (
            {"model": {"family": "classifier"}, "data": {**TABLE, "filters": {"max_length_ratio": 3.0}}},
            "data.filters.max_length_ratio=3.0 has no effect without translation",
        ),
    ],
)
def test_settings_that_other_sections_leave_without_effect(values, unused):
    assert Config.from_dict(values).without_effect() == [unused]


@pytest.mark.parametrize(("preset", "axis"), [("fsdp", "data"), ("zero1", "fsdp")])
def test_only_one_axis_takes_the_remaining_devices(preset, axis):
    with pytest.raises(ConfigError, match=f"parallel.preset='{preset}': gives .* and so does parallel.{axis}=-1"):
        ParallelConfig(preset=preset, **{axis: -1})
    assert ParallelConfig(**{axis: -1}).sizes[axis] == -1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not exist"),
        ("{", "is not a saved config"),
        ("3", "is not a saved config"),
        ('{"decode": []}', r"was written by another version \(decode=\[\]: must be DecodeConfig"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, problem):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"config.json {problem}"):
        config.load(path)


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        ("tenser=2", "mesh 'tenser=2': 'tenser' is not an axis of the mesh; did you mean 'tensor'?"),
        ("fsdpp", "mesh 'fsdpp': 'fsdpp' is neither AXIS=SIZE nor a preset; did you mean 'fsdp'?"),
        ("tensor=0", "mesh 'tensor=0': tensor must be at least 1, or -1 for all remaining devices, such as tensor=8"),
        ("dp,data=1,data=2", "mesh 'dp,data=1,data=2': data is written twice; write each axis once"),
    ],
)
def test_invalid_meshes(mesh, sentence):
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
    with pytest.raises(UserError, match=r"unknown setting 'model.old'.*; use the version that .*provenance.json names"):
        config.load(path)


def test_a_setting_has_no_settings_below():
    with pytest.raises(ConfigError, match="unknown setting 'train.steps.x'; did you mean 'train.steps'?"):
        Config.check_name("train.steps.x")
    with pytest.raises(ConfigError, match="unknown setting 'model.rotary.base.x'; did you mean 'model.rotary.base'?"):
        Config.check_name("model.rotary.base.x")
