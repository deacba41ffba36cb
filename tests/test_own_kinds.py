"""Kinds that are not part of the package: `tests/outside` has one file each, the first of which the README shows."""

import dataclasses
import importlib
import json
import random
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tformer_jax as tj
from tests.helpers import apply, assert_close, build, tiny
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate, generate, train
from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, kinds
from tformer_jax.config.metrics import lower_is_better
from tformer_jax.data.transforms.texts import TextTransform
from tformer_jax.tasks.task import Task
from tformer_jax.tasks.token_prediction import TokenPrediction

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ROOT / "tests" / "outside"
MODULES = {
    "gated_heads": (kinds.ATTENTIONS, "gated_heads"),
    "scale_norm": (kinds.NORMS, "scalenorm"),
    "signum": (kinds.OPTIMIZERS, "signum"),
}
REGISTERED = {**MODULES, "tagging": (kinds.TASKS, "tagging")}
TOKENS = np.array([[5, 6, 7, 8]], np.int32)
CONFIG = """
from tformer_jax.config import (
    Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, to_config_dict
)

def get_config():
    sizes = {"dim": 8, "decoder_layers": 1, "num_heads": 2, "ffn_dim": 8, "max_length": 16, "dropout": 0.0}
    cfg = Config(
        model=ModelConfig(family="decoder_lm", **sizes),
        data=DataConfig(
            source="text", train="text.txt", tokenizer="characters", batching="windows", window=8, batch_size=2
        ),
        optim=OptimConfig(schedule="constant", learning_rate=1e-2, warmup_steps=1),
        train=TrainConfig(steps=3, log_every=1),
        parallel=ParallelConfig(data=1),
        eval=EvalConfig(batch_size=4, samples=0),
    )
    return to_config_dict(cfg)
"""


def forget() -> None:
    """Removes the modules of `tests/outside` and their kinds, as in a new process."""
    for module, (registry, name) in REGISTERED.items():
        sys.modules.pop(module, None)
        registry.pop(name, None)


@pytest.fixture
def outside(monkeypatch):
    """Makes the modules importable during one test."""
    monkeypatch.syspath_prepend(OUTSIDE)
    yield
    forget()


@pytest.fixture(scope="module")
def own_run(tmp_path_factory) -> Path:
    """A run with three kinds of other code, trained by the command."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(CONFIG)
    (folder / "text.txt").write_text("abc bca cabb ac bb cc aabb b ca acab " * 5)
    chosen = ("model.attention=gated_heads", "model.norm=scalenorm", "optim.optimizer=signum")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(OUTSIDE)
        flags = [f"--import={module}" for module in MODULES] + [f"--config.{setting}" for setting in chosen]
        train.main(["--config", f"{folder}/own.py", "--run", f"{folder}/run", "--data", str(folder), *flags])
    forget()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.usefixtures("outside")
def test_a_run_with_kinds_of_other_code_is_opened_by_its_imports(own_run):
    """Its attention decodes with a cache as in one pass."""
    run = tj.load(own_run)
    assert run.config.imports == tuple(MODULES)
    assert run.params["decoder"]["layers_0"]["self_attention"]["gate"]["kernel"].shape == (8, 2)
    assert len(run.generate(["ab"], max_new_tokens=3)) == 1
    tokens = np.array([[4, 5, 6, 7]], np.int32)
    full, cache = apply(run.model, run.params, tokens), run.model.apply({}, 1, 4, method="init_cache")
    decode_step = jax.jit(
        lambda token, cache: run.model.apply({"params": run.params}, token, cache, method="decode_step")
    )
    for position in range(4):
        step, cache = decode_step(tokens[:, position : position + 1], cache)
        assert_close(step, full[:, position : position + 1], 1e-5)


@pytest.mark.long
def test_a_run_whose_imports_are_missing_says_what_to_write(own_run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="module 'gated_heads', which registers kinds, is not in the current folder"):
        tj.load(own_run)
    settings = json.loads((own_run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"imports": []}))
    sentence = "config.json: model.attention='gated_heads': is not a known value; .*--import MODULE registers others"
    with pytest.raises(UserError, match=sentence) as caught:
        config.load(tmp_path / "config.json")
    assert "another version" not in str(caught.value)


@pytest.mark.long
@pytest.mark.usefixtures("outside")
def test_commands_import_the_modules_that_they_are_given(own_run, tmp_path, capsys):
    for path in own_run.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    settings = json.loads((own_run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"imports": []}))
    with pytest.raises(UserError, match="--import MODULE registers others"):
        evaluate.main(["--run", str(tmp_path), "--data", str(own_run.parent)])
    flags = [f"--import={module}" for module in MODULES]
    evaluate.main(["--run", str(tmp_path), "--data", str(own_run.parent), *flags])
    assert "perplexity" in capsys.readouterr().out
    forget()
    (tmp_path / "prompts").write_text("ab\n")
    generate.main(["--run", str(tmp_path), "--input", f"{tmp_path}/prompts", *flags])
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.usefixtures("outside")
def test_a_kind_that_no_module_gives_is_not_trained(tmp_path):
    """A config file may register a kind, but other commands could not open the run."""
    register = "from tformer_jax.config import kinds\nkinds.NORMS['scalenorm'] = object()\n"
    (tmp_path / "own.py").write_text(register + CONFIG)
    with pytest.raises(UserError, match=r"model.norm='scalenorm': no module is recorded .*; write --import MODULE, or"):
        train.main(["--config", f"{tmp_path}/own.py", "--config.model.norm=scalenorm"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "module 'own_kind', which registers kinds, is not in the current folder or on Python's path"),
        (
            "import no_such_module",
            "module 'own_kind' cannot be imported: ModuleNotFoundError: No module named",
        ),
        ("1 / 0", "module 'own_kind' cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported(text, sentence, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    if text is not None:
        (tmp_path / "own_kind.py").write_text(text)
    with pytest.raises(UserError, match=sentence) as caught:
        kinds.import_modules(["own_kind"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", ["no_such_module:Thing", "json:Nope"])
def test_a_name_that_stands_for_no_object(entry, monkeypatch):
    monkeypatch.setitem(kinds.NORMS, "own", entry)
    with pytest.raises(UserError, match=f"'{entry}', registered as 'own', cannot be imported: "):
        tiny("decoder_lm", norm="own")


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"examples": ("source", "target")}, r"has examples = \('source', 'target'\): write a tuple of tuples of keys"),
        ({"settings": "qk_norm"}, "kind 'own' has settings = 'qk_norm': write a tuple of names of settings"),
        (
            {"limits": kinds.Limit("model.window", (None,), "no")},
            r"has limits = Limit\(.*: write a tuple of kinds.Limit",
        ),
    ],
)
def test_what_a_kind_declares_is_a_tuple(declared, sentence):
    """Regression test: parts of the text were taken for settings, and the parts of one limit for limits."""
    with pytest.raises(UserError, match=sentence):
        kinds.NORMS["own"] = type("Own", (), declared)
    assert "own" not in kinds.NORMS


@pytest.mark.parametrize("kind", [type("Own", (), {}), lambda positions: positions])
def test_a_position_derives_from_a_base(kind, monkeypatch):
    """Regression test: another class was used as no positions, in silence."""
    monkeypatch.setitem(kinds.POSITIONS, "own", kind)
    with pytest.raises(UserError, match="model.position='own': is <.*, not a class derived from EmbeddingPositions or"):
        build(tiny("decoder_lm", position="own"))


def test_a_changed_text_is_a_text(monkeypatch):
    """A forgotten `return` is told where it is."""
    own = dataclasses.make_dataclass("Own", [], bases=(TextTransform,), frozen=True)
    own.change_text = lambda self, text, rng: None
    monkeypatch.setitem(kinds.TRANSFORMS, "own", own)
    (transform,) = DataConfig(source="tsv", train="a", transforms=({"kind": "own"},)).transforms
    with pytest.raises(UserError, match="transform 'own': change_text returned None: return a text"):
        transform._change_around(None, "a text", random.Random(0))


@pytest.mark.usefixtures("outside")
def test_a_name_stands_for_one_kind():
    """Regression test: a second class of a name replaced the first, even one of the package, in silence."""
    kinds.import_modules(["scale_norm", "tagging"])
    where = re.escape(str(OUTSIDE / "scale_norm.py:ScaleNorm"))
    with pytest.raises(UserError, match=f"'scalenorm' is registered already, as {where}: register yours under another"):
        kinds.NORMS["scalenorm"] = type("Other", (kinds.NORMS["scalenorm"],), {})
    with pytest.raises(UserError, match=r"'layernorm' is registered already, as .*norms.py:LayerNorm: register yours"):
        kinds.NORMS["layernorm"] = kinds.NORMS["scalenorm"]
    with pytest.raises(UserError, match="'tagging' is registered already"):
        kinds.TASKS["tagging"] = type("Other", (Task,), {})()
    with pytest.raises(UserError, match="'layernorm' is registered already"):
        kinds.NORMS.update(layernorm=kinds.NORMS["scalenorm"])


@pytest.mark.usefixtures("outside")
def test_the_same_kind_is_registered_again(monkeypatch):
    """A reloaded module, a cell that runs again, and a script that its own `imports` import again."""
    kinds.import_modules(["scale_norm", "tagging"])
    norm, task = kinds.NORMS["scalenorm"], kinds.TASKS["tagging"]
    for module in ("scale_norm", "tagging"):
        importlib.reload(sys.modules[module])
    assert kinds.NORMS["scalenorm"] is not norm and kinds.TASKS["tagging"] is not task
    script = types.ModuleType("__main__")
    script.__file__ = sys.modules["scale_norm"].__file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    kinds.NORMS["scalenorm"] = type("ScaleNorm", (norm,), {"__module__": "__main__"})
    kinds.NORMS["scalenorm"] = "scale_norm:ScaleNorm"


def test_a_setting_of_a_transform_has_a_meaning(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Own(TextTransform):
        rate: float = 0.5

    monkeypatch.setitem(kinds.TRANSFORMS, "own", Own)
    with pytest.raises(TypeError, match=r"Own.rate: write it as setting\(DEFAULT, MEANING\)"):
        DataConfig(source="tsv", train="a", transforms=({"kind": "own"},))


@pytest.mark.parametrize("name", ["loss", "step", "a:b", ""])
def test_a_metric_has_no_name_of_another_quantity(name, monkeypatch):
    """Regression test: a metric named `loss` replaced the loss, and higher was better."""
    monkeypatch.setitem(kinds.METRICS, name, lambda sources, outputs, references: [1.0] * len(outputs))
    assert lower_is_better("loss")
    with pytest.raises(UserError, match=f"{name!r} is taken, empty, or has a colon; register another name"):
        EvalConfig(metrics=(name,))


def test_a_task_without_a_family_leaves_others_alone(monkeypatch):
    monkeypatch.setitem(kinds.TASKS, "own", Task())
    assert Config(model=ModelConfig(family="classifier"), data=DataConfig(source="tsv", train="a")).task is None


@pytest.mark.parametrize(
    ("module", "most"),
    [("gated_heads", 20), ("letter_pairs", 10), ("csv_files", 20), ("length_difference", 10), ("tagging", 40)],
)
def test_the_readme_shows_modules_of_tests(module, most):
    """And they are short."""
    text = (ROOT / "tformer_jax" / "README.md").read_text(encoding="utf-8").partition("## Add a kind")[2]
    shown = (OUTSIDE / f"{module}.py").read_text(encoding="utf-8")
    assert f"```python\n{shown}```" in text
    assert len([line for line in shown.splitlines() if line.strip()]) <= most


@pytest.fixture
def scale_norm(outside):
    kinds.import_modules(["scale_norm"])
    return kinds.NORMS["scalenorm"]


def test_a_registered_norm_works_everywhere(scale_norm):
    cfg = tiny("decoder_lm", norm="scalenorm", norm_placement="both", qk_norm=True)
    model, params = build(cfg)
    assert params["decoder"]["norm"]["scale"].shape == (1,)
    assert np.isfinite(apply(model, params, TOKENS)).all()
    x = jnp.array([3.0, 4.0])
    assert_close(scale_norm(cfg).apply({"params": {"scale": jnp.array([10.0])}}, x), [6, 8], 1e-5)


def test_a_registered_activation_and_ffn(monkeypatch):
    from tformer_jax.nn.ffn import FFN

    class Doubled(FFN):
        def hidden(self, x):
            return 2 * super().hidden(x)

    monkeypatch.setitem(kinds.FFNS, "doubled", Doubled)
    monkeypatch.setitem(kinds.ACTIVATIONS, "identity", lambda x: x)
    plain, params = build(tiny("decoder_lm", activation="identity", ffn_bias=False))
    doubled, _ = build(tiny("decoder_lm", activation="identity", ffn_bias=False, ffn="doubled"))
    halved = dict(params["decoder"]["layers_0"]["ffn"])
    halved["contract"] = {"kernel": jnp.asarray(halved["contract"]["kernel"]) / 2}
    layer = params["decoder"]["layers_0"] | {"ffn": halved}
    changed = params | {"decoder": params["decoder"] | {"layers_0": layer}}
    assert_close(apply(doubled, changed, TOKENS), apply(plain, params, TOKENS), 1e-6)


def test_an_unknown_kind_is_refused_when_the_config_is_built():
    with pytest.raises(UserError, match="model.norm='scalenrm': is not a known value; known: layernorm, rmsnorm"):
        tiny("decoder_lm", norm="scalenrm")


@pytest.mark.long
def test_a_registered_norm_is_finite_for_zeros(scale_norm):
    """Experts return zeros for padding, which the second norm of a sub-layer must handle."""
    cfg = tiny("decoder_lm", norm="scalenorm", norm_placement="both", ffn="moe", moe={"num_experts": 3})
    model, params = build(cfg)

    def total(params):
        return model.apply({"params": params}, TOKENS, padding_mask=TOKENS < 8).sum()

    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradients)))


TAGGED = """
from tformer_jax.config import (
    Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, to_config_dict
)

def get_config():
    sizes = {"dim": 16, "encoder_layers": 1, "num_heads": 2, "ffn_dim": 32, "max_length": 40, "dropout": 0.0}
    cfg = Config(
        task="tagging",
        model=ModelConfig(family="masked_lm", **sizes),
        data=DataConfig(source="tsv", train="tags.tsv", tokenizer="words", bucket_lengths=(8,), batch_tokens=256),
        optim=OptimConfig(schedule="constant", learning_rate=1e-2, warmup_steps=1),
        train=TrainConfig(steps=120, eval_every=120, metric="token_accuracy"),
        parallel=ParallelConfig(data=1),
        eval=EvalConfig(batch_size=8, samples=0),
    )
    return to_config_dict(cfg)
"""


@pytest.mark.long
@pytest.mark.usefixtures("outside")
def test_a_task_of_other_code_is_trained_and_used(tmp_path, capsys):
    """The tag of a word names the word before it, so that the model must attend to it."""
    rng = np.random.default_rng(0)
    sentences = [rng.choice(list("abcd"), rng.integers(2, 7)).tolist() for _ in range(300)]
    tags = [["start", *(f"after_{word}" for word in words[:-1])] for words in sentences]
    rows = (f"{' '.join(words)}\t{' '.join(named)}\n" for words, named in zip(sentences, tags, strict=True))
    (tmp_path / "tags.tsv").write_text("".join(rows))
    (tmp_path / "own.py").write_text(TAGGED)
    folders = ["--run", f"{tmp_path}/run", "--data", str(tmp_path)]
    train.main(["--config", f"{tmp_path}/own.py", "--import=tagging", *folders])
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"]["token_accuracy"] > 99
    evaluate.main(folders)
    assert "token_accuracy" in capsys.readouterr().out
    run = tj.load(tmp_path / "run")
    assert run.task.tag(run, ["a c d", "b b"]) == [["start", "after_a", "after_c"], ["start", "after_b"]]
    with pytest.raises(UserError, match="translate: .*run holds a masked_lm model; use tag"):
        run.translate(["a"])


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (type("Own", (Task,), {"family": "masked_lm"}), "task='own': is registered as <class .*: register an instance"),
        (type("Own", (Task,), {"metrics": ("loss",)})(), "task='own': Own has no family: set it in the class"),
        (type("Own", (Task,), {"family": "masked_lm"})(), "task='own': Own has no metrics: set it in the class"),
        (
            type("Own", (Task,), {"family": "masked_lm", "metrics": ("loss",)})(),
            r"task='own': Own has no method evaluators\(parts\): write it, or derive the class from TokenPrediction",
        ),
        (
            type("Own", (TokenPrediction,), {"family": "masked_lm", "keys": "text"})(),
            r"task='own': Own has keys = 'text': write a tuple, such as keys = \('text',\)",
        ),
        (
            type("Own", (TokenPrediction,), {"family": "masked_lm", "metrics": "loss"})(),
            r"task='own': Own has metrics = 'loss': write a tuple, such as metrics = \('loss',\)",
        ),
        (
            type("Own", (TokenPrediction,), {"family": "masked_lm", "keys": ["source", "target"]})(),
            r"Own has keys = \['source', 'target'\]: write a tuple, such as keys = \('source', 'target'\)",
        ),
    ],
)
def test_a_task_that_lacks_something(monkeypatch, task, problem):
    """Regression test: errors of Python ended the check of the config, or training; a text was accepted as a tuple."""
    monkeypatch.setitem(kinds.TASKS, "own", task)
    with pytest.raises(UserError, match=problem):
        Config(task="own", model=ModelConfig(family="masked_lm"))
