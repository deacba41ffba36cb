"""The training loop, which drives the components that use the clock, the disk and the terminal."""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from tformer_jax.base.errors import RunError
from tformer_jax.data.pending import jsonable
from tformer_jax.models import registry
from tformer_jax.parallel import placement
from tformer_jax.runs import announcement, failures, hardware, provenance, run_folder, weights
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.runs.events import EventLog
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.guards import SpikeDetector, Watchdog
from tformer_jax.runs.interrupt import GracefulStop
from tformer_jax.runs.metrics import MetricsWriter
from tformer_jax.runs.profiler import Profiler
from tformer_jax.runs.progress import Figures, ProgressView
from tformer_jax.runs.setting_changes import SettingChanges
from tformer_jax.runs.start_from import find_mismatches, load_matching
from tformer_jax.tasks.evaluators.remarks import merged
from tformer_jax.tasks.evaluators.split import Evaluation, Evaluator, described, evaluators_for
from tformer_jax.train import lora, non_finite, optimizers, schedules, state
from tformer_jax.train.early_stopping import BestMetric
from tformer_jax.train.meter import STEPS_AHEAD, Meter, Values
from tformer_jax.train.step import compiling, jitted, make_train_step, training_flops

NEW_RUN: Mapping[str, Any] = {"meter": {}, "spikes": {}, "best": {}}
"""Host data of a run without a checkpoint; see `Trainer.save`."""


def run(experiment: Experiment, *, profile: bool = False) -> dict[str, Any] | None:
    """Trains from the newest checkpoint, or from the start, to the last step; then evaluates on the test split.

    A finished run is left unchanged.

    Args:
        profile: write a profiler trace of some steps into the run folder.

    Returns:
        The contents of the run folder's `result.json`; None if a signal stopped the run before its end.

    Raises:
        RunError: the run cannot continue.
    """
    if experiment.finished is not None:
        _report_finished(experiment, experiment.finished["steps"])
        return experiment.finished
    with (
        failures.as_run_errors(experiment.group),
        contextlib.closing(experiment),
        contextlib.closing(Trainer(experiment, profile=profile)) as trainer,
        trainer.events.failure_recorded(lambda: trainer.step),
    ):
        with GracefulStop(several=experiment.group.count > 1) as stop, trainer.view:
            trainer.adopt_folder()
            trainer.announce()
            while not trainer.done and not experiment.group.should_stop(trainer.step, stop.requested):
                trainer.advance()
            trainer.evaluate_last()
            trainer.save()
            trainer.watchdog.close()
            trainer.checkpointer.wait()
        if not trainer.done:
            trainer.events.write(trainer.step, "stopped", "by a signal")
            trainer.view.say(f"Stopped at step {trainer.step}; the same command with --resume continues from there.")
            return None
        return trainer.finish()


def _report_finished(experiment: Experiment, steps: int) -> None:
    experiment.close()
    if experiment.group.first:
        stopped_early = steps < experiment.cfg.train.steps
        how, setting = ("was stopped early", "patience") if stopped_early else ("finished", "steps")
        print(f"{experiment.folder} {how} at step {steps}; increase train.{setting} to continue")


class Trainer:
    """The state and components of one training run."""

    def __init__(self, experiment: Experiment, *, profile: bool = False):
        cfg, train, model, mesh = experiment.cfg, experiment.cfg.train, experiment.model, experiment.mesh
        optimizer = optimizers.build(cfg, registry.shapes(model))
        self.experiment, self.cfg = experiment, cfg
        self.schedule = jax.jit(schedules.build(cfg))
        self.batches = experiment.batches
        first = experiment.group.first
        self.fingerprint = run_folder.score_fingerprint(cfg)
        saved = run_folder.load_settings(experiment.folder) if first else {}
        self.view = ProgressView(steps=train.steps, console=None if first else Console(quiet=True))
        self.checkpointer = Checkpointer(
            run_folder.checkpoints(experiment.folder),
            keep=train.keep_checkpoints,
            every=train.checkpoint_every,
            seconds=train.checkpoint_seconds,
            permanent_every=train.permanent_every,
            keep_best=train.keep_best,
            fingerprint=self.fingerprint,
            group=experiment.group,
        )
        abstract = state.abstract(model, optimizer, cfg, mesh)
        train_step = make_train_step(model, optimizer, cfg, smoothed=experiment.smoothed_tokens)
        self.train_step = jitted(train_step, abstract, mesh)
        if self.checkpointer.latest_step() is None:
            with compiling(self.train_step, abstract, lambda: self._placed(self.batches.peek() or {})):
                self._start(self._initial_state(optimizer))
                if first_batch := self.batches.peek():
                    training_flops(cfg.model, self._placed(first_batch))  # traced while the step compiles
        else:
            start, host = self.checkpointer.restore(abstract, quarantine=True)
            self._start(start, {"settings": saved, **host})
        self.batches.start()
        self.step = self.fetched = int(self.state.step)
        self.recent: list[Mapping[str, jax.Array]] = []
        self.signatures: dict[str, str] = {}
        self.remarks: tuple[str, ...] = ()
        self.writer = MetricsWriter(experiment.folder, cfg, resume_step=self.step, recording=first)
        self.events = EventLog(experiment.folder, recording=first)
        self.watchdog = Watchdog(train.hang_seconds)
        self.profiler = Profiler(experiment.folder / "profile", first_step=self.step, wanted=profile and first)

    def _initial_state(self, optimizer: optax.GradientTransformation) -> state.TrainState:
        cfg, model, mesh = self.cfg, self.experiment.model, self.experiment.mesh
        params = None
        if self.experiment.start_from is not None:
            params = self._loaded(self.experiment.start_from, state.initial_params(model, optimizer, cfg, mesh))
        return state.create(model, optimizer, cfg, mesh, params)

    def _loaded(self, run: Path, fresh: Any) -> Any:
        """Replaces the parameters `fresh` by those of `run` that match, and reports which."""
        step, labels = self.cfg.train.start_from_step, self.experiment.corpus.labels
        group, tokenizers = self.experiment.group, self.experiment.tokenizers
        params, report = load_matching(
            fresh, self.cfg.model, run, group, labels=labels, step=step, tokenizers=tokenizers
        )
        if self.experiment.group.first:
            record = {"weights": run_folder.weights_of(run, step), **vars(report)}
            run_folder.write_json(self.experiment.folder / "start_from.json", record)
        self.view.say(f"From {run}{'' if step is None else f', step {step}'}: {report}")
        for warning in find_mismatches(self.cfg.train, self.cfg.model, self.experiment.tokenizers, run):
            self.view.say(warning)
        return params

    def _start(self, start: state.TrainState, host: Mapping[str, Any] = NEW_RUN) -> None:
        self.state, self.meter = start, Meter(**host["meter"])
        best = host["best"] if host.get("fingerprint", self.fingerprint) == self.fingerprint else {}
        self.evaluated_at, self.last_evaluation = host.get("evaluated_at", int(start.step)), dict[str, float]()
        self.spikes, self.best = SpikeDetector(**host["spikes"]), BestMetric(self.cfg.train, **best)
        changed = run_folder.changed_settings(host.get("settings", {}), self.cfg)
        self.changes = SettingChanges(int(start.step), changed, host.get("changes", []))
        if "batches" in host:
            self.batches.set_state(host["batches"])

    @property
    def done(self) -> bool:
        """Whether the last step is done, or early stopping ends the run."""
        return self.step >= self.cfg.train.steps or self.best.exhausted

    def adopt_folder(self) -> None:
        """Makes `cfg` the config of the run folder, and writes `model.json` there."""
        if self.experiment.group.first:
            run_folder.adopt(self.experiment.folder, self.cfg)
            facts = announcement.model_facts(self.experiment, self.state.params)
            run_folder.write_json(self.experiment.folder / "model.json", facts)
            run_folder.write_json(self.experiment.folder / "data.json", announcement.data_facts(self.experiment))

    def announce(self) -> None:
        """Prints the first line and the warnings of the run, and records its start."""
        self.view.begin(self.step)
        self.view.say(announcement.first_line(self.experiment, self.state.params, self.step))
        self.events.write(self.step, "resume" if self.step else "start", announcement.devices(self.experiment))
        if text := "; ".join(self.changes.texts):
            self.view.say(f"Changed settings from step {self.step} on: {text}")
            self.events.write(self.step, "settings", text)
        short = self.profiler.shortage(self.cfg.train.steps)
        data = announcement.data_lines(self.experiment)
        for warning in (*data, *self.cfg.without_effect(), *hardware.dtype_warnings(self.cfg), short):
            if warning:
                self.view.say(warning)

    def advance(self) -> None:
        """Runs one optimizer step, and the logging, evaluation and saving that are due after it.

        Does not wait for the step: the next batch is transferred to the device while this one is computed (`meter.add`
        bounds the number of steps in flight).
        """
        waited = self.batches.waited
        batch = self._placed(next(self.batches))
        self.state, metrics = self.train_step(self.state, batch)
        self.recent = [*self.recent[-STEPS_AHEAD:], batch]
        done = self.meter.add(metrics, flops=training_flops(self.cfg.model, batch), waited=self.batches.waited - waited)
        self.step += 1
        self._record_finished(done)
        self.watchdog.beat()
        self.profiler.after_step(self.step, self.state)
        self._run_due_actions()

    def _placed(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, jax.Array]:
        return placement.shard_batch(self.experiment.mesh, batch, self.experiment.shards.own)

    def _run_due_actions(self) -> None:
        train, last = self.cfg.train, self.step == self.cfg.train.steps
        evaluates = last or self.step % train.eval_every == 0
        if last or self.step % train.log_every == 0 or (evaluates and train.patience):  # may be the last evaluation
            self.log()
        if evaluates:
            self.validate()
            if train.keep_best:
                self.save()
        scheduled = self.step % train.checkpoint_every == 0 or (
            train.permanent_every and not self.step % train.permanent_every
        )
        if not last and (scheduled or (self.step % train.log_every == 0 and self.checkpointer.overdue(self.step))):
            self.save()

    def validate(self) -> None:
        """Evaluates the newest weights on the validation split, for `train.metric`."""
        metrics = self.evaluate("validation", self.validators, weights.to_evaluate(self.cfg, self.state))
        self.best.update(metrics)
        self.evaluated_at, self.last_evaluation = self.step, metrics

    def evaluate_last(self) -> None:
        """Logs and validates the last step if a resumed run ends at a checkpoint without an evaluation."""
        if self.step == self.cfg.train.steps != self.evaluated_at:
            if self.meter.unread:
                self.log()
            self.validate()

    def _record_finished(self, steps: list[Values]) -> None:
        """Checks the losses of finished steps for spikes and non-finite values.

        Raises:
            RunError: `train.max_skipped_steps` consecutive steps were not finite.
        """
        for values in steps:
            self.fetched += 1
            warning = self.spikes.detect(values["loss"])
            if warning:
                self.view.say(f"step {self.fetched}: {warning}")
                self.events.write(self.fetched, "spike", warning)
            if values["skipped"]:
                reason = "skipped, because its loss or gradient is not finite"
                self.view.say(f"step {self.fetched}: {reason}")
                self.events.write(self.fetched, "skipped", reason)
            if values["skipped"] >= self.cfg.train.max_skipped_steps:
                raise self._not_finite(int(values["skipped"]))

    def _not_finite(self, steps: int) -> RunError:
        batch = placement.to_host(self.recent[self.fetched - self.step - 1])  # the last one is that of `self.step`
        key = jax.random.fold_in(jax.random.key(self.cfg.seed), self.fetched - 1)
        with self.watchdog.paused():
            first = non_finite.origin(self.experiment.model, placement.to_host(self.state.params), batch, key, self.cfg)
        saved = self.checkpointer.latest_step()
        return RunError(
            f"{steps} consecutive steps up to step {self.fetched} had a non-finite loss or gradient ({first}; last "
            f"checkpoint: {f'step {saved}' if saved else 'none'}); repeat the command with --resume and "
            f"such settings as {non_finite.milder_flags(self.cfg)}"
        )

    def log(self) -> None:
        """Records and shows the metrics of the steps since the last record."""
        self._record_finished(self.meter.fetch_all())
        updates = self.step - self.meter.skipped_steps
        devices = list(self.experiment.mesh.devices.flat)
        memory, peak = hardware.memory_bytes(devices), hardware.peak_flops(devices)
        metrics = self.meter.read() | {
            "learning_rate": float(self.schedule(max(updates - 1, 0))),
            "tokens": self.meter.tokens,
            "seconds": self.meter.seconds,
            "memory_bytes": memory,
        }
        self.writer.write(self.step, "train", metrics)
        every, steps = self.cfg.train.eval_every, self.cfg.train.steps
        next_evaluation = min(self.step + every - self.step % every, steps) if self.step < steps else None
        self.view.update(Figures(self.step, metrics, memory, peak, next_evaluation))

    @functools.cached_property
    def validators(self) -> list[Evaluator]:
        """The evaluators of the validation split, cached so that each compiles once."""
        return self._evaluators("validation", self.cfg.eval.examples)

    def evaluate(self, split: str, evaluators: list[Evaluator], params: Any) -> dict[str, float]:
        """Runs the evaluators on `params`, and records and shows their metrics and samples."""
        self._record_finished(self.meter.fetch_all())
        found = self._measured(evaluators, params)
        self.writer.write(self.step, split, found.metrics)
        which = described(self.cfg, self.experiment.corpus, split)
        if self.experiment.group.first:
            outputs = [vars(output) for output in found.outputs]
            record = {"step": self.step, "split": which, "signatures": self.signatures, "outputs": outputs}
            record |= {"remarks": found.remarks} | ({"losses": vars(found.losses)} if found.losses else {})
            run_folder.write_outputs(self.experiment.folder, split, record)
        samples = found.outputs[: self.cfg.eval.samples]
        self.view.evaluation(f"step {self.step} {which}", found.metrics, samples, found.remarks)
        self.meter.restart()
        return found.metrics

    def _measured(self, evaluators: list[Evaluator], params: Any) -> Evaluation:
        """Runs the evaluators on `params`."""
        with self.watchdog.paused():
            found = merged(evaluator(params) for evaluator in evaluators)
        self.signatures |= found.signatures
        self.remarks = found.remarks
        return found

    def save(self) -> None:
        """Starts saving a checkpoint of this step, with its score if it was evaluated, after all records."""
        self._record_finished(self.meter.fetch_all())
        self.writer.flush()
        host = {
            "batches": jsonable(self.batches.get_state()),
            "meter": self.meter.state(),
            "spikes": self.spikes.state(),
            "best": self.best.state(),
            "fingerprint": self.fingerprint,
            "evaluated_at": self.evaluated_at,
            "settings": run_folder.resumable_settings(self.cfg),
            "changes": self.changes.of_training(self.step),
        }
        evaluated = self.last_evaluation and self.evaluated_at == self.step
        score = self.best.score(self.last_evaluation) if evaluated else None
        with self.watchdog.paused():
            self.checkpointer.save(self.step, self.state, host, score=score)

    def finish(self) -> dict[str, Any]:
        """Evaluates the final weights on the test split, saves them and writes `result.json`.

        Weights of other steps than the last are evaluated on the validation split, too, without a record in the
        metrics.
        """
        folder, kind = self.experiment.folder, self.cfg.train.weights
        reason = ""
        if self.best.exhausted:
            reason = f"{self.cfg.train.metric} has not improved in {self.best.evaluations_since} evaluations"
            self.view.say(f"Stopped at step {self.step}: {reason}")
        params, steps = weights.final_params(self.cfg, self.state, self.checkpointer)
        if shortage := weights.shortage(self.cfg.train, steps):
            self.view.say(shortage)
            self.events.write(self.step, "fewer_averaged", shortage)
        weights.save(folder, params, kind, steps, self.step, self.experiment.group)
        validation = {}
        if kind not in weights.LAST_STEP:
            validation["validation"] = self._measured(self.validators, params).metrics
            self.view.evaluation(f"{kind} weights validation", validation["validation"])
        result = {
            "name": self.cfg.name,
            **provenance.collect(),
            "seed": self.cfg.seed,
            "parameters": optax.tree.size(lora.base(self.state.params)),
            "steps": self.step,
            "weights": {"kind": kind, "steps": steps},
            "attention_backends": announcement.attention_backends(self.experiment),
            **({"changed_settings": changes} if (changes := self.changes.of_training(self.step)) else {}),
            **self.meter.totals(),
            **validation,
            "test": self.evaluate("test", self._evaluators("test", limit=0), params),
            "signatures": self.signatures,
            "remarks": self.remarks,
            "data": announcement.data_facts(self.experiment) if self.experiment.group.first else {},
        }
        path = folder / "result.json"
        if self.experiment.group.first:
            run_folder.write_json(path, result)
        self.events.write(self.step, "finished", reason)
        self.view.say(f"Trained {self.step} steps in {result['seconds']:.0f} s; result in {path}")
        return result

    def close(self) -> None:
        """Stops the watchdog and the profiler, and waits for pending writes."""
        self.watchdog.close()
        self.profiler.close()
        self.checkpointer.close()
        self.writer.close()

    def _evaluators(self, split: str, limit: int) -> list[Evaluator]:
        experiment = self.experiment
        parts = experiment.model, experiment.corpus, experiment.tokenizers
        return evaluators_for(self.cfg, *parts, split, limit, shards=experiment.shards)
