"""`scripts/evaluate.py`: evaluates a trained model on a split of its data, or on another test set."""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import tformer_jax as tj
from tformer_jax.base.errors import UserError, list_names
from tformer_jax.base.numbers import counted
from tformer_jax.base.paths import checksum
from tformer_jax.cli import generation, test_sets
from tformer_jax.cli.common import add_data, add_path, add_weights, check_writable, load_run, run_parser, write_output
from tformer_jax.cli.outputs import format_record
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.config import Config, kinds, read_mesh, to_dict
from tformer_jax.config.fields import flag
from tformer_jax.config.metrics import PROGRAMS, base_metric, group_of_metric
from tformer_jax.config.task import task_of
from tformer_jax.data.characters import is_blank
from tformer_jax.runs import provenance, run_folder
from tformer_jax.tasks.evaluators.directions import signatures_of
from tformer_jax.tasks.evaluators.evaluation import TOKENIZED, Evaluation, Evaluator, Sample, Segment, merged


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the metrics of a run on a split or a test set; with `--record`, also writes them as JSON."""
    options = parser().parse_args(argv)
    from tformer_jax.parallel import rules
    from tformer_jax.parallel.placement import mesh_of

    check_options(options)
    segments, start = test_sets.read_test_set(options), time.perf_counter()
    run = load_run(options)
    cfg = change_metrics(change_decoding(run, generation.given_settings(options)), options)
    if mesh := mesh_of(run.params):
        cfg = dataclasses.replace(cfg, parallel=read_mesh(options.mesh))
        rules.check(cfg, mesh.shape)
    scored = options.output is not None
    if segments is None:
        facts, evaluation = evaluate_split(run, cfg, options.split or "test", options.data, scored=scored)
    else:
        facts, evaluation = evaluate_test_set(run, cfg, segments, options)
    result = make_record(run, cfg, facts, evaluation, time.perf_counter() - start)
    console = table_console()
    for table in metric_tables(result):
        console.print(table)
    for remark in result["remarks"]:
        console.print(escape(remark))
    if options.record:
        run_folder.write_json(options.record, result)
    if options.output:
        write_output(options.output, "".join(f"{line}\n" for line in output_lines(evaluation.outputs)))


def check_options(options: argparse.Namespace) -> None:
    """Checks, before anything is computed, what to evaluate and that the files of results can be written.

    Raises:
        UserError: one cannot, --output does not name a .jsonl file, or both a split and a test set are named.
    """
    if options.split and options.source:
        raise UserError(f"--split {options.split} and --source name different examples: leave one of them out")
    if options.record:
        check_writable(options.record)
    if options.output:
        if options.output.suffix != ".jsonl":
            raise UserError(f"--output {options.output}: must be named .jsonl")
        check_writable(options.output, "--output")
    read = {path.resolve(): name for name, path in _test_files(options)}
    for name, path in (("--output", options.output), ("--record", options.record)):
        if path is not None and (other := read.setdefault(path.resolve(), name)) != name:
            raise UserError(f"{path} is both {other} and {name}: choose another {name}")


def _test_files(options: argparse.Namespace) -> list[tuple[str, Path]]:
    sources = [("--source", options.source)] if options.source else []
    return sources + [("--reference", path) for path in options.reference or ()]


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


def change_metrics(cfg: Config, options: argparse.Namespace) -> Config:
    """Returns a config with the metrics that the options add.

    Raises:
        UserError: the model has no such metrics.
    """
    metrics = tuple(dict.fromkeys((*cfg.eval.metrics, *options.metrics))) if options.metrics else None
    if not PROGRAMS.isdisjoint(options.metrics or ()) and not (options.metric_command or cfg.eval.command):
        raise UserError("--metrics command needs a program: write --metric-command COMMAND")
    given = {"metrics": metrics, "spbleu_model": options.spbleu_model, "command": options.metric_command}
    added = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, **added))


def evaluate_split(
    run: "tj.Run", cfg: Config, split: str, data_root: Path | None, *, scored: bool = False
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluates all examples of a split; returns what names it in the record, too.

    Args:
        scored: compute the model's score of each output, also where decoding does not need it.

    Raises:
        UserError: the data cannot be loaded, was prepared with other tokenizers than the run's, has other classes, or
            has changed since the training.
    """
    from tformer_jax.data.corpora import load_corpus
    from tformer_jax.data.corpora.splits import MANY_LABELS
    from tformer_jax.data.pipeline import without_refused
    from tformer_jax.runs.experiment import corpus_facts, find_tokenizers
    from tformer_jax.tasks.evaluators.split import evaluators_for

    corpus = load_corpus(cfg, data_root)
    if corpus.labels != run.labels:
        read, trained = (list_names(labels or (), MANY_LABELS) for labels in (corpus.labels, run.labels))
        raise UserError(
            f"the classes of the data are {read}, but {run.path} has the classes {trained}; restore the training "
            "data, which determine the classes"
        )
    tokenizers = find_tokenizers(cfg, corpus, data_root, run.path / "tokenizers")
    corpus = without_refused(cfg, corpus, tokenizers)
    run_folder.check_corpus(run.path, corpus_facts(cfg, corpus))
    evaluators = evaluators_for(cfg, run.model, corpus, tokenizers, split, limit=0, scored=scored)
    facts = {"split": split, "examples": len(getattr(corpus, split))}
    return facts, merged(evaluator(run.params) for evaluator in evaluators)


def evaluate_test_set(
    run: "tj.Run", cfg: Config, segments: Sequence[Segment], options: argparse.Namespace
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluates the test set that the options name; also returns the facts that identify it in the record.

    Raises:
        UserError: the model neither translates nor classifies, or directions or labels do not fit it.
    """
    evaluate = _label_evaluator if task_of(cfg).references == "labels" else _translation_evaluator
    evaluator = evaluate(run, cfg, segments, scored=options.output is not None)
    files = {str(path): checksum(path) for _, path in _test_files(options)}
    facts = {"test_set": files, "examples": len(segments)}
    return facts, evaluator(run.params)


def _translation_evaluator(run: "tj.Run", cfg: Config, segments: Sequence[Segment], *, scored: bool) -> Evaluator:
    from tformer_jax.tasks.evaluators.translation import TranslationEvaluator

    run.require("translate")
    segments = test_sets.with_directions_of(run, segments)
    return TranslationEvaluator(
        cfg, run.model, run.tokenizers, segments, trained=trained_directions(run), scored=scored
    )


def _label_evaluator(run: "tj.Run", cfg: Config, segments: Sequence[Segment], *, scored: bool) -> Evaluator:
    from tformer_jax.data.corpora import Corpus
    from tformer_jax.tasks.evaluators.split import evaluators_for

    examples = [{"text": segment.source, "label": segment.references[0]} for segment in segments]
    known = ", ".join(run.labels or ())
    for example, segment in zip(examples, segments, strict=True):
        if is_blank(example["text"]):
            raise UserError(f"the test set has a blank text with the label {example['label']!r}: remove both lines")
        if example["label"] not in (run.labels or ()):
            raise UserError(f"the test set has the label {example['label']!r}, but {run.path} has the labels {known}")
        if segment.direction is not None or len(segment.references) > 1:
            raise UserError("a classifier compares each text with one label: leave out directions and other references")
    corpus = Corpus(examples, (), examples, run.labels)
    (evaluator,) = evaluators_for(cfg, run.model, corpus, run.tokenizers, "test", limit=0, scored=scored)
    return evaluator


def trained_directions(run: "tj.Run") -> tuple[str, ...]:
    """Returns the directions of a run's training examples, named as in test sets; () if they have none."""
    path, data = run.path / "data.json", run.config.data
    if not (data.multilingual and path.exists()):
        return ()
    parts = run_folder.read_json(path).get("splits", {}).get("train", {}).get("parts", ())
    names = [part["name"] for part in parts] or map(str, data.wanted_directions)  # some old runs have none
    return tuple(test_sets.named_direction(run, name) for name in names)


def make_record(
    run: "tj.Run", cfg: Config, facts: dict[str, Any], evaluation: Evaluation, seconds: float
) -> dict[str, Any]:
    """Returns the metrics with everything that determines them."""
    ensemble = {str(path): run_folder.weights_of(path) for path in run.ensemble}
    return {
        "name": cfg.name,
        **provenance.collect(),
        "seed": cfg.seed,
        "weights": run_folder.weights_of(run.path, run.step),
        **({"ensemble": ensemble, "mean": run.model.mean} if ensemble else {}),
        **facts,
        **({"quantization": cfg.model.quantization} if cfg.model.quantization else {}),
        "decode": to_dict(cfg.decode),
        "seconds": seconds,
        "metrics": evaluation.metrics,
        "signatures": evaluation.signatures,
        "remarks": evaluation.remarks,
    }


def output_lines(samples: Sequence[Sample]) -> Iterator[str]:
    """Yields the record of each output as JSON, with the scores of each translation alone."""
    records = (sample.to_record() for sample in samples)
    return (format_record(record | record.pop("metrics", {})) for record in records)


def metric_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yields a table of the metrics with their signatures, and one of the directions and their groups, if any."""
    metrics = result["metrics"]
    yield metric_table(result | {"metrics": {name: v for name, v in metrics.items() if not group_of_metric(name)}})
    if groups := dict.fromkeys(filter(None, map(group_of_metric, metrics))):
        names = list(dict.fromkeys(base_metric(name) for name in metrics if group_of_metric(name)))
        values = {group: [metrics.get(f"{name}:{group}") for name in names] for group in groups}
        rows = [(group, *("" if value is None else f"{value:.4g}" for value in row)) for group, row in values.items()]
        yield make_table(("direction", *names), rows, title="means of groups, and directions")


def metric_table(result: dict[str, Any]) -> Table:
    """Returns a table of the metrics, with their signatures."""
    weights = result["weights"]
    steps = ", ".join(map(str, weights["steps"]))
    made = f"{weights['kind']} weights of step{'' if len(weights['steps']) == 1 else 's'} {steps}"
    if others := len(result.get("ensemble", ())):
        made += f" with {others} other run{'' if others == 1 else 's'}"
    examples = result.get("split") or Path(next(iter(result["test_set"]))).name
    title = f"{escape(result['name'])}, {made}, {escape(examples)}: {counted(result['examples'], 'example')}"
    signatures = result["signatures"]
    view = make_table(("metric", "value", "signature")[: 3 if signatures else 2], (), left=3, title=title)
    for name, value in result["metrics"].items():
        signature = "\n".join(signatures_of(name, signatures))
        metric = f"{name} (tokenized)" if signature.endswith(TOKENIZED) else name
        view.add_row(metric, f"{value:.4g}", *([signature] if signatures else []))
    return view


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "evaluate", "Evaluates a trained model on all examples of a split of its data, or on another test set."
    )
    add_weights(result)
    result.add_argument("--split", choices=("validation", "test"), help="split to evaluate (default: test)")
    add_path(result, "--record", "also write the metrics to this JSON file")
    add_path(result, "--output", "also write each output and its scores to this .jsonl file")
    result.add_argument(
        "--metrics", nargs="+", metavar="NAME", help=f"further metrics of translations, of {', '.join(kinds.METRICS)}"
    )
    result.add_argument("--metric-command", metavar="COMMAND", help="program of the metric command or command_error")
    result.add_argument("--spbleu-model", metavar="FILE", help="SentencePiece model of the metric spbleu")
    add_data(result)
    test_sets.add_test_set(result)
    generation.add_settings(result)
    return result
