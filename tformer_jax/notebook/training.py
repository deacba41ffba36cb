"""Trains a config in Python, on your own data or the config's."""

import contextlib
import dataclasses
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

from tformer_jax import api
from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path, home_expanded
from tformer_jax.config import Config, OptimConfig, kinds
from tformer_jax.config.metrics import TAKEN
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora.python import python_corpus
from tformer_jax.notebook.parts import check_config, check_optimizer, with_python_data
from tformer_jax.report.charts import TITLES
from tformer_jax.report.history_plot import plot_history
from tformer_jax.runs import curves, experiment, run_folder, training

_TRAINS = threading.RLock()
"""Held by the thread that trains; a callback may train another run."""


def train(
    cfg: Config,
    data: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    metrics: Mapping[str, Callable[[Sequence[str], Sequence[str]], float]] | None = None,
    callbacks: Sequence[Callable[[int, Any, Mapping[str, float]], None]] = (),
    data_root: str | Path | None = None,
) -> api.Run:
    """Trains a config as `scripts/train.py` does, and returns the run; in a notebook, curves are drawn meanwhile.

    Args:
        data: `{"train": ..., "validation": ...}`, and "test" if there is one: sequences or iterables of texts,
            (source, target) or (text, label) pairs, or dictionaries; None: the data that `cfg.data` names.
        run: the run folder; None: `runs/NAME` of the config.
        resume, overwrite: continue or replace the run in the folder. A resumed run continues exactly; it checks that
            the data and the optimizer are the same.
        optimizer: an Optax transformation with its learning rate, in place of all of `cfg.optim`.
        metrics: further metrics of evaluations by name: functions of outputs and references, two lists of texts
            (or labels), in the order of the examples.
        callbacks: functions `(step, state, metrics)`, called after each recorded step; its metrics are named as in
            `Run.history`. The next step frees the arrays of the state: copy what you keep.
        data_root: the data folder, for sources that read files.

    Raises:
        UserError: settings, data, optimizer or metrics do not fit each other, or the folder holds another run.
        RunError: the run cannot continue.
        KeyboardInterrupt: SIGINT or SIGTERM has stopped the run, with a checkpoint.
    """
    check_config(cfg)
    check_type("data_root", data_root, str | os.PathLike | None, "the path of the data folder")
    given = None
    if data is not None:
        cfg = with_python_data(cfg)
        given = python_corpus(cfg, data)
    elif cfg.data.source == "python":
        raise UserError("data.source='python': pass data={'train': ..., 'validation': ...}")
    if optimizer is not None:
        cfg = _with_optimizer(cfg, optimizer)
    elif cfg.optim.optimizer == "python":
        raise UserError("optim.optimizer='python': pass optimizer=, an Optax transformation")
    _check_functions(cfg, metrics or {}, callbacks)
    folder = as_path(run) if run is not None else Path("runs") / cfg.name
    _check_folder(folder, resume=resume, overwrite=overwrite)
    root = None if data_root is None else home_expanded(Path(data_root))
    options: dict[str, Any] = {"data_root": root, "resume": resume, "overwrite": overwrite}
    drawn = [LiveCurves()] if in_notebook() else []
    with _in_one_thread():
        built = experiment.build(cfg, folder, given=given, optimizer=optimizer, **options)
        result = training.run(built, callbacks=[*callbacks, *drawn], metrics=metrics or {})
    if result is None:
        raise KeyboardInterrupt(f"{folder} was stopped by a signal: tformer_jax.train with resume=True continues it")
    return api.load(folder)


@contextlib.contextmanager
def _in_one_thread() -> Iterator[None]:
    """Lets one thread train at a time: Orbax 0.12 numbers saves per process, so that two threads would interfere."""
    if not _TRAINS.acquire(blocking=False):
        raise UserError("another thread of this process trains: wait until it ends, or train in another process")
    try:
        yield
    finally:
        _TRAINS.release()


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise UserError("resume=True continues a run and overwrite=True replaces it: pass one of them")
    if not (resume or overwrite) and run_folder.holds_run(folder):
        how = "resume=True to continue it, overwrite=True to replace it"
        raise UserError(f"{folder} already holds a run: pass {how}, or another folder as run=")


def _with_optimizer(cfg: Config, optimizer: Any) -> Config:
    """Returns the config of a run with an optimizer of Python; says which settings it replaces."""
    check_optimizer(optimizer)
    if replaced := [name for name in cfg.optim.changed_settings() if cfg.optim.optimizer != "python"]:
        print(f"optimizer= replaces {', '.join(f'optim.{name}' for name in replaced)}")
    return dataclasses.replace(cfg, optim=OptimConfig(optimizer="python"))


def _check_functions(cfg: Config, metrics: Any, callbacks: Any) -> None:
    if not isinstance(metrics, Mapping) or not all(isinstance(x, str) and callable(f) for x, f in metrics.items()):
        raise UserError("metrics must be functions of (outputs, references) by name: {'length': function}")
    for name in metrics:
        if name in {*TAKEN, *TITLES, *task_of(cfg).metrics, *kinds.METRICS} or ":" in name:
            raise UserError(f"metrics[{name!r}]: this name is taken, empty, or has a colon; choose another")
    if metrics and task_of(cfg).references is None:
        by = task_of(cfg).named_by(cfg)
        raise UserError(f"metrics compare outputs with references, which {by} does not have: write a callback")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UserError("callbacks must be a list of functions of (step, state, metrics)")
    for name, function in metrics.items():
        _check_call(f"metrics[{name!r}]", function, "(outputs, references)")
    for number, function in enumerate(callbacks):
        _check_call(f"callbacks[{number}]", function, "(step, state, metrics)")


def _check_call(name: str, function: Any, arguments: str) -> None:
    """Raises `UserError` if a function cannot be called with `arguments`, as far as Python knows its signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions in C
        return
    try:
        signature.bind(*arguments.split(","))
    except TypeError:
        raise UserError(f"{name} takes {signature}: it is called with {arguments}") from None


def in_notebook() -> bool:
    """Returns whether this is a notebook, so that outputs can be replaced."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class LiveCurves:
    """A callback that draws the curves of a run in a notebook, replacing the previous drawing."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._shown: Any = None

    def __call__(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        from IPython.display import display

        self._records.append({"step": step, **metrics})
        try:
            plot = plot_history(curves.columns(self._records))
        except UserError:  # without matplotlib, the printed lines remain
            return
        if self._shown is None:
            self._shown = display(plot, display_id=True)
        else:
            self._shown.update(plot)
