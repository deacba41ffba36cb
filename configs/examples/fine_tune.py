"""Fine-tunes an encoder of Hugging Face's format: python configs/examples/fine_tune.py CHECKPOINT

CHECKPOINT is a folder with config.json, weights and the tokenizer's files. The task, the language of a phrase, is
generated; for texts of your own, change `data`. Flags such as --config.train.steps=100 may follow.
"""

import dataclasses
import sys
from pathlib import Path

import tformer_jax as tj
from tformer_jax import config
from tformer_jax.cli import import_hf
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import OptimConfig


def main(runs: Path, checkpoint: str, *changes: str) -> None:
    """Imports the checkpoint as the run `encoder` in the folder `runs`, tunes it there as `tuned`, and labels texts."""
    encoder = runs / "encoder"
    import_hf.main([checkpoint, "--run", str(encoder), "--family", "classifier", "--overwrite"])
    model = config.load(encoder / "config.json").model
    cfg = read_config("classify_cldr", changes)
    cfg = dataclasses.replace(
        cfg,
        model=dataclasses.replace(model, num_classes=None, pooling="mean", pooler=False),  # a new head
        data=dataclasses.replace(cfg.data, tokenizer="file", tokenizer_file=str(encoder.resolve())),
        optim=OptimConfig(schedule="linear", learning_rate=1e-4, warmup_steps=50, weight_decay=0.01),
        train=dataclasses.replace(cfg.train, start_from=str(encoder)),
    )
    run = tj.train(cfg, run=runs / "tuned", overwrite=True)
    print(f"accuracy {run.history['test/accuracy'][-1]:.2f} on the test split")
    texts = ["Dienstag, 3. März 2026", "mardi 3 mars 2026"]
    for text, (label, probability) in zip(texts, run.classify(texts), strict=True):
        print(f"{label} ({probability:.2f}): {text}")


if __name__ == "__main__":
    main(Path("runs"), *sys.argv[1:])
