"""Mistakes of callers in Python are named in one sentence."""

import dataclasses
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tformer_jax as tj
from tests.helpers import build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import FilterConfig
from tformer_jax.data.corpora.python import python_corpus, python_examples
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.models import registry
from tformer_jax.notebook.training import train
from tformer_jax.report.history_plot import plot_history
from tformer_jax.runs.endings import GracefulStop
from tformer_jax.runs.evaluations import own_metrics
from tformer_jax.tasks.evaluators.evaluation import Sample

LETTERS = CharacterTokenizer("abcdefg")
CONFIG = tj.Config(
    model=tiny("decoder_lm", vocab_size=LETTERS.vocab_size),
    data=tj.DataConfig(source="python", tokenizer="characters", batching="windows", window=8, batch_size=2),
)
DATA = {"train": ["abc"], "validation": ["abd"]}
BATCH = {"tokens": np.ones((2, 8), np.int32), "targets": np.ones((2, 8), np.int32)}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: tj.load(3), "the run folder is an int: pass its path, such as 'runs/NAME'"),
        (lambda: tj.load(None), "the run folder is None: pass its path"),
        (lambda: tj.train(CONFIG, DATA, run=3), "the run folder is an int: pass its path"),
        (lambda: tj.load("~no-such-user/run"), "no-such-user/run: .* Write the whole path"),
        (lambda: tj.train_step(None), r"cfg is None: pass a Config, such as tj.configs.load\('translate_cldr'\)"),
        (lambda: tj.init_state(CONFIG.model), "cfg is a ModelConfig: pass a Config"),
        (lambda: tj.batches(["abc"], CONFIG), "cfg is a list: pass a Config"),
        (lambda: tj.batches(CONFIG, None), r"data\['train'\] is None: pass a sequence of examples"),
        (lambda: tj.batches(CONFIG, np.array(5)), r"data\['train'\] is a ndarray: pass a sequence of examples"),
        (lambda: tj.train(CONFIG, {**DATA, 1: ["a"]}), r"data is \['1', 'train', 'validation'\]: write"),
        (lambda: tj.batches(CONFIG, [" ", ""]), r"has no example that data.filters leave; dropped: 2 blank texts"),
        (
            lambda: tj.batches(CONFIG, ["a"]),
            "data.window=8: the training text has 1 token, fewer than one window",
        ),
        (lambda: tj.batches(CONFIG, DATA), "data is a dictionary of train, validation: pass the examples of one split"),
        (
            lambda: tj.batches(CONFIG, ["abc"], tokenizers=LETTERS),
            "tokenizers is a CharacterTokenizer: pass Tokenizers",
        ),
        (lambda: tj.save_run({}, CONFIG, LETTERS, "run"), "tokenizers is a CharacterTokenizer: pass Tokenizers"),
        (lambda: tj.init_state(CONFIG, optax.sgd), "optimizer is a function: .* transformation, called with its"),
        (lambda: tj.train_step(CONFIG, 0.1), "optimizer is a float: pass an Optax transformation$"),
        (lambda: tj.init_state(CONFIG, params="runs/lm"), "params is a str: pass the dictionary of parameters"),
        (lambda: tj.configs.load(None), "the config is None: pass a file or a name"),
        (lambda: tj.configs.change("translate_cldr", seed=1), "the config is a str: pass a Config"),
        (lambda: tj.configs.change(CONFIG, model={"dim": 8}, **{"model.dim": 8}), "model.dim is given twice"),
        (lambda: tj.configs.change(CONFIG, **{"model.rotary.base": 8.0}, model={"rotary": {}}), "is used only by"),
        (lambda: tj.ModelConfig(dtype=jnp.bfloat16), "model.dtype=.*: must be str, not .*; write 'bfloat16'"),
        (lambda: tj.TrainConfig(steps=np.int64(3)), "must be int, not int64; write 3"),
        (lambda: tj.OptimConfig(optimizer=optax.sgd(1.0)), "pass a transformation of Optax to tj.train as optimizer="),
        (lambda: tj.models.build({"dim": 16}), "cfg is a dict: pass a ModelConfig"),
        (lambda: tj.nn.Attention(16), "cfg of Attention is an int: pass a ModelConfig"),
        (
            lambda: plot_history({}, [["loss"]]),
            r"a name is a list: pass names of metrics, as in plot\('loss', 'bleu'\)",
        ),
        (lambda: train(CONFIG, DATA, resume=True, overwrite=True), "resume=True continues .* overwrite=True replaces"),
        (
            lambda: train(CONFIG, DATA, callbacks=[lambda step: 1]),
            r"callbacks\[0\] takes \(step\): .* \(step, state, m",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(call, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=problem):
        call()
    assert not [*tmp_path.iterdir()]


def test_a_metric_of_another_signature_is_named_before_training():
    seq2seq = dataclasses.replace(
        CONFIG, model=tiny("seq2seq"), data=tj.DataConfig(source="python", tokenizer="words", bucket_lengths=(8,))
    )
    pairs = {"train": [("a", "b")], "validation": [("a", "b")]}
    for metrics, problem in (
        ({"own": lambda outputs: 1}, r"metrics\['own'\] takes \(outputs\): it is called with \(outputs, references\)"),
        ({"": lambda outputs, references: 1}, "this name is taken, empty, or has a colon"),
    ):
        with pytest.raises(UserError, match=problem):
            tj.train(seq2seq, pairs, metrics=metrics)


def test_filters_drop_examples_of_python_and_count_them(caplog):
    data = dataclasses.replace(CONFIG.data, filters=FilterConfig(duplicates=True))
    cfg = dataclasses.replace(CONFIG, data=data)
    corpus = python_corpus(cfg, {"train": ["a", "\n", "b", "a"], "validation": ["a", "a", ""]})
    assert corpus.train == [{"text": "a"}, {"text": "b"}]
    assert corpus.validation == [{"text": "a"}] * 2
    assert corpus.left_out == {"train": {"blank texts": 1, "duplicates": 1}, "validation": {"blank texts": 1}}
    python_examples(cfg, ["a", "b", "a", ""])
    assert "left out by data.filters: 1 duplicates, 1 blank texts" in caplog.text


def test_a_text_with_a_lone_surrogate_is_named():
    """Regression test: the run ended in a traceback when its tokenizer was written."""
    with pytest.raises(UserError, match=r"train example 1: 'b\\ud800' has a lone surrogate"):
        python_examples(CONFIG, ["a", "b\ud800"])


def test_each_metric_has_lists_of_its_own_and_is_named_if_it_fails():
    """Regression test: a metric that emptied its list made the next ones see none."""
    samples = [Sample("a", "b", "c"), Sample("d", "e", "f")]
    functions = {"clears": lambda outputs, _: len([outputs.pop() for _ in samples]), "counts": lambda x, _: len(x)}
    assert own_metrics(functions, samples) == {"clears": 2, "counts": 2}
    with pytest.raises(ZeroDivisionError) as failed:
        own_metrics({"mine": lambda *_: 1 / 0}, samples)
    assert failed.value.__notes__ == ["in metrics['mine']"]


@pytest.mark.long
def test_a_step_names_a_state_that_does_not_fit_and_labels_out_of_range():
    cfg, optimizer = CONFIG, optax.adam(0.01)
    state, step = tj.init_state(cfg, optimizer), tj.train_step(cfg, optimizer)
    for labels, problem in ((-5, "has the label -5: a position without a label has -1"), (99, "has the label 99")):
        with pytest.raises(UserError, match=problem):
            step(state, {**BATCH, "targets": np.full((2, 8), labels)})
    with pytest.raises(UserError, match="targets is a list: pass an integer array, of NumPy or JAX"):
        step(state, {**BATCH, "targets": [[1] * 8] * 2})
    with pytest.raises(UserError, match="the state is a dict: pass step"):
        step(BATCH, state)
    with pytest.raises(UserError, match="the state is of another optimizer or model"):
        step(tj.init_state(cfg, optax.sgd(0.1)), BATCH)
    ignored = np.where(np.arange(8) < 4, 1, -100)[None].repeat(2, 0)
    _, metrics = step(state, {**BATCH, "targets": ignored})
    assert metrics["labels"] == 8
    with pytest.raises(UserError, match="an earlier step has freed this state: write state, metrics = step"):
        step(state, BATCH)


@pytest.mark.long
def test_a_step_within_a_scan_equals_steps_one_by_one():
    """Regression test: its checks of values failed for traced batches."""
    optimizer = optax.sgd(0.1)
    step, start = tj.train_step(CONFIG, optimizer), tj.init_state(CONFIG, optimizer)
    twice = jax.tree.map(lambda x: np.stack([x, 2 * x]), BATCH)
    scanned, metrics = jax.lax.scan(step, jax.tree.map(jnp.copy, start), twice)
    first, one = step(start, BATCH)
    second, two = step(first, {name: 2 * x for name, x in BATCH.items()})
    np.testing.assert_allclose(metrics["loss"], [one["loss"], two["loss"]], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), scanned.params, second.params)


@pytest.mark.long
def test_parameters_of_numpy_are_applied_as_those_of_jax():
    """Regression test: the embedding failed outside of jit."""
    model, params = build(tiny("decoder_lm"))
    tokens = np.ones((1, 4), np.int32)
    np.testing.assert_array_equal(
        model.apply({"params": jax.tree.map(np.array, params)}, tokens), model.apply({"params": params}, tokens)
    )
    with pytest.raises(UserError, match=r"variables is None: pass a dictionary of collections"):
        model.apply(None, tokens)
    with pytest.raises(UserError, match="the batch lacks 'tokens': the model reads a dictionary of tokens"):
        registry.forward(model, params, {"source": tokens})


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda nn, cfg: (nn.Attention(cfg), np.ones((8, 16))), r"query has the shape \(8, 16\): .*, as query\[None\]"),
        (lambda nn, cfg: (nn.Attention(cfg), np.ones((1, 8, 12))), r"query has .* 12\): pass \[batch, tokens, 16\]"),
        (lambda nn, cfg: (nn.Encoder(cfg, 1), np.ones((8, 16))), r"x has the shape \(8, 16\): .*, as x\[None\]"),
        (lambda nn, cfg: (nn.Decoder(cfg, 1), np.ones((1, 8, 12))), r"x has the shape \(1, 8, 12\)"),
        (lambda nn, cfg: (nn.FFN(cfg), np.ones((1, 8, 12))), r"x has .* 12\), but its last axes must be \(16,\)"),
        (lambda nn, cfg: (nn.TokenEmbedding(cfg, 9), np.ones((1, 8))), "tokens have the dtype float64"),
    ],
)
def test_a_shape_that_a_module_does_not_read_is_named(call, problem):
    module, x = call(tj.nn, tiny("decoder_lm", dim=16, num_heads=2))
    with pytest.raises(UserError, match=problem):
        module.init(jax.random.key(0), x)


@pytest.mark.parametrize("kind", ["Attention", "LatentAttention"])
def test_a_module_alone_draws_dropout_or_names_its_key(kind):
    attention = "mla" if kind == "LatentAttention" else "multi_head"
    settings = {"dim": 16, "num_heads": 2, "attention": attention, "attention_dropout": 0.5}
    module = getattr(tj.nn, kind)(tiny("decoder_lm", **settings, position="rotary"))
    x = jax.random.normal(jax.random.key(1), (1, 8, 16))
    variables = module.init(jax.random.key(0), x)
    with pytest.raises(UserError, match="train=True draws dropout masks: pass rngs="):
        module.apply(variables, x, train=True)
    one, other = (module.apply(variables, x, train=True, rngs={"dropout": jax.random.key(i)})[0] for i in range(2))
    assert np.abs(one - other).max() > 1e-3


def test_a_run_in_another_thread_leaves_the_handlers_of_signals():
    """Regression test: training in a thread failed."""
    entered = []

    def enter():
        with GracefulStop() as stop:
            entered.append(stop.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [False]


@pytest.mark.slow
def test_a_signal_ends_a_training_with_an_exception(tmp_path):
    """Regression test: it returned the run as if it were finished."""

    def stop(step, state, metrics):
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    data = dataclasses.replace(CONFIG.data, batch_size=8)
    cfg = dataclasses.replace(CONFIG, data=data, train=tj.TrainConfig(steps=4, log_every=1))
    data = {"train": ["abcdefg" * 9], "validation": ["abcdefg" * 9]}
    with pytest.raises(KeyboardInterrupt, match="was stopped by a signal: .* resume=True continues it"):
        tj.train(cfg, data, run=tmp_path / "run", callbacks=[stop])
    assert tj.train(cfg, data, run=tmp_path / "run", resume=True).history["step"].tolist() == [1, 2, 3, 4]


def test_updates_of_another_shape_are_refused():
    """Regression test: they were broadcast."""
    wrong = optax.stateless(lambda updates, params: jax.tree.map(lambda x: x[..., :1], updates))
    state = tj.init_state(CONFIG, wrong)
    with pytest.raises(UserError, match=r"the optimizer updates .*, \[.*\], with an array \[.*1\]: return updates of"):
        tj.train_step(CONFIG, wrong)(state, BATCH)
    partial = optax.stateless(lambda updates, params: {"head": updates})
    with pytest.raises(UserError, match="the optimizer's updates have another structure than the parameters"):
        tj.train_step(CONFIG, partial)(tj.init_state(CONFIG, partial), BATCH)


@pytest.mark.parametrize(
    ("update", "problem"),
    [
        (lambda grads, state, params, value: (grads, state), "called as update.* fails: .*'value'.*; pass an Optax"),
        (lambda grads, state, params: (grads, state, 3), "update returns something else than two values: return"),
        (lambda grads, state, params: (grads, (0, 0)), "update returns a state of another structure than it gets"),
    ],
)
def test_calls_of_an_optimizer_that_fail(tmp_path, update, problem):
    """Regression test: errors of Python and JAX ended the first step."""
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    data = {"train": ["abcdefg" * 9], "validation": ["abcdefg" * 9]}
    with pytest.raises(UserError, match=problem):
        tj.train_step(CONFIG, optimizer)
    with pytest.raises(UserError, match=problem):
        tj.train(CONFIG, data, run=tmp_path / "run", optimizer=optimizer)


def test_an_optimizer_of_other_parameters():
    """Regression test: an error of Optax ended `tj.init_state`."""
    optimizer = optax.multi_transform({"a": optax.sgd(0.1)}, lambda params: jax.tree.map(lambda _: "b", params))
    with pytest.raises(UserError, match=r"called as init.params., which fails: .*transformation.*; pass an Optax"):
        tj.init_state(CONFIG, optimizer)


def test_a_config_is_loaded_by_its_path():
    path = Path(tj.configs.__file__).parents[2] / "configs" / "translate_cldr.py"
    assert tj.configs.load(path) == tj.configs.load("translate_cldr")


def test_batches_say_what_they_are():
    batches = tj.batches(CONFIG, ["abcdefg"] * 9, tokenizers=Tokenizers(LETTERS, LETTERS))
    assert repr(batches).startswith("Batches of a decoder_lm: DataConfig(source='python'")


def test_options_of_an_export_are_those_of_the_command(tmp_path):
    for options, problem in (
        ({"model_typ": "marian"}, "unknown option 'model_typ'; did you mean 'model_type'"),
        ({"model_type": "gpt9"}, "--model-type gpt9: must be albert, "),
        ({"format": "onnx"}, "--format onnx: must be ctranslate2, huggingface, peft, run"),
        ({"quantization": "int8"}, "--quantization is for --format ctranslate2 or run"),
    ):
        with pytest.raises(UserError, match=problem):
            tj.export(tmp_path / "run", tmp_path / "new", **options)
    assert not [*tmp_path.iterdir()]
