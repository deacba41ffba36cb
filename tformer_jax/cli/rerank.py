"""`scripts/rerank.py`: chooses among the outputs of n-best lists, of one run or of several."""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.base.numbers import counted
from tformer_jax.base.paths import resolved, write_text
from tformer_jax.cli import languages, lines, outputs
from tformer_jax.cli.common import add_imports, add_path, check_writable, new_parser
from tformer_jax.cli.inputs import Source
from tformer_jax.config import EvalConfig, kinds
from tformer_jax.config.fields import flag
from tformer_jax.config.metrics import PROGRAMS
from tformer_jax.inference.requests import Request, as_request
from tformer_jax.inference.reranking import NBest, choose, evaluate, tune
from tformer_jax.inference.risk import Utility, expected_utilities

RESULTS = ("output", "features")
"""Fields that records of outputs get."""
RUNS: Mapping[str, Callable[[Request, str], tuple[Any, ...]]] = {
    "forward": lambda request, output: (request, output),
    "reverse": lambda request, output: (
        Request(output, request.source_language, request.target_language),
        request.text,
    ),
    "lm": lambda _, output: (output,),
}
"""What the run of a feature scores, given a text with its languages, and an output."""


class Metric(Utility):
    """A metric of pools of outputs."""

    def risks(self, pools: Sequence["Pool"]) -> list[Sequence[float]]:
        """Returns the expected similarity of each candidate of each text to all outputs of the text."""
        texts = [[pool.written[place] for place in pool.candidates] for pool in pools]
        matrices = self.matrices([pool.text for pool in pools], texts)
        return [
            expected_utilities(pool.written, lambda _, matrix=matrix: matrix)[pool.candidates].tolist()  # type: ignore[misc]
            for pool, matrix in zip(pools, matrices, strict=True)
        ]

    def statistics(self, pools: Sequence["Pool"], references: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Returns the statistics of the candidates of each text, float64 [N, S], given its references."""
        triples = [
            (pool.text, pool.written[place], own)
            for pool, own in zip(pools, references, strict=True)
            for place in pool.candidates
        ]
        rows = self.scorer.statistics(*zip(*triples, strict=True))
        return np.split(rows, np.cumsum([len(pool.candidates) for pool in pools])[:-1])

    def score(self, sums: np.ndarray) -> float:
        """Returns the score of a corpus with these sums of statistics."""
        return self.sign * self.scorer.score(sums)


@dataclasses.dataclass
class Pool:
    """The outputs of one text in all n-best lists."""

    text: str
    record: dict[str, Any]
    """Of the first list."""
    request: Request
    """The text with its languages."""
    written: list[str] = dataclasses.field(default_factory=list)
    """All outputs; some may be equal."""
    numbers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The values of each output, by field: from fields of its record that are lists of one value per output."""
    places: list[str] = dataclasses.field(default_factory=list)
    """Where the record of each output stands, for messages."""

    @property
    def skipped(self) -> bool:
        """Whether no list has outputs, because the text is too long for the models."""
        return not self.places

    def add(self, record: Mapping[str, Any], place: str) -> None:
        """Adds the outputs of a record at `place`; the record of a skipped text has none.

        Raises:
            UserError: it has no list of texts in `outputs`.
        """
        texts = record.get("outputs")
        if texts is None and record.get(lines.TOO_LONG) == "skip":
            return
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            command = "translate.py --n-best N --output NAME.jsonl"
            raise UserError(f"{place}: has no list of texts in the field 'outputs': write it by {command}")
        columns = {name: row for name, row in record.items() if isinstance(row, list) and len(row) == len(texts)}
        self.written += texts
        self.numbers += [{name: row[number] for name, row in columns.items()} for number in range(len(texts))]
        self.places += [place] * len(texts)

    @functools.cached_property
    def candidates(self) -> list[int]:
        """The indices of the distinct outputs, each where it occurs first."""
        return [number for number, text in enumerate(self.written) if text not in self.written[:number]]

    def column(self, name: str) -> list[float]:
        """Returns the number of each candidate in a field: the mean of its occurrences, whatever their order.

        It is 0 if the only candidate has none, as for a blank text.

        Raises:
            UserError: the field lacks a number for one of several outputs.
        """
        values: dict[str, list[float]] = {self.written[number]: [] for number in self.candidates}
        listed: list[Any] = [numbers.get(name) for numbers in self.numbers]
        if len(values) == 1 and {*map(type, listed)} == {type(None)}:
            return [0.0]
        for text, value, place in zip(self.written, listed, self.places, strict=True):
            if not _is_number(value):
                problem = f"has no number for each output in the field {name!r}: leave out the feature, or the text"
                raise UserError(f"{place}: {problem}")
            values[text].append(value)
        return [math.fsum(row) / len(row) for row in values.values()]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the best output of each text; with `--tune`, also the weights of the features."""
    options = parser().parse_args(argv)
    check_options(options)
    saved = read_json(options.weights) if options.weights else {}
    weights = feature_weights(options, saved)
    name, language = (_given_or_saved(options, saved, *option) for option in (("metric", "chrf"), ("language", "en")))
    check_metric(name, options, tuned=options.metric is None and "metric" in saved)
    if name == "bleu" and not (options.language or "language" in saved):
        print("BLEU splits words as in English: name the language of the outputs with --language", file=sys.stderr)
    metric = Metric(name, language, EvalConfig(metrics=(name,), command=options.metric_command))
    pools = read_pools(options, RESULTS if outputs.is_json(options.output) else ())
    features = compute_features(pools, list(weights), metric)
    if options.tune:
        weights = tune_weights(options, pools, features, list(weights), metric)
    if options.output or not options.tune:
        write_best(options.output, pools, features, weights)


def check_options(options: argparse.Namespace) -> None:
    """Raises `UserError` if options contradict each other, or a module or file cannot be imported or written."""
    kinds.import_modules(options.imports)
    if options.tune and options.weights:
        raise UserError("--tune writes weights and --weights reads them: leave out one of them")
    if bool(options.tune) != bool(options.references):
        raise UserError("--tune FILE and --references FILE belong together: write both, or neither")
    if options.weights and options.feature:
        raise UserError("--weights names the features, too: leave out --feature")
    outputs.check_output(options.output)
    if options.tune:
        check_writable(options.tune, "--tune")
    read = [*options.nbest, *(options.references or ()), *filter(None, [options.weights])]
    for name, path in (("--output", options.output), ("--tune", options.tune)):
        if path is not None and resolved(path) in map(resolved, read):
            raise UserError(f"{name} {path} is read, too: name another file")
    if options.output and options.tune and resolved(options.output) == resolved(options.tune):
        raise UserError(f"{options.output} is both --output and --tune: name another file")


def check_metric(name: str, options: argparse.Namespace, *, tuned: bool) -> None:
    """Raises `UserError` for a metric that is not known, or needs something that is not given.

    Args:
        tuned: `--weights` name the metric.
    """
    whose = f"the weights of {options.weights} were tuned with {name}, which" if tuned else f"--metric {name}"
    if name not in kinds.METRICS:
        raise UserError(f"{whose} is not known: name the module that registers it by --import")
    if name in PROGRAMS and options.metric_command is None:
        raise UserError(f"{whose} needs a program: write --metric-command COMMAND")
    if name == "spbleu":
        raise UserError(f"{whose} needs the file of its model, which this command does not take: name another metric")


def _given_or_saved(options: argparse.Namespace, saved: Mapping[str, Any], name: str, default: str) -> str:
    """Returns the value of an option, of saved weights, or `default`; raises `UserError` if the first two differ."""
    given, tuned = getattr(options, name), saved.get(name)
    if None not in (given, tuned) and given != tuned:
        raise UserError(f"--{name} {given}: the weights of {options.weights} were tuned with {tuned}: leave it out")
    return str(given or tuned or default)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def feature_weights(options: argparse.Namespace, saved: Mapping[str, Any]) -> dict[str, float]:
    """Returns the weights by feature; without saved weights, each `--feature` has the weight 1.

    Raises:
        UserError: there are several features without weights, or a name is not valid.
    """
    weights: dict[str, float] = dict.fromkeys(options.feature or ["risk"], 1.0)
    if options.weights:
        weights = saved.get("weights") or {}
        if not isinstance(weights, dict) or not weights or not all(map(_is_number, weights.values())):
            raise UserError(f"{options.weights} has no numbers by feature in 'weights': make it by --tune")
    if len(weights) > 1 and not options.tune and not saved:
        raise UserError("several features need weights: tune them by --tune FILE --references FILE")
    for name in weights:
        kind, equals, run = name.partition("=")
        if (kind in RUNS) != bool(equals and run):
            runs = ", ".join(f"{kind}=RUN" for kind in RUNS)
            raise UserError(f"--feature {name}: must be {runs}, length, risk, or the name of a field")
    return weights


def read_pools(options: argparse.Namespace, reserved: Collection[str] = ()) -> list[Pool]:
    """Reads n-best lists of the same texts; no record of the first list may have the fields `reserved`.

    Languages are read from the first list. A skipped text has a blank output, as in the plain output of `translate.py`.

    Raises:
        UserError: a file is missing or malformed, or has other texts than the first list.
    """
    pools: list[Pool] = []
    paths: Sequence[Path] = options.nbest
    for path in paths:
        names = ("field", *languages.given_fields(options)) if path is paths[0] else ("field",)
        fields = {flag(name): getattr(options, name) for name in names}
        source, count = Source((), path), 0
        for count, line in enumerate(source.lines(fields, reserved if path is paths[0] else ()), start=1):
            place = source.location(count - 1)
            if path is paths[0]:
                text, *by_line = line.texts
                request = as_request(languages.make_request(options, text, by_line))
                pools.append(Pool(text, line.record, request))
            elif count > len(pools) or pools[count - 1].text != line.texts[0]:
                raise UserError(f"{place}: has another text than {paths[0]}: give n-best lists of the same texts")
            pools[count - 1].add(line.record, place)
        if count < len(pools):
            texts = counted(count, "text")
            raise UserError(f"{path} has {texts} and {paths[0]} {len(pools):,}: give lists of the same texts")
    for pool in filter(lambda pool: pool.skipped, pools):
        pool.written, pool.numbers = [""], [{}]
    return pools


def compute_features(pools: Sequence[Pool], names: Sequence[str], metric: Metric) -> list[np.ndarray]:
    """Returns the features of the candidates of each text, float64 [N, F].

    Raises:
        UserError: a run cannot be loaded or cannot score an output, or a field has no numbers.
    """
    columns = [compute_feature(pools, name, metric) for name in names]
    return [np.array(rows, float).T for rows in zip(*columns, strict=True)]


def compute_feature(pools: Sequence[Pool], name: str, metric: Metric) -> list[Sequence[float]]:
    """Returns a feature of the candidates of each text; arguments are as for `compute_features`."""
    kind, _, run = name.partition("=")
    if kind in RUNS:
        return run_scores(pools, kind, run)
    if name == "length":
        return [[len(pool.written[place]) for place in pool.candidates] for pool in pools]
    if name == "risk":
        return metric.risks(pools)
    has_outputs = any(text for pool in pools for text in pool.written)
    if has_outputs and not any(name in numbers for pool in pools for numbers in pool.numbers):
        raise UserError(f"--feature {name}: no output has this field; correct the name, or leave it out")
    return [pool.column(name) for pool in pools]


def run_scores(pools: Sequence[Pool], kind: str, run: str) -> list[Sequence[float]]:
    """Returns the log-probability that a run computes for each candidate of each text, 0 of skipped ones; see `RUNS`.

    A language model that can start a text also scores the first token.
    """
    import tformer_jax
    from tformer_jax.inference.encoding import TextError, start_of_text

    loaded = tformer_jax.load(run)
    translates = loaded.config.model.model_class.reads_source
    if kind == "lm" and translates:
        raise UserError(f"--feature lm={run}: is a translator: name a language model, or write forward={run}")
    if kind != "lm" and not translates:
        raise UserError(f"--feature {kind}={run}: is no translator: name the run of a translator")
    before = ("",) if kind == "lm" and start_of_text(loaded.config, loaded.tokenizers.target) else ()
    owners = [
        (pool.places[number], (*before, *RUNS[kind](pool.request, pool.written[number])))
        for pool in pools
        if not pool.skipped
        for number in pool.candidates
    ]
    try:
        scored = loaded.scorer().stream(loaded.params, [example for _, example in owners])
        totals = iter([each.total for each in scored])
    except TextError as error:
        raise UserError(f"{owners[error.index][0]}: {kind}={run} cannot score an output: {error.problem}") from None
    return [[0.0] if pool.skipped else list(itertools.islice(totals, len(pool.candidates))) for pool in pools]


def tune_weights(
    options: argparse.Namespace,
    pools: Sequence[Pool],
    features: Sequence[np.ndarray],
    names: Sequence[str],
    metric: Metric,
) -> dict[str, float]:
    """Tunes the weights on references, writes them to `--tune`, prints their score and returns them.

    Raises:
        UserError: a file of references is missing or has another number of lines.
    """
    references = [read_references(path, len(pools)) for path in options.references]
    statistics = metric.statistics(pools, list(zip(*references, strict=True)))
    lists = [NBest(*rows) for rows in zip(features, statistics, strict=True)]
    alone = [evaluate(lists, metric.score, unit).score for unit in np.eye(len(names))]
    tuned = tune(lists, metric.score)
    weights = dict(zip(names, tuned.weights.tolist(), strict=True))
    scores = {"tuned": metric.sign * tuned.score}
    scores |= {name: metric.sign * score for name, score in zip(names, alone, strict=True)}
    record = {"weights": weights, "metric": metric.name, "language": metric.language, "scores": scores}
    write_text(options.tune, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    for name, score in scores.items():
        print(f"{metric.name} {score:.2f}  {name}", file=sys.stderr)
    return weights


def read_references(path: Path, count: int) -> list[str]:
    """Returns the lines of a file of references; raises `UserError` if there are not `count`."""
    references = [line.texts[0] for line in Source((), path).lines({"--references": "text"})]
    if len(references) != count:
        lines = counted(len(references), "line")
        raise UserError(f"{path} has {lines} for {counted(count, 'text')}: name their references")
    return references


def write_best(
    path: Path | None, pools: Sequence[Pool], features: Sequence[np.ndarray], weights: Mapping[str, float]
) -> None:
    """Writes the best output of each text, or in `.jsonl` its record with the best output and its features."""
    values = np.array([*weights.values()])

    def chosen() -> Iterator[str]:
        for pool, rows in zip(pools, features, strict=True):
            best = choose(rows, values)
            output = pool.written[pool.candidates[best]]
            results = {"output": output, "features": dict(zip(weights, rows[best].tolist(), strict=True))}
            yield outputs.format_record(pool.record | results) if outputs.is_json(path) else outputs.join_lines(output)

    if path is None:
        print(*chosen(), sep="\n")
    else:
        write_text(path, "".join(f"{line}\n" for line in chosen()))


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "rerank",
        "Chooses the best output of each text among the outputs of n-best lists, by default by minimum Bayes risk: the "
        "output that is most similar to all outputs, where a repeated output counts repeatedly.",
    )
    result.add_argument(
        "nbest",
        type=Path,
        nargs="+",
        metavar="NBEST",
        help=".jsonl of translate.py --n-best N, of one run or of several",
    )
    result.add_argument(
        "--feature",
        action="append",
        metavar="NAME",
        help="what outputs are ranked by (repeatable): risk (mean similarity to all outputs), length (characters), "
        "forward=RUN (log-probability of the output given the text), reverse=RUN (of the text given the output), "
        "lm=RUN (of the output), or a field with a number for each output, such as scores (default: risk)",
    )
    add_path(result, "--tune", "tune the weights of the features, and write this file")
    add_path(result, "--references", "references to tune on, one file for each set", nargs="+")
    add_path(result, "--weights", "features and weights of --tune")
    result.add_argument(
        "--metric", metavar="NAME", help="similarity of risk, and metric to tune (default: as in --weights, or chrf)"
    )
    add_imports(result)
    result.add_argument("--metric-command", metavar="COMMAND", help="program of the metric command or command_error")
    result.add_argument(
        "--language", metavar="CODE", help="language of outputs, for BLEU (default: as in --weights, or en)"
    )
    add_path(result, "--output", "text or .jsonl (default: standard output)")
    lines.add_field(result)
    languages.add_languages(result)
    return result
