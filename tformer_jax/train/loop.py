"""The training loop: the only place where a run touches the clock, the disk and the terminal."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tformer_jax.eval.evaluators import Sample, evaluators_for
from tformer_jax.parallel import rules
from tformer_jax.special_tokens import PAD
from tformer_jax.train import optimizers, provenance, run_folder, schedules, state
from tformer_jax.train.checkpoint import Checkpointer
from tformer_jax.train.experiment import Experiment
from tformer_jax.train.interrupt import GracefulStop
from tformer_jax.train.metrics import MetricsWriter
from tformer_jax.train.progress import Figures, ProgressView
from tformer_jax.train.step import make_train_step

INPUTS = ("source", "target_in", "tokens")


@dataclasses.dataclass
class Counters:
    """What a run has used so far; saved with each checkpoint."""

    tokens: int = 0
    seconds: float = 0.0


def run(experiment: Experiment) -> dict[str, Any] | None:
    """Trains from the newest checkpoint, or from the start, to the last step; then evaluates on the test split.

    Returns:
        The result as written to the run folder's `result.json`; None when a signal stopped the run before its end.
    """
    steps = experiment.cfg.train.steps
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(contextlib.closing(Trainer(experiment)))
        trainer.view = stack.enter_context(ProgressView(first_step=trainer.step, steps=steps))
        stop = stack.enter_context(GracefulStop())
        trainer.announce()
        while trainer.step < steps and not stop.requested:
            trainer.advance()
        trainer.save()
        if trainer.step < steps:
            trainer.view.say(f"Stopped at step {trainer.step}; the same command with --resume goes on from there.")
            return None
        return trainer.finish()


class Trainer:
    """The moving parts of one run."""

    def __init__(self, experiment: Experiment):
        cfg = experiment.cfg
        optimizer = optimizers.build(cfg)
        self.experiment, self.cfg = experiment, cfg
        self.schedule = schedules.build(cfg)
        self.batches = experiment.batches()
        self.batch_sharding = rules.batch_sharding(experiment.mesh)
        self.checkpointer = Checkpointer(run_folder.checkpoints(experiment.folder), keep=cfg.train.keep_checkpoints)
        self.counters = Counters()
        if self.checkpointer.latest_step() is None:
            self.state = state.create(experiment.model, optimizer, cfg.seed, experiment.mesh)
        else:
            self.state, host = self.checkpointer.restore(state.abstract(experiment.model, optimizer, experiment.mesh))
            self.batches.set_state(host["batches"])
            self.counters = Counters(**host["counters"])
        self.step = int(self.state.step)
        train_step = make_train_step(
            experiment.model, optimizer, label_smoothing=cfg.train.label_smoothing, seed=cfg.seed
        )
        self.train_step = jax.jit(train_step, donate_argnums=0)
        self.pending: list[dict[str, jax.Array]] = []
        self.pending_tokens = 0
        self.clock = time.perf_counter()
        self.logged_at = self.clock
        self.writer = MetricsWriter(experiment.folder, resume_step=self.step)
        self.view: ProgressView

    def announce(self) -> None:
        """Says what is about to run, and where."""
        device = provenance.hardware()["devices"]
        self.view.say(
            f"{self.cfg.name}: {state.parameter_count(self.state.params):,} parameters on {device}, "
            f"run folder {self.experiment.folder}" + (f", continuing from step {self.step}" if self.step else "")
        )

    def advance(self) -> None:
        """One optimizer step, and whatever is due after it."""
        batch = next(self.batches)
        self.pending_tokens += sum(int(np.count_nonzero(batch[key] != PAD)) for key in INPUTS if key in batch)
        self.state, metrics = self.train_step(self.state, jax.device_put(batch, self.batch_sharding))
        self.pending.append(metrics)
        self.step += 1
        last = self.step == self.cfg.train.steps
        if last or self.step % self.cfg.train.log_every == 0:
            self.log()
        if not last and self.step % self.cfg.train.eval_every == 0:
            self.evaluate("validation", self.cfg.eval.examples)
        if not last and self.step % self.cfg.train.checkpoint_every == 0:
            self.save()

    def log(self) -> None:
        """Fetches the metrics of the steps since the last record, and writes their means."""
        fetched = jax.device_get(self.pending)
        labels = np.array([metrics["labels"] for metrics in fetched])
        loss = float(np.average([metrics["loss"] for metrics in fetched], weights=labels))
        grad_norm = float(np.mean([metrics["grad_norm"] for metrics in fetched]))
        self._count_time()
        speed = self.pending_tokens / (self.clock - self.logged_at)
        rate = float(self.schedule(self.step - 1))
        self.writer.write(
            self.step, "train", {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate, "tokens_per_second": speed}
        )
        self.view.update(Figures(self.step, loss, rate, speed))
        self.pending, self.pending_tokens, self.logged_at = [], 0, self.clock

    def evaluate(self, split: str, limit: int) -> dict[str, float]:
        """Runs every evaluator of this model family on a split, and shows and records what they found."""
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        experiment = self.experiment
        for evaluator in evaluators_for(
            self.cfg, experiment.model, experiment.corpus, experiment.tokenizers, split, limit
        ):
            found = evaluator(self.state.params)
            metrics |= found.metrics
            samples += found.samples
        self.writer.write(self.step, split, metrics)
        self.view.evaluation(f"step {self.step} {split}", metrics, samples)
        self._count_time()
        self.logged_at = self.clock
        return metrics
