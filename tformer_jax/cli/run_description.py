"""What the server's page says about a run: its size, its scores, and examples of a held-out split."""

import random
from typing import Any

import optax

import tformer_jax as tj
from tformer_jax.base.numbers import counted
from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.config.task import task_of
from tformer_jax.inference.languages import own_direction
from tformer_jax.report import sections
from tformer_jax.report.charts import TITLES
from tformer_jax.report.outputs import Outputs
from tformer_jax.report.run import RunFiles, load_all

METRICS = ("bleu", "chrf", "exact_match", "accuracy", "perplexity", "loss")
"""Metrics that are shown, the first `SHOWN` of them that a run has."""
SHOWN = 3
EXAMPLES, LONGEST = 6, 120
"""Maximum number of examples, and their maximum length in characters unless all texts are longer."""
REFERENCE = 400
"""Maximum number of characters of a reference that is shown."""


def describe_run(run: tj.Run) -> dict[str, Any]:
    """Returns the description of a run, ready for JSON."""
    (loaded,) = load_all([run.path])
    cfg, split = run.config, loaded.split or "validation"
    quantization = cfg.model.quantization if cfg.model.quantization != loaded.config["model.quantization"] else None
    evaluated = run.step is None and not run.ensemble and quantization is None
    model = ensemble_facts(run) if run.ensemble else facts(cfg, loaded, run.step)
    return {
        "languages": own_direction(cfg.data) if task_of(cfg).pairs else None,
        "labels": run.labels,
        "facts": [*model, *([f"quantized: {quantization}"] if quantization else [])],
        "split": split,
        "metrics": metrics(loaded, split) if evaluated else [],
        "examples": examples(loaded.outputs[split]) if split in loaded.outputs else [],
    }


def ensemble_facts(run: tj.Run) -> list[str]:
    """Returns the numbers of models and of parameters, each as a few words."""
    parameters = sections.format_count(optax.tree.size(run.params))
    return [f"ensemble of {1 + len(run.ensemble)} models", f"{parameters} parameters together"]


def facts(cfg: Config, loaded: RunFiles, step: int | None = None) -> list[str]:
    """Returns the size of the model and of its training, up to `step` or its end, each as a few words."""
    run_facts, model = sections.facts(loaded), cfg.model
    layers = " + ".join(map(str, model.depths))
    trained = f"trained for {counted(loaded.step, 'step')} on {run_facts['tokens']} tokens"
    all_facts = [
        f"{run_facts['parameters']} parameters",
        f"{layers} layer{'' if layers == '1' else 's'}",
        f"width {model.dim}",
        f"{model.num_heads} head{'' if model.num_heads == 1 else 's'}",
        trained if step is None else f"step {step:,}",
    ]
    return [fact for fact in all_facts if sections.ABSENT not in fact]


def metrics(loaded: RunFiles, split: str) -> list[dict[str, str]]:
    """Returns titles, values and sacreBLEU's signatures of the main metrics of a split."""
    series = loaded.group(split)
    values = {name: series.final(name) for name in METRICS}
    outputs = loaded.outputs.get(split)
    signatures = outputs.signatures if outputs else {}
    return [
        {
            "title": TITLES[name][0],
            "value": sections.format_metric(values[name], name) + ("" if name in ("bleu", "chrf") else unit(name)),
            "signature": signatures.get(name, ""),
        }
        for name in METRICS
        if values[name] is not None
    ][:SHOWN]


def unit(name: str) -> str:
    """Returns the percent sign of a rate, with its space, or nothing."""
    return " %" if TITLES[name][1] == "%" else ""


def examples(outputs: Outputs) -> list[dict[str, str]]:
    """Returns sources of a split with their references and languages, the same ones at every call."""
    pairs = dict(zip(zip(outputs.sources, outputs.directions, strict=True), outputs.references, strict=True))
    chosen = [pair for pair in pairs if pair[0] and len(pair[0]) <= LONGEST]
    chosen = chosen or sorted(pairs, key=lambda pair: len(pair[0]))[:1]
    return [
        {"text": pair[0], "reference": sections.shorten_text(pairs[pair], REFERENCE), **language_fields(pair[1])}
        for pair in random.Random(0).sample(chosen, min(EXAMPLES, len(chosen)))
    ]


def language_fields(direction: str | None) -> dict[str, str]:
    """Returns the fields of a request that name its languages."""
    if direction is None:
        return {}
    source, target = Direction.parse(direction)
    return {"source_language": source, "target_language": target}
