"""`scripts/evaluate.py`: evaluates a trained model on a split of its data."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tformer_jax as tj
from tformer_jax.base.errors import UserError
from tformer_jax.cli import generation
from tformer_jax.cli.common import add_data, check_writable, load_run, run_parser
from tformer_jax.config import Config, read_mesh, to_dict
from tformer_jax.config.fields import flag
from tformer_jax.config.task import task_of
from tformer_jax.tasks.evaluators.evaluation import TOKENIZED


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the metrics of a run on a split; with `--record`, also writes them as JSON."""
    options = parser().parse_args(argv)
    from tformer_jax.parallel import rules
    from tformer_jax.parallel.placement import mesh_of

    if options.record:
        check_writable(options.record)
    run = load_run(options)
    cfg = change_decoding(run, generation.given_settings(options))
    if mesh := mesh_of(run.params):
        cfg = dataclasses.replace(cfg, parallel=read_mesh(options.mesh))
        rules.check(cfg, mesh.shape)
    result = evaluate_split(run, cfg, options.split, options.data)
    console = Console(highlight=False, emoji=False)
    console.print(metric_table(result))
    for remark in result["remarks"]:
        console.print(escape(remark))
    if options.record:
        from tformer_jax.runs import run_folder

        run_folder.write_json(options.record, result)


def change_decoding(run: "tj.Run", settings: dict[str, Any]) -> Config:
    """Returns the config of a run with changed decoding settings.

    Raises:
        UserError: a setting is invalid, or the model does not generate text that metrics compare.
    """
    task = task_of(run.config)
    if settings and task.references != "texts":
        by = task.named_by(run.config)
        raise UserError(f"{flag(next(iter(settings)))} changes no metric of a run with {by}: omit it")
    return dataclasses.replace(run.config, decode=run.decoding(settings, name=flag))


def evaluate_split(run: "tj.Run", cfg: Config, split: str, data_root: Path | None) -> dict[str, Any]:
    """Returns the metrics on all examples of a split, with everything that determines them.

    Raises:
        UserError: the data cannot be loaded, was prepared with other tokenizers than the run's, has other classes, or
            has changed since the training.
    """
    from tformer_jax.data.corpora import load_corpus
    from tformer_jax.runs import provenance, run_folder
    from tformer_jax.runs.experiment import corpus_facts, find_tokenizers
    from tformer_jax.tasks.evaluators.remarks import merged
    from tformer_jax.tasks.evaluators.split import evaluators_for

    corpus, start = load_corpus(cfg, data_root), time.perf_counter()
    if corpus.labels != run.labels:
        raise UserError(
            f"the classes of the data are {', '.join(corpus.labels or ())}, but those of {run.path} are "
            f"{', '.join(run.labels or ())}; restore the training data, which determine the classes"
        )
    run_folder.check_corpus(run.path, corpus_facts(cfg, corpus))
    tokenizers = find_tokenizers(cfg, corpus, data_root, run.path / "tokenizers")
    evaluators = evaluators_for(cfg, run.model, corpus, tokenizers, split, limit=0)
    merged_result = merged(evaluator(run.params) for evaluator in evaluators)
    return {
        "name": cfg.name,
        **provenance.collect(),
        "seed": cfg.seed,
        "weights": run_folder.weights_of(run.path, run.step),
        "split": split,
        "examples": len(getattr(corpus, split)),
        "decode": to_dict(cfg.decode),
        "seconds": time.perf_counter() - start,
        "metrics": merged_result.metrics,
        "signatures": merged_result.signatures,
        "remarks": merged_result.remarks,
    }


def metric_table(result: dict[str, Any]) -> Table:
    """Returns a table of the metrics, with their signatures."""
    weights = result["weights"]
    steps = ", ".join(map(str, weights["steps"]))
    made = f"{weights['kind']} weights of step{'' if len(weights['steps']) == 1 else 's'} {steps}"
    view = Table(title=f"{escape(result['name'])}, {made}, {result['split']}: {result['examples']:,} examples")
    signatures = result["signatures"]
    for heading in ("metric", "value", "signature") if signatures else ("metric", "value"):
        view.add_column(heading, overflow="fold")
    for name, value in result["metrics"].items():
        title = f"{name} (tokenized)" if signatures.get(name, "").endswith(TOKENIZED) else name
        view.add_row(title, f"{value:.4g}", *([signatures.get(name, "")] if signatures else []))
    return view


def parser() -> argparse.ArgumentParser:
    result = run_parser("evaluate", "Evaluates a trained model on all examples of a split of its data.")
    result.add_argument(
        "--split", choices=("validation", "test"), default="test", help="split to evaluate (default: test)"
    )
    result.add_argument("--record", type=Path, metavar="FILE", help="also write the metrics to this JSON file")
    add_data(result)
    generation.add_settings(result)
    return result
