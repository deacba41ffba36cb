"""Training in Python, as in a notebook."""

import contextlib
import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tformer_jax as tj
from tests.helpers import assert_close, build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.cli import import_hf
from tformer_jax.cli import train as train_command
from tformer_jax.config import ConfigError, kinds
from tformer_jax.config.help import explain
from tformer_jax.data.corpora import DataError
from tformer_jax.data.corpora.python import python_corpus
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.runs.evaluations import own_metrics

WORDS = ("one", "two", "three", "four", "five", "six")
PAIRS = [(f"{a} {b}", f"{b} {a}") for a in WORDS for b in WORDS]
DATA = {"train": PAIRS[6:], "validation": PAIRS[:6]}
MODEL = {"dim": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1, "max_length": 8}


MARIAN = {"norm_placement": "post", "position": "sinusoidal_halves", "tie_embeddings": "all", "output_bias": True}


def config(model=None, **train) -> tj.Config:
    return tj.Config(
        model=tj.ModelConfig(**MODEL | (model or {})),
        data=tj.DataConfig(source="python", tokenizer="words", bucket_lengths=(8,), batch_tokens=64),
        train=tj.TrainConfig(**{"steps": 4, "log_every": 1, "eval_every": 4, "checkpoint_every": 2, **train}),
        decode=tj.DecodeConfig(max_new_tokens=4),
    )


def equal_lengths(outputs, references):
    assert all(isinstance(text, str) for text in (*outputs, *references))
    return np.mean([len(x.split()) == len(y.split()) for x, y in zip(outputs, references, strict=True)])


@pytest.mark.slow
def test_a_notebook_from_data_to_a_saved_run(tmp_path, monkeypatch):
    """Own data, optimizer, metric and callback; curves; another attention; decode, save, load, translate, export."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def watch(step, state, metrics):
        seen.append((step, int(state.step), metrics["loss"]))

    cfg, metrics = config(MARIAN), {"lengths": equal_lengths}
    run = tj.train(cfg, DATA, optimizer=optax.adam(0.01), metrics=metrics, callbacks=[watch])
    history = run.history
    assert [step for step, _, _ in seen] == [1, 2, 3, 4] == [at for _, at, _ in seen] == history["step"].tolist()
    assert [loss for _, _, loss in seen] == history["loss"].tolist()
    assert "learning_rate" not in history and {len(column) for column in history.values()} == {4}
    np.testing.assert_array_equal(np.isfinite(history["validation/lengths"]), [False, False, False, True])
    assert 0 <= history["test/lengths"][-1] <= 1
    facts = (tmp_path / run.path / "corpus.json").read_text()
    assert '"the number of train examples": 30' in facts and "the digest of the optimizer" in facts
    run.plot("loss").save("curves.svg")
    assert len(run.plot("validation/lengths", "lengths").figure.axes) == 1
    with pytest.raises(UserError, match="2.0 outputs per text: write an integer, at least 1"):
        run.outputs(["one"], 2.0)
    assert (tmp_path / "curves.svg").read_text().count("<svg") == 1 and run.plot()._repr_html_().startswith("<svg")
    assert "decoder/layers_*/ffn" in run._repr_html_() and repr(run).startswith("Run('runs/experiment': seq2seq")

    changed = tj.configs.change(
        run.config, name="basic", model={"attention": "basic", "num_heads": 1}, **{"train.steps": 2}
    )
    other = tj.train(changed, DATA, optimizer=optax.adam(0.01))
    assert other.config.model.attention == "basic" and len(other.translate(["one two"])) == 1

    tj.save_run(run.params, run.config, run.tokenizers, "saved")
    assert tj.load("saved").translate(["two six"], beams=2) == run.translate(["two six"], beams=2)
    with pytest.raises(UserError, match="saved already holds a run"):
        tj.save_run(run.params, run.config, run.tokenizers, "saved")
    done = subprocess.run(
        [sys.executable, "-m", "tformer_jax", "translate", "--run", "saved"],
        input="two six\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{run.translate(['two six'])[0]}\n"
    with pytest.raises(UserError, match="is already at step 4|has finished|optimizer"):
        tj.train(cfg, DATA, resume=True, optimizer=optax.adam(0.02))

    tj.export("saved", "exported", model_type="marian")
    import_hf.main(["exported", "--run", "imported"])
    imported = tj.load("imported")
    jax.tree.map(np.testing.assert_array_equal, imported.params, run.params)
    for mine, theirs in zip(run.logits(PAIRS), imported.logits(PAIRS), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert imported.translate(["two six"], beams=2) == run.translate(["two six"], beams=2)


def test_a_metric_of_ones_own_selects_weights_once_it_is_registered(monkeypatch):
    with pytest.raises(ConfigError, match=r"metrics= is only recorded: register it as .*kinds.METRICS\[NAME\]"):
        config(metric="lengths")
    monkeypatch.setitem(kinds.METRICS, "lengths", lambda sources, outputs, references: [0.0 for _ in outputs])
    cfg = dataclasses.replace(
        config(), eval=tj.EvalConfig(metrics=("lengths",)), train=tj.TrainConfig(metric="lengths")
    )
    assert cfg.train.metric == "lengths"
    model = tj.ModelConfig(family="classifier", dim=8, num_heads=2, ffn_dim=8, encoder_layers=1, max_length=8)
    with pytest.raises(ConfigError, match="metrics= are only recorded: compare them in run.history"):
        dataclasses.replace(config(), model=model, train=tj.TrainConfig(metric="bleu"))


class Stop(Exception):
    """Ends a run, as a kill does."""


@pytest.mark.slow
def test_a_resumed_run_is_exact_or_refused(tmp_path):
    """Its optimizer has PRNG keys and booleans in its state."""

    def stop(step, state, metrics):
        if step == 3:
            raise Stop

    def train(name, data=DATA, rate=0.01, **options):
        optimizer = optax.chain(optax.add_noise(0.01, 0.5, key=1), optax.apply_if_finite(optax.adam(rate), 3))
        return tj.train(config(), data, run=tmp_path / name, optimizer=optimizer, **options)

    whole = train("whole")
    with pytest.raises(Stop):
        train("killed", callbacks=[stop])
    for changes, problem in (
        ({"data": {**DATA, "train": PAIRS[7:]}}, "the data of .* changed"),
        ({"data": {**DATA, "train": [*PAIRS[6:20], ("two one", "one six"), *PAIRS[21:]]}}, "the data of .* changed"),
        ({"rate": 0.02}, "the optimizer of .* changed .* restore the optimizer"),
    ):
        with pytest.raises(UserError, match=problem):
            train("killed", resume=True, **changes)
    resumed = train("killed", data={name: iter(examples) for name, examples in DATA.items()}, resume=True)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), whole.params, resumed.params))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (PAIRS, "data is a list: write {'train': texts, 'validation': others}"),
        ({"train": PAIRS}, r"data is \['train'\]: write"),
        ({**DATA, "train": "one"}, r"data\['train'\] is a str: pass a sequence"),
        ({**DATA, "train": iter(())}, r"data\['train'\] is empty; an iterator can be read only once: pass a list"),
        ({**DATA, "train": ["one"]}, r"train example 0 is a str, 'one': this task reads \(source, target\)"),
        ({**DATA, "train": [np.arange(3)]}, r"train example 0 is an array of int64, '\[0 1 2\]'"),
    ],
)
def test_data_of_another_form_is_refused(data, problem):
    with pytest.raises(DataError, match=problem):
        python_corpus(config(), data)


def test_examples_are_texts_tuples_arrays_or_dictionaries():
    forms = [PAIRS[0], [*PAIRS[0]], np.array(PAIRS[0]), dict(zip(("source", "target"), PAIRS[0], strict=True))]
    corpus = python_corpus(config(), {"train": forms, "validation": np.array(PAIRS)})
    assert corpus.train == [forms[-1]] * 4 and len(corpus.validation) == 36
    assert corpus.test is corpus.validation


def test_conversations_are_lists_of_messages_or_records():
    """Regression test: neither could be used, and a text ended with a traceback."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    forms = [messages, {"messages": messages}, {"prompt": "a", "response": "b"}]
    cfg = tj.Config(
        task="chat", model=tiny("decoder_lm"), data=tj.DataConfig(source="python", batching="packed", window=16)
    )
    corpus = python_corpus(cfg, {"train": forms, "validation": forms[:1]})
    assert [example["messages"] for example in corpus.train] == [corpus.train[0]["messages"]] * 3
    with pytest.raises(DataError, match="train example 0 field 'messages' is not a list of messages"):
        python_corpus(cfg, {"train": ["hello"], "validation": forms})


MISTAKES = [
    (lambda call, ids: call(ids[0]), r"tokens has the shape \(4,\): pass \[batch, tokens\], as tokens\[None\]"),
    (lambda call, ids: call(ids.astype(np.float32)), "tokens has the dtype float32: token ids are integers"),
    (lambda call, ids: call([[1, 2]]), "tokens is a list: pass an integer array"),
    (lambda call, ids: call(np.ones((1, 17), np.int32)), "tokens has 17 tokens per row, but model.max_length is 16"),
    (lambda call, ids: call(ids + 10), "tokens has the id 11, but the model's vocabulary has the ids 0 to 10"),
    (lambda call, ids: call(ids - 3), "tokens has the id -2"),
    (lambda call, ids: call(ids, padding_mask=ids), "padding_mask has the dtype int32: pass booleans"),
    (lambda call, ids: call(ids, padding_mask=ids[:, 1:] > 0), r"padding_mask has the shape \(1, 3\), but its tokens"),
    (
        lambda call, ids: call(ids, segments=ids[:, 1:]),
        r"segments has the shape \(1, 3\), but its tokens have \(1, 4\)",
    ),
    (lambda call, ids: call(ids, train=True), "train=True draws dropout masks: pass rngs="),
]


@pytest.mark.parametrize(("mistake", "problem"), MISTAKES)
def test_a_mistake_in_a_call_is_named(mistake, problem):
    model, params = build(tiny("decoder_lm", dropout=0.1))
    with pytest.raises(UserError, match=problem):
        mistake(lambda *args, **options: model.apply({"params": params}, *args, **options), np.ones((1, 4), np.int32))


def test_sources_and_targets_are_pairs():
    model, params = build(tiny("seq2seq"))
    ids = np.ones((2, 4), np.int32)
    for source, target in ((ids[:1], ids), (ids, ids[:1])):
        with pytest.raises(UserError, match="source has . rows, but target has .: pass pairs"):
            model.apply({"params": params}, source, target)


@pytest.mark.slow
def test_mistakes_in_parameters_are_named(tmp_path):
    cfg = tj.Config(model=tiny("decoder_lm"), data=tj.DataConfig(source="python", batching="windows", window=8))
    model, params = build(cfg.model)
    tokens, letters = np.ones((1, 4), np.int32), CharacterTokenizer("abcdefg")
    with pytest.raises(UserError, match=r"no collection 'params': call model.apply\({'params': params}"):
        model.apply(params, tokens)
    with pytest.raises(UserError, match="lacks a module|params do not fit"):
        model.apply({"params": params["decoder"]}, tokens)
    wrong = {
        "a dictionary of collections: pass variables": {"params": params},
        "lack 'decoder/": {name: value for name, value in params.items() if name != "decoder"},
        "have the unknown 'more'": {**params, "more": tokens},
        r"is float16\[": jax.tree.map(lambda x: x.astype(jnp.float16), params),
    }
    for problem, tree in wrong.items():
        with pytest.raises(UserError, match=problem):
            tj.save_run(tree, cfg, Tokenizers(letters, letters), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_loop_of_ones_own():
    """The parts give batches, a state and steps that learn; a batch of another form is refused."""
    batches = tj.batches(config(), PAIRS)
    cfg, optimizer = batches.config, optax.sgd(0.1)
    state, step = tj.init_state(cfg, optimizer), tj.train_step(cfg, optimizer)
    before, batch = jax.tree.map(np.array, state.params), next(batches)
    assert cfg.model.vocab_size == len(WORDS) + 4 == batches.tokenizers.target.vocab_size
    with pytest.raises(UserError, match="the batch lacks 'source': a seq2seq model reads"):
        step(state, {"tokens": batch["source"]})
    with pytest.raises(UserError, match="the batch's source has the dtype float64"):
        step(state, {**batch, "source": batch["source"].astype(float)})
    with pytest.raises(UserError, match="the batch's target_in has the id 100"):
        step(state, {**batch, "target_in": np.where(batch["target_in"] == 4, 100, batch["target_in"])})
    labels, (B, T) = batch["target_out"], batch["target_out"].shape
    for changed, problem in (
        ({"source": batch["source"][:1]}, f"the batch's target_in has {B} rows, but source has 1"),
        (
            {"target_out": labels[:1]},
            rf"the batch's target_out has the shape \(1, {T}\), but its inputs need \({B}, {T}\)",
        ),
        ({"target_out": labels * 1.0}, "the batch's target_out has the dtype float64: labels are integers"),
        (
            {"target_out": labels + 100},
            f"has the label {labels.max() + 100}, but the model has {len(WORDS) + 4}, from 0",
        ),
    ):
        with pytest.raises(UserError, match=problem):
            step(state, {**batch, **changed})
    state, metrics = step(state, batch)
    moved = optax.tree.norm(optax.tree.sub(before, state.params))
    assert int(state.step) == 1
    assert moved == pytest.approx(0.1 * float(metrics["grad_norm"]), rel=1e-3)


@pytest.mark.slow
def test_modules_in_a_model_of_ones_own():
    """A Linen module holds an FFN of the package; `nnx.bridge.ToNNX` makes an NNX module of a model."""
    cfg = tiny("decoder_lm")

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(tj.nn.RMSNorm(cfg)(x))

    x = jnp.ones((1, 4, cfg.dim))
    assert Own().init_with_output(jax.random.key(0), x)[0].shape == (1, 4, 2)
    model, params = build(cfg)
    tokens = jnp.ones((1, 4), jnp.int32)
    with nnx.use_eager_sharding(False):
        bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(tokens)
    state = nnx.to_pure_dict(nnx.state(bridged, nnx.Param))
    assert_close(np.array(bridged(tokens)), np.array(model.apply({"params": state}, tokens)), 1e-6)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, params)


def test_what_there_is_can_be_listed(capsys):
    assert {"train", "load", "help", "configs", "models", "nn", "save_run", "batches", "train_step"} <= {*dir(tj)}
    assert {"Seq2Seq", "build"} <= {*dir(tj.models)} and {"Attention", "FFN"} <= {*dir(tj.nn)}
    assert all(getattr(part, name) is not None for part in (tj, tj.models, tj.nn) for name in dir(part))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        tj.trian  # noqa: B018
    tj.help("model.rotary.base")
    assert capsys.readouterr().out.startswith("model.rotary.base (float, default 10000.0; at least 1.0)\n    base of")
    assert "model.attention (str, default 'multi_head'; allowed: multi_head, basic" in explain("model")
    with pytest.raises(UserError, match="3 is not the name of a setting: write a text, such as 'model.dim'"):
        tj.help(3)
    with pytest.raises(UserError, match="did you mean 'model.rotary'"):
        tj.help("model.rotray")
    for arguments, text in (
        (["--config.help", "optim"], "optim.warmup_steps (int"),
        (["--config.help"], "data.window"),
    ):
        with contextlib.suppress(SystemExit):
            train_command.main(["--config.help", *arguments])
        assert text in capsys.readouterr().out


def test_configs_are_loaded_with_changes_and_shown():
    cfg = tj.configs.load("translate_cldr", train={"steps": 7}, **{"model.dim": 64})
    assert "translate_cldr" in tj.configs.names() and (cfg.train.steps, cfg.model.dim) == (7, 64)
    with pytest.raises(UserError, match="did you mean 'train.steps'"):
        tj.configs.change(cfg, train={"stepz": 1})
    assert repr(tj.Config(model=tj.ModelConfig(dim=64))) == "Config(model=ModelConfig(dim=64))"
    assert eval(repr(cfg), vars(tj.configs.config) | {"Config": tj.Config}) == cfg
    assert "<td>model.dim</td><td>64</td>" in cfg._repr_html_()
    assert "decoder/layers_*/ffn" in build(tiny("decoder_lm"))[0]._repr_html_()


def test_functions_that_do_not_fit_are_refused(tmp_path):
    lm = dataclasses.replace(
        config(),
        model=tiny("decoder_lm", vocab_size=None),
        data=tj.DataConfig(source="python", batching="windows", window=8),
    )
    for cfg, options, problem in (
        (config(), {"metrics": [equal_lengths]}, "metrics must be functions"),
        (config(), {"metrics": {"bleu": equal_lengths}}, "metrics.'bleu'.: this name is taken, empty, or has a colon"),
        (config(), {"metrics": {"loss": equal_lengths}}, "metrics.'loss'.: this name is taken"),
        (config(), {"metrics": {"ter": equal_lengths}}, "metrics.'ter'.: this name is taken"),
        (config(), {"metrics": {"step": equal_lengths}}, "metrics.'step'.: this name is taken"),
        (config(), {"metrics": {"mine:to-en": equal_lengths}}, "metrics.'mine:to-en'.: .* has a colon"),
        (config(), {"metrics": {1: equal_lengths}}, "metrics must be functions"),
        (config(), {"callbacks": equal_lengths}, "callbacks must be a list"),
        (config(), {"data_root": 5}, "data_root is an int: pass the path of the data folder"),
        (
            config(),
            {"optimizer": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())},
            "optimizer= is called as update.gradients, state, params., which fails: .*value.*; pass an Optax",
        ),
        ("translate_cldr", {}, "cfg is a str: pass a Config, such as tj.configs.load"),
        (config(), {"optimizer": 0.1}, "optimizer is a float: pass an Optax transformation"),
        (config(), {"data": None}, "data.source='python': pass data="),
        (
            lm,
            {"metrics": {"lengths": equal_lengths}, "data": {"train": ["a"], "validation": ["b"]}},
            "write a callback",
        ),
    ):
        with pytest.raises(UserError, match=problem):
            tj.train(cfg, **{"data": DATA, "run": tmp_path / "run", **options})


@pytest.mark.parametrize(("value", "problem"), [(jnp.float32(0.5), None), (jnp.ones(2), "finite"), (np.nan, "finite")])
def test_metrics_return_a_number_or_an_array_without_axes(value, problem):
    if problem is None:
        assert own_metrics({"own": lambda *_: value}, []) == {"own": 0.5}
        return
    with pytest.raises(UserError, match=problem):
        own_metrics({"own": lambda *_: value}, [])
