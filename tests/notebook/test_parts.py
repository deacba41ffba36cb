"""The parts of training alone, and runs with optimizers of Python."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import tformer_jax as tj
from tests.helpers import build, tiny
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.notebook import parts
from tformer_jax.runs.evaluations import own_metrics
from tformer_jax.tasks.evaluators.evaluation import Sample

LETTERS = CharacterTokenizer("abcdefg")
CONFIG = tj.Config(
    model=tiny("decoder_lm", vocab_size=LETTERS.vocab_size),
    data=tj.DataConfig(source="python", tokenizer="characters", batching="windows", window=8, batch_size=8),
    train=tj.TrainConfig(steps=4, eval_every=4, checkpoint_every=2, log_every=1),
)
DATA = {"train": ["abcabcabd"] * 20, "validation": ["abd"]}
BATCH = {"tokens": np.ones((2, 8), np.int32), "targets": np.ones((2, 8), np.int32)}


def changed(**train) -> tj.Config:
    return tj.configs.change(CONFIG, train=train)


def test_settings_of_a_whole_training_are_refused():
    """Regression test: teachers and other runs were ignored, so that LoRA trained on a random base."""
    for part in (tj.init_state, tj.train_step):
        with pytest.raises(UserError, match="train.teacher='runs/other': is for tj.train"):
            part(changed(teacher="runs/other"))
    with pytest.raises(UserError, match="train.start_from='runs/other': is read by tj.train alone: pass params="):
        tj.init_state(changed(start_from="runs/other"))


def test_label_smoothing_spreads_over_the_tokens_of_the_tokenizers():
    """The oracle is NumPy in float64: 1 - s for the label, and s evenly over the tokens."""
    cfg = tj.configs.change(changed(label_smoothing=0.3), model={"vocab_size": 32})
    state, tokenizers = tj.init_state(cfg, optax.sgd(0.0)), Tokenizers(LETTERS, LETTERS)
    model, losses = tj.models.build(cfg.model), {}
    logits = np.asarray(model.apply({"params": state.params}, BATCH["tokens"]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for given, size in ((tokenizers, LETTERS.vocab_size), (None, 32)):
        step = tj.train_step(cfg, optax.sgd(0.0), tokenizers=given)
        losses[size] = float(step(tj.init_state(cfg, optax.sgd(0.0)), BATCH)[1]["loss"])
        expected = -(0.7 * log_p[..., 1] + 0.3 * log_p[..., :size].mean(-1)).mean()
        assert losses[size] == pytest.approx(expected, rel=1e-5)
    assert len({*losses.values()}) == 2


def test_a_state_is_created_within_compiled_functions():
    expected = tj.init_state(CONFIG)
    compiled = jax.jit(lambda: tj.init_state(CONFIG))()
    shapes = jax.eval_shape(lambda: tj.init_state(CONFIG))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), expected, compiled))
    assert jax.tree.map(jnp.shape, expected) == jax.tree.map(lambda leaf: leaf.shape, shapes)


def test_a_step_has_the_options_of_commands_except_within_compiled_functions(monkeypatch):
    """Regression test: `model.remat` saved no memory on CPUs, whose option of the compiler was missing."""
    monkeypatch.setattr(parts, "train_step_options", lambda platform: {"no_such_option": True})
    step, state = tj.train_step(CONFIG), tj.init_state(CONFIG)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        step(state, BATCH)
    within = jax.jit(step)(state, BATCH)[1]
    monkeypatch.undo()
    assert float(tj.train_step(CONFIG)(state, BATCH)[1]["loss"]) == pytest.approx(float(within["loss"]), rel=1e-5)


def test_batches_and_states_that_do_not_fit():
    step = tj.train_step(changed(accumulate=2), optax.sgd(0.1))
    state = tj.init_state(changed(accumulate=2), optax.sgd(0.1))
    three = {name: np.ones((3, 8), np.int32) for name in BATCH}
    with pytest.raises(UserError, match="the batch's tokens has 3 rows, which train.accumulate=2 does not divide"):
        step(state, three)
    with pytest.raises(UserError, match="the batch's tokens has no rows"):
        step(state, {name: ids[:0] for name, ids in three.items()})
    with pytest.raises(UserError, match=r"the batch's tokens has the shape .2, 0.: pass one token per row or more"):
        step(state, {name: ids[:, :0] for name, ids in BATCH.items()})
    with pytest.raises(UserError, match="the batch's segments is a str: pass an integer array"):
        step(state, BATCH | {"segments": "first"})
    with pytest.raises(UserError, match="has 'mask', but a decoder_lm model reads only prefix, segments, targets, tok"):
        step(state, BATCH | {"mask": BATCH["tokens"]})
    with pytest.raises(UserError, match="the state is of another optimizer or model"):
        step(tj.init_state(CONFIG, optax.adam(0.1)), BATCH)
    with pytest.raises(UserError, match="the state and the batch are on different devices: use jax.device_put"):
        step(state, jax.device_put(BATCH, jax.devices()[1]))
    step(state, BATCH)


def test_guided_alignment_needs_the_links_of_a_batch():
    """Regression test: a step without them trained as if `train.guided_alignment` were not set."""
    data = tj.DataConfig(source="parallel_lines", train=("a.{lang}",), links="links", bucket_lengths=(8,))
    cfg = tj.Config(model=tiny("seq2seq"), data=data, train=tj.TrainConfig(guided_alignment=0.5))
    batch = {name: np.ones((2, 8), np.int32) for name in ("source", "target_in", "target_out")}
    with pytest.raises(UserError, match="the batch lacks 'aligned': a seq2seq model reads a dictionary of source, "):
        tj.train_step(cfg)(tj.init_state(cfg), batch)


def test_parameters_with_lora_are_saved_with_their_updates(tmp_path):
    cfg = changed(lora_rank=2, lora_alpha=4.0, start_from="runs/other")
    state = tj.init_state(cfg, params=tj.init_state(CONFIG).params)
    trainable = jax.tree.map(lambda leaf: leaf + 0.1, state.params.trainable)
    params = dataclasses.replace(state.params, trainable=trainable)
    tj.save_run(params, cfg, Tokenizers(LETTERS, LETTERS), tmp_path / "run")
    loaded = tj.load(tmp_path / "run").params["decoder"]["layers_0"]["ffn"]["expand"]["kernel"]
    factors = trainable["decoder"]["layers_0"]["ffn"]["expand"]["kernel"]
    kernel = params.base["decoder"]["layers_0"]["ffn"]["expand"]["kernel"]
    np.testing.assert_allclose(loaded, kernel + 2 * factors["a"] @ factors["b"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "name"), [("classifier", "tokens"), ("masked_lm", "tokens"), ("seq2seq", "source")])
def test_padding_without_a_mask_is_refused_where_tokens_attend_to_it(family, name):
    """Regression test: the padding was read as token 0."""
    model, params = build(tiny(family))
    ids = np.array([[3, 4, -1]], np.int32)
    others = (ids[:, :2],) if family == "seq2seq" else ()
    mask = "source_padding_mask" if family == "seq2seq" else "padding_mask"
    with pytest.raises(UserError, match=f"{name} has padding, -1: pass {mask}={name} != -1"):
        model.apply({"params": params}, ids, *others)
    masked = model.apply({"params": params}, ids, *others, **{mask: ids != -1})
    alone = model.apply({"params": params}, ids[:, :2], *others)
    np.testing.assert_allclose(masked[:, : alone.shape[1]], alone, rtol=1e-5, atol=1e-5)


def test_padding_at_the_end_of_causal_rows_needs_no_mask():
    model, params = build(tiny("decoder_lm"))
    left, right = np.array([[-1, 3, 4]], np.int32), np.array([[3, 4, -1]], np.int32)
    np.testing.assert_allclose(
        model.apply({"params": params}, right)[:, :2], model.apply({"params": params}, right[:, :2]), atol=1e-5
    )
    with pytest.raises(UserError, match="tokens has padding, -1: pass padding_mask=tokens != -1"):
        model.apply({"params": params}, left)


def test_runs_are_compared_by_identity_and_arguments_are_shown(tmp_path):
    tj.save_run(tj.init_state(CONFIG).params, CONFIG, Tokenizers(LETTERS, LETTERS), tmp_path / "run")
    first, second = tj.load(tmp_path / "run"), tj.load(tmp_path / "run")
    assert first != second and len({first, second, first}) == 2
    import inspect

    assert [*inspect.signature(tj.train).parameters][:2] == ["cfg", "data"]
    with pytest.raises(UserError, match="'one' is a single text: write a list of texts"):
        first.generate(np.array("one"))
    with pytest.raises(UserError, match=r"metrics\['turn'\] returned 1j: it must return a finite number"):
        own_metrics({"turn": lambda outputs, references: 1j}, [Sample(source="a", reference="b", output="c")])


@pytest.mark.long
def test_a_masked_lm_reads_masks_for_all_uses(tmp_path):
    """Regression test: only `fill_mask` read the name of the mask as that token; `logits` read an unknown word."""
    tokenizer = LETTERS.extended(["<mask>"])
    cfg = tj.Config(
        model=tiny("masked_lm", vocab_size=tokenizer.vocab_size),
        data=tj.DataConfig(
            source="python", tokenizer="characters", window=8, batching="windows", objective="masked_tokens"
        ),
    )
    tj.save_run(tj.init_state(cfg).params, cfg, Tokenizers(tokenizer, tokenizer), tmp_path / "run")
    run = tj.load(tmp_path / "run")
    (logits,), ((best, *_),) = run.logits(["ab<mask>d"]), run.fill_mask(["ab<mask>d"])
    probabilities = np.exp(logits[2]) / np.exp(logits[2]).sum()
    assert len(logits) == 4
    assert best.probability == pytest.approx(probabilities.max(), rel=1e-5)
    token = int(probabilities.argmax())
    assert best.tokens == (tokenizer.special.name(token) or tokenizer.decode([token]),)
    with pytest.raises(UserError, match="top is a str: pass a number of fills per text"):
        run.fill_mask(["<mask>"], top="2")


@pytest.mark.long
def test_checkpoints_of_an_optimizer_of_python_are_loaded(tmp_path, caplog):
    """Regression test: the parameters of an interrupted run could not be loaded, nor those of a step."""
    stop = 3

    def interrupt(step, state, metrics):
        if step == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tj.train(CONFIG, DATA, run=tmp_path / "run", optimizer=optax.adam(0.01), callbacks=[interrupt])
    stopped = tj.load(tmp_path / "run")
    run = tj.train(CONFIG, DATA, run=tmp_path / "run", optimizer=optax.adam(0.01), resume=True)
    last, earlier = tj.load(tmp_path / "run", step=4), tj.load(tmp_path / "run", step=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, last.params, run.params))
    assert jax.tree.all(jax.tree.map(np.array_equal, earlier.params, stopped.params))
    assert not jax.tree.all(jax.tree.map(np.array_equal, earlier.params, last.params))
    free = tj.train(CONFIG, DATA, run=tmp_path / "free", optimizer=contrib.schedule_free_adamw(0.01))
    assert free.step is None
    with pytest.raises(UserError, match="has the averages of a schedule-free optimizer of Python"):
        tj.load(tmp_path / "free", step=4)
    assert "tracked_metric" not in caplog.text
    with pytest.raises(RunError, match="train another run with a milder optimizer=, which train.start_from"):
        tj.train(changed(max_skipped_steps=1), DATA, run=tmp_path / "nan", optimizer=optax.sgd(float("inf")))


@pytest.mark.long
def test_a_second_thread_that_trains_is_refused(tmp_path):
    problems = []

    def other(step, state, metrics):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    def attempt():
        try:
            tj.train(CONFIG, DATA, run=tmp_path / "other")
        except UserError as error:
            problems.append(str(error))

    tj.train(changed(steps=1), DATA, run=tmp_path / "run", callbacks=[other])
    assert len(problems) == 1 and problems[0].startswith("another thread of this process trains")
    assert not (tmp_path / "other").exists()


def test_batches_of_conversations():
    """Regression test: they were read twice, and refused as no list of messages."""
    cfg = tj.Config(
        task="chat",
        model=tiny("decoder_lm", vocab_size=None, max_length=64),
        data=tj.DataConfig(source="python", tokenizer="bytes", batching="packed", window=64, batch_size=2),
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    batches = [next(tj.batches(cfg, [each] * 8)) for each in (chat, {"messages": chat})]
    assert (batches[0]["targets"] >= 0).any()
    for key, value in batches[0].items():
        np.testing.assert_array_equal(value, batches[1][key])
