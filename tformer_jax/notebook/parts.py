"""The parts of training, for a loop of one's own."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tformer_jax.base.checks import check_type, type_with_article
from tformer_jax.base.cpu import train_step_options
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path
from tformer_jax.config import Config, ModelConfig
from tformer_jax.data.corpora.python import python_examples
from tformer_jax.data.pipeline import check_predictable, train_batches, without_refused
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.models import registry
from tformer_jax.models.family import check_ids
from tformer_jax.nn.module import parameter_name
from tformer_jax.parallel.mesh import first_device_mesh
from tformer_jax.runs import run_folder, weights
from tformer_jax.runs.experiment import with_data_sizes
from tformer_jax.runs.guards import locked
from tformer_jax.special_tokens import PAD
from tformer_jax.train import lora, optimizers
from tformer_jax.train.state import TrainState, create, initializer
from tformer_jax.train.step import make_train_step

NO_LABELS = (PAD, -100)
"""What positions without a label have here and in PyTorch."""


@dataclasses.dataclass(frozen=True, repr=False)
class Batches(Iterator[Batch]):
    """Endless batches of int32 arrays by name, shuffled by `config.seed` in each epoch."""

    batches: Iterator[Batch]
    config: Config
    """The config with the sizes of the vocabulary."""
    tokenizers: Tokenizers
    labels: tuple[str, ...] | None
    """The classes of a classifier."""

    def __next__(self) -> Batch:
        return next(self.batches)

    def __repr__(self) -> str:
        return f"Batches of a {self.config.model.family}: {self.config.data!r}"


def with_python_data(cfg: Config) -> Config:
    """Returns a config whose data is given in Python, in place of generated data.

    Raises:
        UserError: a setting of another source, such as `data.train`, has then no effect.
    """
    check_config(cfg)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source="python"))


def check_config(cfg: Any) -> None:
    """Raises `UserError` if `cfg` is no config."""
    check_type("cfg", cfg, Config, "a Config, such as tj.configs.load('translate_cldr')")


def check_optimizer(optimizer: Any) -> None:
    """Raises `UserError` if `optimizer` is neither None nor an Optax transformation."""
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        called = ", called with its learning rate" if callable(optimizer) else ""
        raise UserError(f"optimizer is {type_with_article(optimizer)}: pass an Optax transformation{called}")


def _check_tokenizers(tokenizers: Any) -> None:
    expected = "Tokenizers(source, target), such as the tokenizers of tj.batches or of a run"
    check_type("tokenizers", tokenizers, Tokenizers, expected)


def batches(cfg: Config, data: Any, *, tokenizers: Tokenizers | None = None) -> Batches:
    """Returns the training batches of examples.

    Args:
        data: a sequence or an iterable of examples: texts, (source, target) pairs, (text, label) pairs or dictionaries.
        tokenizers: default: trained on the examples as `cfg.data` says.

    Raises:
        UserError: an example has another form, or settings do not fit the data.
    """
    cfg = with_python_data(cfg)
    if tokenizers is not None:
        _check_tokenizers(tokenizers)
    corpus = python_examples(cfg, data)
    tokenizers = tokenizers or train_tokenizers(cfg.data, corpus.train, None)
    corpus = without_refused(cfg, corpus, tokenizers)
    cfg = with_data_sizes(cfg, tokenizers, corpus.labels)
    if cfg.data.batching != "windows":  # whose length is checked when they are made
        check_predictable(cfg, corpus, tokenizers)
    prefetched = train_batches(cfg, corpus, tokenizers)
    result = Batches(prefetched, cfg, tokenizers, corpus.labels)
    weakref.finalize(result, prefetched.close)
    return result


def _optimizer(cfg: Config, model: nn.Module, optimizer: Any) -> optax.GradientTransformation:
    check_optimizer(optimizer)
    if optimizer is None:
        return optimizers.build(cfg, registry.shapes(model))
    optimizers.trace_update(optimizer, cfg, registry.shapes(model))
    return optimizer


def init_state(cfg: Config, optimizer: optax.GradientTransformation | None = None, params: Any = None) -> TrainState:
    """Returns the state before the first step, on the first device: new parameters by `cfg.seed`, or `params`.

    Raises:
        UserError: cfg lacks the sizes of the vocabulary, names another run without `params`, or names a teacher, or
            `params` do not fit its model, or calls of the optimizer fail.
    """
    _check_parts(cfg)
    model = registry.build(cfg.model, train=True)
    if params is not None:
        check_params(cfg, params)
    elif cfg.train.start_from is not None:
        raise cfg.train.error("start_from", "is read by tj.train alone: pass params=tj.load(...).params")
    chosen, mesh = _optimizer(cfg, model, optimizer), first_device_mesh()
    if isinstance(jnp.zeros(()), jax.core.Tracer):  # `create` compiles with options of its own, which JAX cannot nest
        return initializer(model, chosen, cfg, mesh)[0](params)
    return create(model, chosen, cfg, mesh, params)


def _check_parts(cfg: Config) -> None:
    """Raises `UserError` if `cfg` is no config, or has a teacher, which only a whole training loads."""
    check_config(cfg)
    if cfg.train.teacher is not None:
        raise cfg.train.error("teacher", "is for tj.train, whose steps get the teacher's parameters: write None")


def train_step(
    cfg: Config, optimizer: optax.GradientTransformation | None = None, *, tokenizers: Tokenizers | None = None
) -> Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the compiled step `(state, batch) -> (state, metrics)`; it donates the old state.

    The step returns the metrics of `train.step.make_train_step`.

    Args:
        optimizer: an Optax transformation, with its learning rate; None: the optimizer of `cfg.optim`.
        tokenizers: tokenizers of the batches: label smoothing covers their tokens only; None: all `model.vocab_size`.

    Raises:
        UserError: raised by the step, for a batch without a key of the model, or with arrays of the wrong type, shape,
            range or device, or a state that an earlier step has used or another optimizer made.
    """
    _check_parts(cfg)
    model = registry.build(cfg.model, train=True)
    chosen = _optimizer(cfg, model, optimizer)
    if tokenizers is not None:
        _check_tokenizers(tokenizers)
    vocab_size = None if tokenizers is None else tokenizers.target.vocab_size
    step = make_train_step(model, chosen, cfg, vocab_size=vocab_size)
    options = train_step_options(jax.local_devices()[0].platform)
    compiled = jax.jit(step, donate_argnums=0, compiler_options=options)  # JAX cannot nest such options
    check_state = _state_check(lambda: initializer(model, chosen, cfg, first_device_mesh())[0])

    def checked(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, dict[str, jax.Array]]:
        check_state(state)
        _check_batch(cfg, batch)
        if isinstance(state.step, jax.core.Tracer):
            return step(state, batch)
        try:
            return compiled(state, batch)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            raise UserError("the state and the batch are on different devices: use jax.device_put") from error

    return checked


def _state_check(build: Callable[[], Callable[[], TrainState]]) -> Callable[[Any], None]:
    """Returns a check of the states of a step; the function that `build` returns creates the initial one."""
    alike: set[Any] = set()
    expected = functools.cache(lambda: str(jax.tree.structure(jax.eval_shape(build()))))

    def check(state: Any) -> None:
        check_type("the state", state, TrainState, "step(state, batch), with the state of tj.init_state")
        if not isinstance(state.step, jax.core.Tracer) and getattr(state.step, "is_deleted", bool)():
            raise UserError("an earlier step has freed this state: write state, metrics = step(state, batch)")
        structure = jax.tree.structure(state)
        if structure not in alike and str(structure) != expected():
            problem = "the state is of another optimizer or model"
            raise UserError(f"{problem}: pass the same to tj.init_state and tj.train_step")
        alike.add(structure)

    return check


class _TrackedBatch(dict[str, Any]):
    """A batch that records which of its arrays are read."""

    def __init__(self, batch: Mapping[str, Any]):
        super().__init__(batch)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the array of a name, or `default`."""
        self.names.add(name)
        return super().get(name, default)


def _check_batch(cfg: Config, batch: Mapping[str, Any]) -> None:
    family = cfg.model.model_class
    needed = (*family.inputs, family.labels, *(("aligned",) if cfg.train.guided_alignment else ()))
    if not isinstance(batch, Mapping) or (missing := [name for name in needed if name not in batch]):
        lacks = f"lacks {missing[0]!r}" if isinstance(batch, Mapping) else f"is {type_with_article(batch)}"
        raise UserError(f"the batch {lacks}: a {cfg.model.family} model reads a dictionary of {', '.join(needed)}")
    read = _TrackedBatch(batch)
    family.arguments(read)
    if unread := [name for name in batch if name not in {*needed, *read.names}]:
        names = ", ".join(sorted({*needed, *read.names}))
        raise UserError(f"the batch has {unread[0]!r}, but a {cfg.model.family} model reads only {names}: leave it out")
    for name, array in batch.items():
        check_type(f"the batch's {name}", array, (np.ndarray, jax.Array), "an integer array, of NumPy or JAX")
    for name in family.inputs:
        check_ids(f"the batch's {name}", batch[name], cfg.model, source=name == "source")
    rows, last = batch[family.inputs[0]].shape[:1], batch[family.inputs[-1]].shape
    if not rows[0]:
        raise UserError(f"the batch's {family.inputs[0]} has no rows")
    if empty := [name for name in family.inputs if not batch[name].shape[1]]:
        raise UserError(f"the batch's {empty[0]} has the shape {batch[empty[0]].shape}: pass one token per row or more")
    if rows[0] % cfg.train.accumulate:
        problem = f"which train.accumulate={cfg.train.accumulate} does not divide"
        raise UserError(f"the batch's {family.inputs[0]} has {rows[0]} rows, {problem}")
    if last[:1] != rows:
        raise UserError(f"the batch's {family.inputs[-1]} has {last[0]} rows, but {family.inputs[0]} has {rows[0]}")
    _check_labels(f"the batch's {family.labels}", batch[family.labels], cfg.model, rows if family.classifies else last)


def _check_labels(name: str, labels: Any, cfg: ModelConfig, shape: tuple[int, ...]) -> None:
    check_type(name, labels, (np.ndarray, jax.Array), "an integer array, of NumPy or JAX")
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{name} has the dtype {labels.dtype}: labels are integers, such as int32")
    if labels.shape != shape:
        raise UserError(f"{name} has the shape {labels.shape}, but its inputs need {shape}")
    size = cfg.num_classes if cfg.model_class.classifies else cfg.vocab_size
    if size is None or not labels.size or isinstance(labels, jax.core.Tracer):
        return
    if (highest := int(np.max(labels))) >= size:
        raise UserError(f"{name} has the label {highest}, but the model has {size}, from 0")
    negative = np.unique(np.asarray(labels)[np.asarray(labels) < 0])
    if wrong := [int(label) for label in negative if label not in NO_LABELS]:
        raise UserError(f"{name} has the label {wrong[0]}: a position without a label has {NO_LABELS[0]}")


def check_params(cfg: Config, params: Any) -> None:
    """Raises `UserError` if a parameter of the model is missing, unknown, or of another shape or dtype."""
    check_type("params", params, Mapping, "the dictionary of parameters, such as state.params or run.params")
    expected, given = (
        {parameter_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (nn.unbox(registry.shapes(registry.build(cfg.model))), nn.unbox(params))
    )
    if set(given) == {f"params/{name}" for name in expected}:
        raise UserError("params is a dictionary of collections: pass variables['params']")
    for what, names in (("lack", expected.keys() - given.keys()), ("have the unknown", given.keys() - expected.keys())):
        if names:
            raise UserError(f"params {what} {min(names)!r}: they belong to another model than cfg.model")
    for name, leaf in expected.items():
        if (given[name].shape, given[name].dtype) != (leaf.shape, leaf.dtype):
            is_now = f"{given[name].dtype}{list(given[name].shape)}"
            raise UserError(f"the parameter {name!r} is {is_now}: cfg.model has {leaf.dtype}{list(leaf.shape)}")


def save_run(
    params: Any,
    cfg: Config,
    tokenizers: Tokenizers,
    path: str | Path,
    *,
    labels: Sequence[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a run folder with final weights, which every command and `tj.load` read.

    Args:
        params: parameters of a state, or a dictionary; updates of LoRA are merged.
        cfg: with the sizes of the vocabulary, as `Batches.config`.
        labels: the classes of a classifier, in the order of its logits.

    Raises:
        UserError: the folder already holds a run, or parameters, tokenizers or labels do not fit the model.
    """
    check_config(cfg)
    _check_tokenizers(tokenizers)
    run = as_path(path)
    if run_folder.holds_run(run) and not overwrite:
        raise UserError(f"{run} already holds a run: choose another path, or overwrite=True")
    params = lora.merged(params)
    check_params(cfg, params)
    if (needed := cfg.model.num_classes if cfg.model.model_class.classifies else None) != (labels and len(labels)):
        raise UserError(f"labels must be {f'the {needed} classes' if needed else 'None'}, and are {labels}")
    cfg = with_data_sizes(cfg, tokenizers, labels)
    with locked(run, "path"), run_folder.creating(run, cfg, tokenizers, labels) as folder:
        weights.save(folder, nn.unbox(params), "saved", [], 0)
