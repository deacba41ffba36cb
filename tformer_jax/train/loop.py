"""The training loop: the only place where a run touches the clock, the disk and the terminal."""

import contextlib
import functools
from typing import Any

import jax

from tformer_jax.data.waiting import jsonable
from tformer_jax.eval.evaluators import Evaluator, Sample, evaluators_for
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.train import optimizers, provenance, run_folder, schedules, state
from tformer_jax.train.checkpoint import Checkpointer
from tformer_jax.train.experiment import Experiment
from tformer_jax.train.interrupt import GracefulStop
from tformer_jax.train.meter import Meter
from tformer_jax.train.metrics import MetricsWriter
from tformer_jax.train.progress import Figures, ProgressView
from tformer_jax.train.step import make_train_step


def run(experiment: Experiment) -> dict[str, Any] | None:
    """Trains from the newest checkpoint, or from the start, to the last step; then evaluates on the test split.

    Returns:
        The result as written to the run folder's `result.json`; None when a signal stopped the run before its end.
    """
    steps = experiment.cfg.train.steps
    with contextlib.closing(Trainer(experiment)) as trainer, GracefulStop() as stop:
        with trainer.view:
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
        cfg, model, mesh = experiment.cfg, experiment.model, experiment.mesh
        optimizer = optimizers.build(cfg)
        self.experiment, self.cfg = experiment, cfg
        self.schedule = schedules.build(cfg)
        self.batches = experiment.batches
        self.batch_sharding = rules.batch_sharding(mesh)
        self.checkpointer = Checkpointer(run_folder.checkpoints(experiment.folder), keep=cfg.train.keep_checkpoints)
        if self.checkpointer.latest_step() is None:
            self.state = state.create(model, optimizer, cfg.seed, mesh)
            self.meter = Meter()
        else:
            self.state, host = self.checkpointer.restore(state.abstract(model, optimizer, mesh))
            self.batches.set_state(host["batches"])
            self.meter = Meter(**host["totals"])
        self.batches.start()
        self.step = int(self.state.step)
        self.train_step = jax.jit(
            make_train_step(model, optimizer, label_smoothing=cfg.train.label_smoothing, seed=cfg.seed),
            donate_argnums=0,
        )
        self.writer = MetricsWriter(experiment.folder, resume_step=self.step)
        self.view = ProgressView(first_step=self.step, steps=cfg.train.steps)

    def announce(self) -> None:
        """Says what is about to run, and where."""
        self.view.say(
            f"{self.cfg.name}: {state.parameter_count(self.state.params):,} parameters on "
            f"{provenance.hardware()['devices']}, run folder {self.experiment.folder}"
            + (f", continuing from step {self.step}" if self.step else "")
        )

    def advance(self) -> None:
        """One optimizer step, and whatever is due after it.

        The step is not waited for: the next batch travels to the device while this one is computed (`meter.add` keeps
        the loop from running further ahead).
        """
        waited = self.batches.waited
        batch = next(self.batches)
        self.state, metrics = self.train_step(self.state, jax.device_put(batch, self.batch_sharding))
        self.meter.add(metrics, registry.count_tokens(self.cfg.model, batch), waited=self.batches.waited - waited)
        self.step += 1
        train, last = self.cfg.train, self.step == self.cfg.train.steps
        if last or self.step % train.log_every == 0:
            self.log()
        if last or self.step % train.eval_every == 0:
            self.evaluate("validation", self.validators)
        if not last and self.step % train.checkpoint_every == 0:
            self.save()

    def log(self) -> None:
        """Writes and shows the metrics of the steps since the last record."""
        metrics = self.meter.read() | {"learning_rate": float(self.schedule(self.step - 1))}
        self.writer.write(self.step, "train", metrics)
        shown = (metrics[name] for name in ("loss", "learning_rate", "tokens_per_second", "data_wait_percent"))
        self.view.update(Figures(self.step, *shown))

    @functools.cached_property
    def validators(self) -> list[Evaluator]:
        """The evaluators of the validation split, kept so that each compiles once."""
        return self._evaluators("validation", self.cfg.eval.examples)

    def evaluate(self, split: str, evaluators: list[Evaluator]) -> dict[str, float]:
        """Shows and records what the evaluators find."""
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        for evaluator in evaluators:
            found = evaluator(self.state.params)
            metrics |= found.metrics
            samples += found.samples
        self.writer.write(self.step, split, metrics)
        self.view.evaluation(f"step {self.step} {split}", metrics, samples)
        self.meter.restart()
        return metrics

    def save(self) -> None:
        """Starts saving a checkpoint of this step."""
        self.checkpointer.save(
            self.step, self.state, {"batches": jsonable(self.batches.get_state()), "totals": self.meter.totals()}
        )

    def finish(self) -> dict[str, Any]:
        """Evaluates on the whole test split and writes `result.json`."""
        result = {
            "name": self.cfg.name,
            **provenance.collect(),
            "seed": self.cfg.seed,
            "parameters": state.parameter_count(self.state.params),
            "steps": self.step,
            **self.meter.totals(),
            "test": self.evaluate("test", self._evaluators("test", limit=0)),
        }
        path = self.experiment.folder / "result.json"
        run_folder.write_json(path, result)
        self.view.say(f"Trained {self.step} steps in {result['seconds']:.0f} s; result in {path}")
        return result

    def close(self) -> None:
        """Waits for pending writes and stops the loader."""
        self.batches.close()
        self.checkpointer.close()
        self.writer.close()

    def _evaluators(self, split: str, limit: int) -> list[Evaluator]:
        experiment = self.experiment
        return evaluators_for(self.cfg, experiment.model, experiment.corpus, experiment.tokenizers, split, limit)
