"""Scores translators of CLDR phrases on sources with noise: trained with noise, and without, over three seeds.

python -m tests.programs.noise --record tests/programs/noise.json

The runs are those of a sweep in `runs/noise`, which are trained if they are not there; runs that are named are scored
instead. The sources of the test split have typos, other cases or other spaces, by the transforms of `SOURCES` and the
seed of the config; references stay as they are. Prints and records exact matches, chrF and BLEU of each run, and
their means over the runs of a config.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tformer_jax as tj
from tests import commands
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.transforms.base import Training, build
from tformer_jax.runs import provenance
from tformer_jax.tasks.evaluators.evaluation import Segment
from tformer_jax.tasks.evaluators.translation import TranslationEvaluator

SIDE: dict[str, Any] = {"probability": 1.0, "sides": ("source",)}
SOURCES: dict[str, tuple[dict[str, Any], ...]] = {
    "as they are": (),
    "typos": ({"kind": "typos", "rate": 0.3, **SIDE},),
    "upper case": ({"kind": "case", "form": "upper", **SIDE},),
    "lower case": ({"kind": "case", "form": "lower", **SIDE},),
    "spaces": ({"kind": "spacing", "rate": 0.2, **SIDE},),
}
"""Transforms of the sources to translate."""
RUNS, SWEEP = "runs/noise", "variant=en-de,noisy; seed=0,1,2"
METRICS = ("exact_match", "chrf", "bleu")


def main() -> None:
    """Prints and records the metrics of each run on each kind of source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, help="train so many steps instead of those of the configs")
    parser.add_argument("--examples", type=int, default=2000, help="number of test examples")
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    paths = options.runs or trained_runs(options.steps)
    runs = {
        str(path): {**commands.describe_run(path), "scores": evaluate(tj.load(path), options.examples)}
        for path in paths
    }
    means = {
        name: mean_scores([run for run in runs.values() if run["name"] == name])
        for name in dict.fromkeys(run["name"] for run in runs.values())
    }
    for name, scores in means.items():
        for source, values in scores.items():
            shown = ", ".join(f"{metric} {values[metric]:.2f}" for metric in METRICS)
            print(f"{source}: {name}: {values['changed']:.0%} of the sources changed, {shown}")
    if options.record:
        about = {"git_revision": revision, "settings": {"examples": options.examples}}
        commands.write_record(options.record, "tests.programs.noise", **about, runs=runs, means=means)


def trained_runs(steps: int | None) -> list[Path]:
    """Trains three seeds of each config, as far as they are not there, and returns their folders."""
    sweep = ["--config", "configs/translate_cldr.py", "--sweep", SWEEP, "--output", RUNS]
    shorter = [f"--config.train.steps={steps}"] if steps else []
    subprocess.run([sys.executable, "scripts/sweep.py", *sweep, *shorter], check=True)
    return sorted(path.parent for path in Path(RUNS).glob("*/result.json"))


def mean_scores(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the means over runs on each kind of source."""
    scores = [run["scores"] for run in runs]
    return {
        name: {metric: statistics.fmean(each[name][metric] for each in scores) for metric in scores[0][name]}
        for name in SOURCES
    }


def evaluate(run: tj.Run, count: int) -> dict[str, dict[str, float]]:
    """Returns the metrics of a run on each kind of source, and the share of the sources that are changed."""
    corpus, results = load_corpus(run.config, None), {}
    pairs = [corpus.test[index] for index in range(min(count, len(corpus.test)))]
    for name, values in SOURCES.items():
        transforms = tuple(map(Transform.from_value, values))
        training = Training(run.config.data, Corpus(pairs, [], []), run.tokenizers)
        changes = build(transforms, training, run.config.seed)
        texts = [
            changes.trace(pair, index)[-1]["source"] if changes else pair["source"] for index, pair in enumerate(pairs)
        ]
        segments = [Segment(text, (pair["target"],)) for text, pair in zip(texts, pairs, strict=True)]
        metrics = TranslationEvaluator(run.config, run.model, run.tokenizers, segments)(run.params).metrics
        changed = sum(text != pair["source"] for text, pair in zip(texts, pairs, strict=True)) / len(pairs)
        results[name] = {"changed": changed, **{metric: metrics[metric] for metric in METRICS}}
    return results


if __name__ == "__main__":
    main()
