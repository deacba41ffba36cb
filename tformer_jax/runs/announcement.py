"""What a run prints and records of itself when it starts."""

import dataclasses
from typing import Any

import optax

from tformer_jax.data import summary, summary_warnings
from tformer_jax.models import cost, registry
from tformer_jax.parallel import rules
from tformer_jax.runs import hardware, provenance
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.progress import describe_classes
from tformer_jax.train.parameters import base, trainable


def opening_line(experiment: Experiment, params: Any, step: int) -> str:
    """Returns a line with the name, parameters, devices, classes, attention backends and folder of a run.

    If `step` is not 0, it ends with the step that the run continues from.
    """
    backends = sorted(set(attention_backends(experiment).values()))
    return (
        f"{experiment.cfg.name}: {_counted_parameters(experiment, params)} on {devices(experiment)}, "
        f"{describe_classes(experiment.corpus.labels)}attention backend: {', '.join(backends)}, "
        f"run folder {experiment.folder}" + (f", continuing from step {step}" if step else "")
    )


def data_lines(experiment: Experiment) -> list[str]:
    """Returns a line about each split, and a sentence for each fact about the data that may spoil the run."""
    if not experiment.summary:
        return []
    facts = experiment.cfg, experiment.corpus, experiment.summary
    return [*summary.lines(experiment.summary), *summary_warnings.warnings(*facts)]


def data_facts(experiment: Experiment) -> dict[str, Any]:
    """Returns the contents of `data.json`, which `result.json` has under `data`."""
    facts = experiment.cfg, experiment.corpus, experiment.summary
    splits = {name: dataclasses.asdict(split) for name, split in experiment.summary.items()}
    return {"splits": splits, "warnings": list(summary_warnings.warnings(*facts))}


def devices(experiment: Experiment) -> str:
    """Returns the devices of the run, as text."""
    count = experiment.group.count
    used = provenance.describe_hardware(list(experiment.mesh.devices.flat))["devices"]
    return used + (f" of {count} processes" if count > 1 else "")


def model_facts(experiment: Experiment, params: Any) -> dict[str, Any]:
    """Returns the contents of `model.json`: parameters by module, attention backends and the peak FLOP/s."""
    return {
        "parameters": cost.by_module(base(params)),
        "attention_backends": attention_backends(experiment),
        "peak_flops": hardware.peak_flops(list(experiment.mesh.devices.flat)),
    }


def attention_backends(experiment: Experiment) -> dict[str, str]:
    """Returns the attention backends used for the longest rows."""
    with rules.use_mesh(experiment.mesh):
        return registry.attention_backends(experiment.cfg.model, experiment.cfg.data.longest)


def _counted_parameters(experiment: Experiment, params: Any) -> str:
    total, trained = (optax.tree.size(part) for part in (base(params), trainable(params)))
    return f"{total:,} parameters" + (f", {trained:,} trainable (LoRA)" if experiment.cfg.train.lora_rank else "")
