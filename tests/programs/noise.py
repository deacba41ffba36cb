"""Scores translators of CLDR phrases on sources with noise: trained with noise, and without.

python scripts/train.py --config configs/translate_cldr.py
python scripts/train.py --config configs/translate_cldr.py:noisy
python -m tests.programs.noise runs/translate_cldr_en_de runs/translate_cldr_en_de_noisy

The sources of the test split have typos, other cases or other spaces, by the transforms of `SOURCES` and the seed of
the config; references stay as they are. Prints and records exact matches, chrF and BLEU of each run.
"""

import argparse
from pathlib import Path
from typing import Any

import tformer_jax as tj
from tests import commands
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.transforms.base import Training, build
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
METRICS = ("exact_match", "chrf", "bleu")


def main() -> None:
    """Prints and records the metrics of each run on each kind of source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--examples", type=int, default=2000, help="number of test examples")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    found = {str(path): evaluate(tj.load(path), options.examples) for path in options.runs}
    for name in SOURCES:
        for path, scores in found.items():
            shown = ", ".join(f"{metric} {scores[name][metric]:.2f}" for metric in METRICS)
            print(f"{name}: {path}: {scores[name]['changed']:.0%} of the sources changed, {shown}")
    if options.record:
        commands.write_record(options.record, "tests.programs.noise", runs=found)


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
