"""Run folders written by hand: what training writes, without training."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import sacrebleu

from tformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig, to_dict
from tformer_jax.runs import guards

SIGNATURES = {
    "bleu": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
    "chrf": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0",
}
WORDS = [
    "a",
    "small",
    "red",
    "house",
    "stands",
    "near",
    "an",
    "old",
    "bridge",
    "while",
    "two",
    "children",
    "walk",
    "<b>",
]
MODULES = {"encoder/layers_*/attention": 66_048, "encoder/layers_*/ffn": 131_712, "embedding": 512_000}


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    every: int = 1,
    family: str = "seq2seq",
    level: float = 0.0,
    evaluations: int = 4,
    examples: int = 40,
    tested: bool = True,
    events: Sequence[tuple[int, str, str]] = (),
    lost: range = range(0),
    extra: dict[str, float] | None = None,
    directions: Sequence[str] = (),
    **train: Any,
) -> Path:
    """Writes a run folder and returns its path.

    Args:
        level: added to the losses; a higher one also spoils more outputs.
        lost: steps whose loss and gradient norm are not finite.
        extra: further training metrics, constant over the steps.
        directions: directions of translation, by which the outputs take turns.
        train: settings of `train`.
    """
    folder.mkdir(parents=True)
    source, batching = {
        "seq2seq": ("cldr_translation", "buckets"),
        "decoder_lm": ("stdlib_text", "windows"),
        "classifier": ("cldr_language", "buckets"),
    }[family]
    cfg = Config(
        name=folder.name,
        model=ModelConfig(family=family),
        data=DataConfig(source=source, batching=batching),
        train=TrainConfig(steps=steps, **train),
    )
    _json(folder / "config.json", to_dict(cfg))
    _json(
        folder / "provenance.json",
        {
            "run_id": "0",
            "command": f"python scripts/train.py --config configs/{folder.name}.py",
            "git_revision": "957a3daed28a",
            "python": "3.11.7",
            "packages": {"tformer_jax": "0.1.0", "jax": "0.10.2", "flax": "0.12.8"},
            "hardware": {"processor": "AMD EPYC", "cores": 2, "devices": "1 x cpu"},
        },
    )
    _json(folder / "model.json", {"parameters": MODULES, "attention_backends": {"encoder": "xla"}, "peak_flops": 1e12})
    records = list(_records(steps, every, family, level, evaluations, lost, extra or {}))
    metrics = _outputs_and_metrics(folder, family, steps, level, examples, tested, directions)
    if tested:
        records.append({"step": steps, "group": "test", **metrics})
        result = {"name": cfg.name, "parameters": sum(MODULES.values()), "steps": steps, "tokens": 900 * steps}
        _json(folder / "result.json", {**result, "seconds": steps / 4, "test": metrics, "signatures": SIGNATURES})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    kinds = [(0, "start", "1 x cpu"), *events, *([(steps, "finished", "")] if tested else [])]
    times = [f"2026-03-02T{8 + at // 60:02}:{at % 60:02}:00+00:00" for at in range(len(kinds))]
    rows = [
        {"time": time, "step": step, "kind": kind, "message": message}
        for time, (step, kind, message) in zip(times, kinds, strict=True)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lock(folder: Path) -> TextIO:
    """Locks a run folder as a training process does, until the file is closed."""
    file = guards.lock_path(folder).open("a")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def cut(path: Path, share: float = 0.5) -> None:
    """Cuts a file within a line, as a kill does."""
    text = path.read_text() + "\n"
    path.write_text(text[: text.index("\n", int(share * len(text))) - 7])


def _records(steps, every, family, level, evaluations, lost, extra) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(int(100 * level))
    due = set(np.linspace(steps / evaluations, steps, evaluations).astype(int).tolist()) if evaluations else set()
    for step in range(every, steps + 1, every):
        loss = level + 1.2 + 6 * np.exp(-6 * step / steps) + 0.08 * rng.normal()
        finite = step not in lost
        yield {
            "step": step,
            "group": "train",
            "loss": loss if finite else None,
            "grad_norm": float(np.exp(0.3 * rng.normal())) if finite else None,
            "skipped_steps": 0.0 if finite else 1.0,
            "tokens_per_second": 3600 + 100 * rng.normal(),
            "flops_per_second": 4e11 + 1e10 * rng.normal(),
            "data_wait_percent": 0.5,
            "learning_rate": 1e-3 * min(step / (steps / 10), 1),
            "tokens": 900 * step,
            "seconds": step / 4,
            "memory_bytes": 1.5e9,
            **extra,
        }
        if step in due:
            loss = level + 1.3 + 5 * np.exp(-5 * step / steps)
            rates = {"accuracy": 90.0 - 60 * np.exp(-4 * step / steps)}
            if family == "seq2seq":
                rates = {"bleu": 30 * step / steps, "chrf": 50 * step / steps, "exact_match": 10 * step / steps}
            yield {"step": step, "group": "validation", "loss": loss, **({} if family == "decoder_lm" else rates)}


def _outputs_and_metrics(folder, family, steps, level, examples, tested, directions) -> dict[str, float]:
    draw = np.random.default_rng(0)
    spoil = np.random.default_rng(1 + int(100 * level))
    rows = []
    for _ in range(examples):
        reference = " ".join(draw.choice(WORDS, size=draw.integers(4, 14)))
        words = [
            word if remaining else "blue"
            for word, remaining in zip(reference.split(), spoil.random(20) > 0.2 + level, strict=False)
        ]
        row = {
            "source": reference.upper(),
            "reference": reference,
            "output": " ".join(words),
            "score": -level - spoil.gamma(2, 0.4),
        }
        if family == "classifier":
            label = "de" if spoil.random() > 0.3 + level else "en"
            row |= {"reference": "de", "output": label, "score": float(spoil.uniform(0.5, 1))}
        rows.append(row)
    for number, row in enumerate(rows if directions else ()):
        row["direction"] = directions[number % len(directions)]
    (folder / "outputs").mkdir()
    actual = {"step": steps, "signatures": SIGNATURES, "outputs": rows}
    if family == "decoder_lm":
        labels = draw.integers(5, 9, 60)
        nll = labels * (level + 1.3 + 0.2 * draw.normal(size=60) + 0.01 * spoil.normal(size=60))
        actual["losses"] = {"nll": nll.tolist(), "labels": labels.tolist()}
    for split in ("validation", *(["test"] if tested else [])):
        _json(folder / "outputs" / f"{split}.json", actual)
    outputs, references = [row["output"] for row in rows], [row["reference"] for row in rows]
    hits = 100 * sum(map(str.__eq__, outputs, references)) / max(len(rows), 1)
    loss = {"loss": level + 1.3}
    if family != "seq2seq" or not rows:
        return {**loss, "accuracy": hits} if family == "classifier" else loss
    bleu, chrf = sacrebleu.corpus_bleu(outputs, [references]), sacrebleu.corpus_chrf(outputs, [references])
    by_direction = {}
    for direction in directions:
        places = [place for place, row in enumerate(rows) if row["direction"] == direction]
        parts = [outputs[place] for place in places], [[references[place] for place in places]]
        by_direction |= {f"bleu:{direction}": sacrebleu.corpus_bleu(*parts).score}
        by_direction |= {f"chrf:{direction}": sacrebleu.corpus_chrf(*parts).score}
    return {**loss, "bleu": bleu.score, "chrf": chrf.score, "exact_match": hits, **by_direction}


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
