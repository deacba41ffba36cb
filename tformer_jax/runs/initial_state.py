"""The state that a run starts from: new parameters, the parameters of another run, or a checkpoint."""

import functools
from collections.abc import Callable
from typing import Any

from tformer_jax import config
from tformer_jax.models import registry
from tformer_jax.models.losses import Teacher
from tformer_jax.parallel import placement
from tformer_jax.runs import run_folder
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.runs.experiment import Experiment
from tformer_jax.train import optimizers, state
from tformer_jax.train.state import TrainState
from tformer_jax.train.step import compiling, jitted, make_train_step, training_flops


def start_or_restore(
    experiment: Experiment, checkpointer: Checkpointer, say: Callable[[str], None], teacher: Teacher | None = None
) -> tuple[Callable[..., Any], TrainState, dict[str, Any]]:
    """Returns the jitted step, the state of the newest checkpoint (or a new state), and its host data.

    Starts to prefetch batches. A new state is computed while the step compiles, and `say` shows where its parameters
    come from.

    Args:
        teacher: its parameters are the third argument of the step.
    """
    cfg, model, mesh, batches = experiment.cfg, experiment.model, experiment.mesh, experiment.batches
    optimizer = experiment.optimizer or optimizers.build(cfg, registry.shapes(model))
    init, abstract = state.initializer(model, optimizer, cfg, mesh)
    vocab_size = experiment.tokenizers.target.vocab_size
    train_step = make_train_step(model, optimizer, cfg, vocab_size=vocab_size, teacher=teacher)
    step = jitted(train_step, abstract, mesh)
    host: dict[str, Any] = {"meter": {}, "spikes": {}, "best": {}, "settings": {}}
    host |= {"fingerprint": checkpointer.fingerprint}

    def placed_first() -> Any:
        return placement.shard_batch(mesh, batches.peek() or {}, experiment.shards.own)

    if checkpointer.latest_step() is None:
        with compiling(step, abstract, placed_first, *([teacher.params] if teacher else [])):
            params = [] if experiment.start_from is None else [load_initial(experiment, say)]
            start = state.on_devices(init, abstract, mesh, *params, donate=not cfg.train.lora_base)
            if batches.peek():
                training_flops(cfg, placed_first())  # traced while the step compiles
    else:
        if experiment.group.first:
            host["settings"] = run_folder.resumable_settings(config.load(experiment.folder / "config.json"))
        start, restored = checkpointer.restore(abstract, quarantine=True)
        host |= restored
    if "batches" in host:
        batches.set_state(host["batches"])
    batches.start()
    return step, start, host


def load_initial(experiment: Experiment, say: Callable[[str], None]) -> Any:
    """Returns the matching parameters of `train.start_from`, initializes the others, and reports which match."""
    from tformer_jax.runs.start_from import find_mismatches, initial_params, load_matching

    cfg, run, mesh, group = experiment.cfg, experiment.start_from, experiment.mesh, experiment.group
    assert run is not None
    step, labels, tokenizers = cfg.train.start_from_step, experiment.corpus.labels, experiment.tokenizers
    initial = functools.partial(initial_params, experiment.model, cfg.seed, mesh)
    of_run: dict[str, Any] = {"labels": labels, "step": step, "tokenizers": tokenizers}
    params, report = load_matching(initial, cfg.model, run, mesh, group, **of_run)
    if group.first:
        record = {"weights": run_folder.weights_of(run, step), **vars(report)}
        run_folder.write_json(experiment.folder / "start_from.json", record)
    say(f"From {run}{'' if step is None else f', step {step}'}: {report}")
    for warning in find_mismatches(cfg.train, cfg.model, tokenizers, run):
        say(warning)
    return params
