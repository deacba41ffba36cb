"""Compares strategies of decoding with the runs of one config that differ in their seeds.

python scripts/sweep.py --config configs/translate_multi30k.py --data DIR --sweep seed=0,1,2 --output runs/multi30k
python -m tests.programs.quality --data DIR --runs runs/multi30k/seed=0 runs/multi30k/seed=1 runs/multi30k/seed=2 \
    --record configs/results/benchmarks/quality_multi30k.json
python -m tests.programs.readme_tables

The strategies of one run use the first. All choices are made on the validation split, by chrF: the settings of samples
(`SAMPLINGS`) of which the one with the least Bayes risk is chosen, and the weights of features for reranking. Without a
test split, every other example of validation serves for choices, and the others are scored. The candidates of reranking
are the beams of all runs, and its features those of `scripts/rerank.py`. Speeds are tokens of the chosen outputs per
second; each strategy first decodes some texts, and all texts again if a program was compiled while the clock ran. The
same command continues after an interruption.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tformer_jax as tj
from tests import commands
from tformer_jax.base.cpu import COMPILATION
from tformer_jax.cli.rerank import Metric
from tformer_jax.config import Config
from tformer_jax.data.corpora import load_corpus
from tformer_jax.data.corpora.corpus import PAIRS, Corpus, spread
from tformer_jax.data.tokenizers.normalization import normalizer, steps_of
from tformer_jax.inference.reranking import NBest, choose, tune
from tformer_jax.inference.risk import chrf_matrix, expected_utilities
from tformer_jax.runs import provenance
from tformer_jax.tasks.evaluators.evaluation import Segment

METRICS = ("chrf", "bleu", "ter")
SAMPLINGS: dict[str, dict[str, float]] = {
    "min_p 0.1": {"min_p": 0.1},
    "min_p 0.3": {"min_p": 0.3},
    "top_p 0.7": {"top_p": 0.7},
    "temperature 0.5": {"temperature": 0.5},
}
BEAMS = 24
"""Width of the beam searches whose outputs are candidates."""
WARM_UP = 48
"""Number of texts to decode before the clock starts, the longest ones among them."""

Strategy = Callable[[Sequence[str]], list[str]]
"""Translates texts."""
Candidates = Callable[[Sequence[str]], list[list[str]]]
"""Returns several outputs of each text."""


def main() -> None:
    """Decodes the test split by all strategies; records and prints their scores."""
    options = parser().parse_args()
    runs = [tj.load(path) for path in options.runs]
    together = tj.load(options.runs[0], ensemble=options.runs[1:])
    corpus = load_corpus(runs[0].config, options.data)
    validation, test = segments_of(corpus, runs[0].config, options.validation, options.test)
    scores = functools.partial(score, runs[0])
    scored = "other validation" if corpus.test is corpus.validation else "test"
    actual = Progress(options, runs[0].config.name, {"validation": len(validation), scored: len(test)})
    by_settings = actual.get(
        "validation",
        lambda: {
            name: scores(validation, least_risk(samples([runs[0]], options.samples, settings))(sources(validation)))
            for name, settings in SAMPLINGS.items()
        },
    )
    chosen = actual.get("chosen", lambda: max(by_settings, key=lambda name: by_settings[name]["chrf"]))
    weights = actual.get("weights", lambda: tuned_weights(runs, validation))
    settings = SAMPLINGS[chosen]
    strategies: dict[str, Strategy] = {
        "greedy": first_outputs(runs[0], strategy="greedy"),
        f"beam {runs[0].config.decode.beams}": first_outputs(runs[0], strategy="beam"),
        f"ensemble of {len(runs)}, beam": first_outputs(together, strategy="beam"),
        f"least risk of {BEAMS} beams": least_risk(beams([runs[0]])),
        f"least risk of {options.samples} samples": least_risk(samples([runs[0]], options.samples, settings)),
        f"least risk of {len(runs)} x {options.samples} samples": least_risk(samples(runs, options.samples, settings)),
        f"least risk of {len(runs)} x {BEAMS} beams": least_risk(beams(runs)),
        f"least risk of {BEAMS} beams of the ensemble": least_risk(beams([together])),
        f"{len(runs)} x {BEAMS} beams, reranked": reranked(runs, [*weights.values()]),
    }

    def measure(strategy: Strategy) -> dict[str, float]:
        outputs, seconds = timed(strategy, sources(test))
        tokens = sum(len(runs[0].tokenizers.target.encode(output)) for output in outputs)
        return {**scores(test, outputs), "tokens_per_second": tokens / seconds}

    for name, strategy in strategies.items():
        print(name, actual.get(name, functools.partial(measure, strategy), among="strategies"), flush=True)


class Progress:
    """What is measured, in the file `--record` after each part; the same command continues from there."""

    def __init__(self, options: argparse.Namespace, name: str, examples: dict[str, int]):
        self._path: Path | None = options.record
        self._revision = provenance.collect()["git_revision"]  # before the record changes
        self._facts: dict[str, Any] = {"runs": [str(path) for path in options.runs], "name": name}
        self._facts |= {"samples": options.samples, "examples": examples}
        self._parts: dict[str, Any] = {"strategies": {}}
        if self._path and self._path.exists():
            known = json.loads(self._path.read_text(encoding="utf-8"))
            if all(known.get(key) == value for key, value in self._facts.items()):
                self._parts = {
                    key: known[key] for key in ("validation", "chosen", "weights", "strategies") if key in known
                }

    def get(self, name: str, measure: Callable[[], Any], among: str | None = None) -> Any:
        """Returns a part, measured and written if it is not known."""
        parts = self._parts[among] if among else self._parts
        if name not in parts:
            parts[name] = measure()
            if self._path:
                facts = {"git_revision": self._revision, **self._facts, **self._parts}
                commands.write_record(self._path, "tests.programs.quality", **facts)
        return parts[name]


def segments_of(corpus: Corpus, cfg: Config, *limits: int) -> list[list[Segment]]:
    """Returns examples of validation, for choices, and of test; without a test split, every other one of validation.

    References are as `eval.references` says.
    """
    steps = steps_of(cfg.data, PAIRS) if cfg.eval.references == "normalized" else ()
    normalize = normalizer(steps, cfg.data.target_language)
    if corpus.test is not corpus.validation:
        parts = [list(corpus.validation), list(corpus.test)]
    else:
        parts = [list(corpus.validation)[start::2] for start in (0, 1)]
    return [
        [
            Segment(examples[place]["source"], (normalize(examples[place]["target"]),))
            for place in spread(len(examples), limit)
        ]
        for examples, limit in zip(parts, limits, strict=True)
    ]


def sources(segments: Sequence[Segment]) -> list[str]:
    return [segment.source for segment in segments]


def score(run: tj.Run, segments: Sequence[Segment], outputs: Sequence[str]) -> dict[str, float]:
    """Returns the metrics of outputs, with sacreBLEU's settings of the run's evaluation."""
    actual = {name: Metric(name, run.config.data.target_language).scorer for name in METRICS}
    texts = sources(segments), outputs, [segment.references for segment in segments]
    return {name: metric.score(np.sum(metric.statistics(*texts), axis=0)) for name, metric in actual.items()}


def first_outputs(run: tj.Run, **settings: Any) -> Strategy:
    return lambda texts: [row[0].text for row in run.outputs(texts, 1, **settings)]


def samples(runs: Sequence[tj.Run], count: int, settings: dict[str, float]) -> Candidates:
    """Returns the function that draws so many samples of each run."""
    return pooled(runs, count, strategy="sample", **settings)


def beams(runs: Sequence[tj.Run]) -> Candidates:
    return pooled(runs, BEAMS, strategy="beam", beams=BEAMS)


def pooled(runs: Sequence[tj.Run], count: int, **settings: Any) -> Candidates:
    def decode(texts: Sequence[str]) -> list[list[str]]:
        by_run = [run.outputs(texts, count, **settings) for run in runs]
        return [[output.text for row in rows for output in row] for rows in zip(*by_run, strict=True)]

    return decode


def least_risk(candidates: Candidates) -> Strategy:
    """Returns the strategy that chooses the candidate with the highest mean chrF against all of them."""

    def translate(texts: Sequence[str]) -> list[str]:
        rows = candidates(texts)
        return [row[int(np.argmax(expected_utilities(row, chrf_matrix)))] for row in rows]

    return translate


FEATURES = "log-probability", "length", "risk"


def features(runs: Sequence[tj.Run], texts: Sequence[str], rows: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Returns the `FEATURES` of the candidates of each text; log-probabilities are means over the runs."""
    pairs = [(text, output) for text, row in zip(texts, rows, strict=True) for output in row]
    totals = np.mean([[each.total for each in run.score(pairs)] for run in runs], axis=0)
    by_text = np.split(totals, np.cumsum([len(row) for row in rows])[:-1])
    return [
        np.stack([scores, [len(output) for output in row], expected_utilities(row, chrf_matrix)], axis=1)
        for scores, row in zip(by_text, rows, strict=True)
    ]


def tuned_weights(runs: Sequence[tj.Run], segments: Sequence[Segment]) -> dict[str, float]:
    """Returns the weights of `FEATURES` that choose the best of the beams of all runs."""
    metric, rows = Metric("chrf"), beams(runs)(sources(segments))
    lists = [
        NBest(actual, metric.scorer.statistics([segment.source] * len(row), row, [segment.references] * len(row)))
        for actual, row, segment in zip(features(runs, sources(segments), rows), rows, segments, strict=True)
    ]
    return dict(zip(FEATURES, tune(lists, metric.score).weights.tolist(), strict=True))


def reranked(runs: Sequence[tj.Run], weights: Sequence[float]) -> Strategy:
    """Returns the strategy that reranks the beams of all runs by weighted `FEATURES`."""

    def translate(texts: Sequence[str]) -> list[str]:
        rows = beams(runs)(texts)
        return [
            row[choose(actual, np.array(weights))]
            for row, actual in zip(rows, features(runs, texts, rows), strict=True)
        ]

    return translate


def timed(strategy: Strategy, texts: Sequence[str]) -> tuple[list[str], float]:
    """Returns the outputs of a strategy, and its seconds for all texts without compilation."""
    strategy(sorted(texts, key=len)[-1 : -WARM_UP // 2 : -1] + list(texts[: WARM_UP // 2]))
    while True:
        before, start = COMPILED.count, time.perf_counter()
        outputs = strategy(texts)
        if COMPILED.count == before:
            return outputs, time.perf_counter() - start


class Compilations:
    """Counts the programs that JAX compiles from now on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _: float, **__: Any) -> None:
        self.count += event == COMPILATION


COMPILED = Compilations()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--runs", type=Path, nargs="+", required=True)
    result.add_argument("--data", type=Path)
    result.add_argument("--samples", type=int, default=32, help="samples of each run")
    result.add_argument("--validation", type=int, default=300, help="examples to make choices on (default: 300)")
    result.add_argument("--test", type=int, default=0, help="examples of the test split (default: all)")
    result.add_argument("--record", type=Path)
    return result


if __name__ == "__main__":
    main()
