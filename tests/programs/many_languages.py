"""Compares one model of many languages with a model of each direction alone, and with PyTorch's `nn.Transformer`.

python scripts/sweep.py --config configs/translate_debian.py --data DIR --sweep seed=0,1,2 --output runs/debian \
    --record configs/results/translate_debian.json
python -m tests.programs.torch_translator --config configs/translate_debian.py --data DIR --measure
python -m tests.programs.many_languages --config configs/translate_debian.py --data DIR \
    --many configs/results/translate_debian.json --torch-steps STEPS \
    --record configs/results/benchmarks/many_languages_debian.json --heat-map configs/results/many_languages_debian.svg

All have the same data, sizes and decoding of a config, whose variants such as `en-de` are single directions. A single
direction has its share of the steps, so that all directions together take the time of the one model; PyTorch has as
many steps as fit into this time, by the second command, and decodes greedily. Runs are in `runs/many_languages`; the
same command resumes them. On a GPU, several share it with `--jobs`.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import commands
from tests.helpers import score_texts
from tformer_jax.cli.config_file import read_config
from tformer_jax.tasks.evaluators.directions import by_direction, with_means
from tformer_jax.tasks.evaluators.scores import target_language

METRICS = ("chrf", "bleu")
SYSTEMS = {"many": "one model", "alone": "each alone", "torch": "`nn.Transformer`"}
"""Names of the systems in tables, by those in the record."""
Scores = dict[str, float]
"""Values of metrics: `chrf`, the mean over directions, and `chrf:en-de`."""


def main() -> None:
    """Runs all systems for all seeds, and records and prints their scores by direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--many", type=Path, required=True, help="record of the sweep over seeds of the one model")
    parser.add_argument("--torch-steps", type=int, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs", "many_languages"))
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="seeds of the single directions (default: those of --many)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--heat-map", type=Path, help="SVG file of chrF by direction and system")
    options = parser.parse_args()
    directions = all_directions(options.config)
    runs = json.loads(options.many.read_text(encoding="utf-8"))["runs"]
    seeds = options.seeds or [run["seed"] for run in runs]
    with ThreadPoolExecutor(options.jobs) as pool:
        peers = [pool.submit(train_torch, options, run["seed"]) for run in runs]
        alone = {(seed, name): pool.submit(train, options, name, seed) for seed in seeds for name in directions}
    results = {key: job.result() for key, job in alone.items()}
    singles = [{name: plain_metrics(results[seed, name]) for name in directions} for seed in seeds]
    scores: dict[str, list[Scores]] = {
        "many": [chosen_metrics(run) for run in runs],
        "alone": [with_means(single, directions) for single in singles],
        "torch": [peer.result() for peer in peers],
    }
    summary = {system: summarize(seeds) for system, seeds in scores.items()}
    print("\n".join(table(summary)))
    if options.record:
        devices = sorted({run["hardware"]["devices"] for run in results.values()})
        commands.write_record(options.record, "tests.programs.many_languages", trained_on=devices, scores=summary)
    if options.heat_map:
        draw_heat_map(summary, directions).savefig(options.heat_map, metadata={"Date": None})


def all_directions(config: str) -> list[str]:
    """Returns the directions that the config trains."""
    return [str(direction) for direction in read_config(config).data.wanted_directions]


def train(options: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    """Trains a variant of the config, or resumes it, unless it has ended; returns the result."""
    run, config = options.runs / f"{variant}_{seed}", f"{options.config}:{variant}"
    arguments = ["--config", config, "--run", str(run), "--data", str(options.data), f"--config.seed={seed}"]
    command = [sys.executable, "scripts/train.py", *arguments, "--resume"]
    written = commands.ROOT / run / "result.json"
    if not written.is_file():
        subprocess.run(command, check=True, cwd=commands.ROOT, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return result


def chosen_metrics(result: Mapping[str, Any]) -> Scores:
    """Returns the final chrF and BLEU of a result, by direction where it has several."""
    metrics = result["test"]
    return {name: value for name, value in metrics.items() if name.partition(":")[0] in METRICS}


def plain_metrics(result: Mapping[str, Any]) -> Scores:
    """Returns the final chrF and BLEU of a result of one direction."""
    return {name: result["test"][name] for name in METRICS}


def train_torch(options: argparse.Namespace, seed: int) -> Scores:
    """Trains `nn.Transformer` unless it has been, and scores its outputs as those of the others."""
    path = commands.ROOT / options.runs / f"torch_{seed}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--config", options.config, "--data", str(options.data), "--seed", str(seed)]
        arguments += ["--steps", str(options.torch_steps), "--output", str(path)]
        subprocess.run([sys.executable, "-m", "tests.programs.torch_translator", *arguments], check=True)
    return score_rows(options.config, json.loads(path.read_text(encoding="utf-8"))["rows"])


def score_rows(config: str, rows: Sequence[Mapping[str, str]]) -> Scores:
    """Returns chrF and BLEU of outputs, by direction and their means."""
    cfg, parts = read_config(config), {}
    for direction, places in by_direction([row["direction"] for row in rows]).items():
        outputs, references = ([rows[place][key] for place in places] for key in ("output", "target"))
        actual = score_texts(outputs, [(text,) for text in references], cfg, target_language(cfg, direction)).metrics
        parts[str(direction)] = {name: actual[name] for name in METRICS}
    return with_means(parts, all_directions(config))


def summarize(seeds: Sequence[Scores]) -> dict[str, dict[str, Any]]:
    """Returns the mean of each metric over seeds, and its values."""
    names = [name for name in seeds[0] if all(name in scores for scores in seeds)]
    return {
        name: {"mean": statistics.fmean(scores[name] for scores in seeds), "seeds": [scores[name] for scores in seeds]}
        for name in names
    }


def table(summary: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a Markdown table of chrF by direction, and the mean over directions."""
    yield f"| direction | {' | '.join(SYSTEMS.values())} |"
    yield "|---|---|---|---|"
    for name in ("chrf", *(name for name in summary["many"] if name.startswith("chrf:"))):
        cells = [f"{summary[system][name]['mean']:.1f}" if name in summary[system] else "" for system in SYSTEMS]
        yield f"| {name.partition(':')[2] or 'mean'} | {' | '.join(cells)} |"


def draw_heat_map(summary: Mapping[str, Mapping[str, Any]], directions: Sequence[str]) -> Any:
    """Returns a figure of mean chrF: rows are systems, columns are directions."""
    from matplotlib.figure import Figure

    values = [[summary[system][f"chrf:{name}"]["mean"] for name in directions] for system in SYSTEMS]
    figure = Figure((12, 2.2), layout="constrained")
    axes = figure.subplots()
    axes.imshow(values, aspect="auto", cmap="Blues", vmin=0)
    axes.set_xticks(range(len(directions)), directions, rotation=90)
    axes.set_yticks(range(len(SYSTEMS)), [name.strip("`") for name in SYSTEMS.values()])
    for row, column in itertools.product(range(len(SYSTEMS)), range(len(directions))):
        dark = values[row][column] > max(map(max, values)) / 2
        axes.text(column, row, f"{values[row][column]:.0f}", ha="center", va="center", color="w" if dark else "k")
    return figure


if __name__ == "__main__":
    main()
