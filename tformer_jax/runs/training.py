"""Trains an experiment in its run folder: the loop, and the actions that use the clock, the disk and the terminal."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from rich.console import Console

from tformer_jax.base.errors import RunError, noted
from tformer_jax.base.numbers import counted
from tformer_jax.config import Config
from tformer_jax.data.columns import jsonable
from tformer_jax.models.losses import Teacher
from tformer_jax.parallel import placement
from tformer_jax.runs import announcement, hardware, provenance, run_folder, weights
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.runs.endings import GracefulStop, as_run_errors
from tformer_jax.runs.evaluations import Evaluations
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.guards import Watchdog
from tformer_jax.runs.initial_state import start_or_restore
from tformer_jax.runs.profiler import Profiler
from tformer_jax.runs.progress import Figures, ProgressView, TimeLeft
from tformer_jax.runs.record import Record, SettingChanges
from tformer_jax.train import parameters, schedules
from tformer_jax.train.loop import Action, Trainer
from tformer_jax.train.meter import Meter
from tformer_jax.train.monitor import NotFinite, SpikeDetector, StepMonitor
from tformer_jax.train.state import TrainState

if TYPE_CHECKING:
    from tformer_jax.data.stages import Begun

Callback = Callable[[int, TrainState, Mapping[str, float]], None]
"""Called with the step, the state and the metrics of the step, named as in `curves.history`."""
MetricFunctions = Mapping[str, Callable[..., float]]
"""Metrics by name, functions of outputs and references."""


def run(
    experiment: Experiment,
    *,
    profile: bool = False,
    callbacks: Sequence[Callback] = (),
    metrics: MetricFunctions | None = None,
) -> dict[str, Any] | None:
    """Trains from the newest checkpoint, or from the start, to the last step; then evaluates on the test split.

    A finished run is left unchanged.

    Args:
        profile: write a profiler trace of some steps into the run folder.
        callbacks: called after each step that is recorded.
        metrics: further metrics of evaluations.

    Returns:
        The contents of the run folder's `result.json`; None if a signal stopped the run before its end.

    Raises:
        RunError: the run cannot continue.
    """
    if experiment.finished is not None:
        _report_finished(experiment, experiment.finished["steps"])
        return experiment.finished
    with (
        as_run_errors(experiment.group),
        contextlib.closing(experiment),
        contextlib.closing(Training(experiment, profile=profile, callbacks=callbacks, metrics=metrics)) as training,
        training.record.events.failure_recorded(lambda: training.trainer.step),
    ):
        with GracefulStop(several=experiment.group.count > 1) as stop, training.record.view:
            training.begin()
            training.train(stop)
            step = training.trainer.step
            stopped = not training.done or experiment.group.should_stop(step, stop.requested)
        if stopped:
            training.record.events.write(step, "stopped", "by a signal")
            training.record.view.say(f"Stopped at step {step}; the same command with --resume continues from there.")
            return None
        return training.finish()


def _report_finished(experiment: Experiment, steps: int) -> None:
    experiment.close()
    if experiment.group.first:
        stopped_early = steps < experiment.cfg.train.steps
        how, setting = ("was stopped early", "patience") if stopped_early else ("finished", "steps")
        print(f"{experiment.folder} {how} at step {steps}; increase train.{setting} to continue")


def best_so_far(host: Mapping[str, Any], fingerprint: int) -> dict[str, Any]:
    """Returns the state of `BestMetric` in a checkpoint, if its scores are of settings with this fingerprint."""
    return host["best"] if host["fingerprint"] == fingerprint else {}


def _load_teacher(experiment: Experiment) -> Teacher | None:
    """Returns the teacher of a run; None without one."""
    if experiment.cfg.train.teacher is None:
        return None
    from tformer_jax.runs import teacher

    return teacher.load(experiment.cfg.train, experiment.mesh, experiment.group)


class Training:
    """A trainer with the components of its run, and the actions between steps."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        profile: bool = False,
        callbacks: Sequence[Callback] = (),
        metrics: MetricFunctions | None = None,
    ):
        cfg, train, folder = experiment.cfg, experiment.cfg.train, experiment.folder
        self.experiment = experiment
        self.checkpointer = Checkpointer(
            run_folder.checkpoints(folder),
            keep=train.keep_checkpoints,
            every=train.checkpoint_every,
            seconds=train.checkpoint_seconds,
            permanent_every=train.permanent_every,
            keep_best=train.keep_best,
            fingerprint=run_folder.score_fingerprint(cfg),
            group=experiment.group,
        )
        view = ProgressView(steps=train.steps, console=None if experiment.group.first else Console(quiet=True))
        self.teacher = _load_teacher(experiment)
        train_step, state, host = start_or_restore(experiment, self.checkpointer, view.say, self.teacher)
        step = int(state.step)
        self.record = Record(experiment, view, step)
        self.watchdog = Watchdog(train.hang_seconds, self._report_hung)
        monitor = StepMonitor(
            SpikeDetector(**host["spikes"]),
            checked=step,
            max_skipped=train.max_skipped_steps,
            report=self.record.report_event,
        )
        place = functools.partial(placement.shard_batch, experiment.mesh, own=experiment.shards.own)
        meter = Meter(**host["meter"])
        taught_by = [self.teacher.params] if self.teacher else []
        self.trainer = Trainer(
            cfg,
            train_step,
            state,
            experiment.batches,
            place,
            meter=meter,
            monitor=monitor,
            taught_by=taught_by,
            around_step=self.watchdog.around_step,
        )
        self.evaluations = Evaluations(
            experiment,
            self.record,
            best=best_so_far(host, self.checkpointer.fingerprint),
            evaluated_at=host.get("evaluated_at", step),
            own=metrics or {},
        )
        self.callbacks, self._logged = callbacks, dict[str, float]()
        changed = run_folder.changed_settings(host["settings"], cfg)
        drops = cfg.model.attention_dropout > 0
        self.changes = SettingChanges(step, changed, host.get("changes", []), attention_dropout=drops)
        self._announced_stages = len(self._stages_begun())
        self.profiler = Profiler(folder / "profile", first_step=step, wanted=profile and experiment.group.first)

    @property
    def cfg(self) -> Config:
        """The config of the run."""
        return self.experiment.cfg

    @property
    def done(self) -> bool:
        """Whether the last step is done, or early stopping ends the run."""
        return self.trainer.step >= self.cfg.train.steps or self.evaluations.best.exhausted

    def begin(self) -> None:
        """Writes the config and facts into the run folder, prints the first lines, and records the start."""
        experiment, record, step = self.experiment, self.record, self.trainer.step
        if experiment.group.first:
            run_folder.adopt(experiment.folder, self.cfg)
            record.write_json("model.json", announcement.model_facts(experiment, self.trainer.state.params))
            record.write_json("data.json", announcement.data_facts(experiment))
        record.view.say(announcement.opening_line(experiment, self.trainer.state.params, step))
        record.events.write(step, "resume" if step else "start", announcement.devices(experiment))
        if text := "; ".join(self.changes.texts):
            record.view.say(f"Changed settings from step {step} on: {text}")
            record.events.write(step, "settings", text)
        short = self.profiler.shortage(self.cfg.train.steps)
        data = announcement.data_lines(experiment)
        for warning in (*data, *self.cfg.without_effect(), *hardware.dtype_warnings(self.cfg), short):
            if warning:
                record.view.say(warning)

    def train(self, stop: GracefulStop) -> None:
        """Trains until the run is done or stopped, and saves the last step."""
        group, trainer = self.experiment.group, self.trainer
        try:
            trainer.run(self.actions(), lambda: self.done or group.should_stop(trainer.step, stop.requested))
            if trainer.step == self.cfg.train.steps != self.evaluations.evaluated_at:  # resumed at the last step
                if trainer.meter.unread:
                    self.log()
                self.validate()
            self.save()
        except NotFinite as error:
            raise self._explained(error) from error
        self.watchdog.close()
        self.checkpointer.wait()

    def actions(self) -> list[Action]:
        """Returns the actions between steps, in order, each with the steps after which it is due."""
        return [
            (lambda step: True, self.watchdog.beat),
            (lambda step: True, lambda: self.profiler.after_step(self.trainer.step, self.trainer.state)),
            (self._logs, self.log),
            (self._validates, self.validate),
            (lambda step: bool(self.callbacks) and (self._logs(step) or self._validates(step)), self._call_back),
            (self._saves, self.save),
            (lambda step: bool(self.cfg.data.stages), self._announce_stages),
        ]

    def _logs(self, step: int) -> bool:
        last_evaluation = self._validates(step) and bool(self.cfg.train.patience)  # patience may end the run here
        return step == self.cfg.train.steps or step % self.cfg.train.log_every == 0 or last_evaluation

    def _validates(self, step: int) -> bool:
        return step == self.cfg.train.steps or step % self.cfg.train.eval_every == 0

    def _saves(self, step: int) -> bool:
        train = self.cfg.train
        if train.keep_best and self._validates(step):
            return True
        if step == train.steps:  # saved after the loop
            return False
        scheduled = step % train.checkpoint_every == 0 or (train.permanent_every and step % train.permanent_every == 0)
        return bool(scheduled) or (step % train.log_every == 0 and self.checkpointer.overdue(step))

    def _report_hung(self, problem: str) -> None:
        self.record.events.write(self.trainer.step, "failed", problem)

    def _call_back(self) -> None:
        step = self.trainer.step
        metrics = dict(self._logged) if self._logs(step) else {}
        if self._validates(step):
            metrics |= {f"validation/{name}": value for name, value in self.evaluations.last.items()}
        with self.watchdog.paused():
            for number, callback in enumerate(self.callbacks):
                with noted(f"in callbacks[{number}], after step {step}"):
                    callback(step, self.trainer.state, dict(metrics))
        self.trainer.meter.restart()

    def _stages_begun(self) -> "list[Begun]":
        if not self.cfg.data.stages:
            return []
        from tformer_jax.data.stages import stages_begun

        return stages_begun(self.trainer.batches.get_state())

    def _announce_stages(self) -> None:
        """Announces the stages of data that have begun, with the last step before."""
        begun, stages = self._stages_begun(), self.cfg.data.stages
        for number in range(self._announced_stages, len(begun)):
            message = f"stage {number + 1} of {len(stages)}: {stages[number]}"
            self.record.report_event(begun[number].step, "stage", message)
        self._announced_stages = len(begun)

    def log(self) -> None:
        """Records and shows the metrics of the steps since the last record."""
        self.trainer.check_all()
        with self.watchdog.paused():
            self._write_metrics()

    def _write_metrics(self) -> None:
        trainer, meter = self.trainer, self.trainer.meter
        updates = trainer.step - meter.skipped_steps
        devices = list(self.experiment.mesh.devices.flat)
        memory, peak = hardware.memory_bytes(devices), hardware.peak_flops(devices)
        rate = {} if self.experiment.optimizer else {"learning_rate": float(self._schedule(max(updates - 1, 0)))}
        metrics = meter.read() | rate
        metrics |= {"tokens": meter.tokens, "seconds": meter.seconds, "memory_bytes": memory}
        self._logged = metrics
        self.record.metrics.write(trainer.step, "train", metrics)
        every, steps = self.cfg.train.eval_every, self.cfg.train.steps
        next_evaluation = min(trainer.step + every - trainer.step % every, steps) if trainer.step < steps else None
        left, evaluating = meter.seconds_per_step * (steps - trainer.step), self.evaluations.seconds_left(trainer.step)
        time_left = TimeLeft(left + (evaluating or 0), is_whole=evaluating is not None)
        self.record.view.update(Figures(trainer.step, metrics, memory, peak, next_evaluation, time_left))

    @functools.cached_property
    def _schedule(self) -> Any:
        return jax.jit(schedules.build(self.cfg))

    def validate(self) -> None:
        """Evaluates the newest weights on the validation split, for `train.metric`."""
        self.trainer.check_all()
        with self.watchdog.paused():
            self.evaluations.validate(self.trainer.step, weights.to_evaluate(self.cfg, self.trainer.state))
        self.trainer.meter.restart()

    def save(self) -> None:
        """Starts saving a checkpoint of this step, with its score if it was evaluated, after all records."""
        trainer = self.trainer
        trainer.check_all()
        host = {
            "batches": jsonable(trainer.batches.get_state()),
            "meter": trainer.meter.state(),
            "spikes": trainer.monitor.spikes.state(),
            "best": self.evaluations.best.state(),
            "fingerprint": self.checkpointer.fingerprint,
            "evaluated_at": self.evaluations.evaluated_at,
            "settings": run_folder.resumable_settings(self.cfg),
            "changes": self.changes.of_training(trainer.step),
        }
        with self.watchdog.paused():
            self.record.metrics.flush()
            score = self.evaluations.score(trainer.step)
            self.checkpointer.save(trainer.step, trainer.state, host, score=score)

    def finish(self) -> dict[str, Any]:
        """Evaluates the final weights on the test split, saves them and writes `result.json`.

        Weights of other steps than the last are evaluated on the validation split, too, without a record in the
        metrics.
        """
        experiment, kind, step = self.experiment, self.cfg.train.weights, self.trainer.step
        reason = ""
        if (best := self.evaluations.best).exhausted:
            reason = f"{self.cfg.train.metric} has not improved in {counted(best.evaluations_since, 'evaluation')}"
            self.record.view.say(f"Stopped at step {step}: {reason}")
        params, steps = weights.final_params(self.cfg, self.trainer.state, self.checkpointer)
        if shortage := weights.shortage(self.cfg.train, steps):
            self.record.announce_event(step, "fewer_averaged", shortage)
        weights.save(experiment.folder, params, kind, steps, step, experiment.group)
        result = self._facts(kind, steps)
        if kind not in weights.LAST_STEP:
            result["validation"] = self.evaluations.validate_final(kind, params)
        result["test"] = self.evaluations.test(step, params)
        result |= {"signatures": self.evaluations.signatures, "remarks": self.evaluations.remarks}
        result["data"] = announcement.data_facts(experiment) if experiment.group.first else {}
        self.record.write_json("result.json", result)
        self.record.events.write(step, "finished", reason)
        path = experiment.folder / "result.json"
        self.record.view.say(f"Trained {counted(step, 'step')} in {result['seconds']:.0f} s; result in {path}")
        return result

    def _facts(self, kind: str, steps: list[int]) -> dict[str, Any]:
        """Returns what the result says of the run, without its metrics."""
        step = self.trainer.step
        changes = self.changes.of_training(step)
        return {
            "name": self.cfg.name,
            **provenance.collect(list(self.experiment.mesh.devices.flat)),
            "seed": self.cfg.seed,
            "parameters": optax.tree.size(parameters.base(self.trainer.state.params)),
            "steps": step,
            "weights": {"kind": kind, "steps": steps},
            "attention_backends": announcement.attention_backends(self.experiment),
            **({"changed_settings": changes} if changes else {}),
            **({"teacher": run_folder.read_json(self.experiment.folder / run_folder.TEACHER)} if self.teacher else {}),
            **self.trainer.meter.totals(),
        }

    def _explained(self, error: NotFinite) -> RunError:
        """Returns the error of a run that diverged, with the first value that is not finite and what to change."""
        from tformer_jax.train import non_finite

        params = placement.to_host(self.trainer.state.params)
        batch: Mapping[str, np.ndarray] = placement.to_host(error.batch)
        key = jax.random.fold_in(jax.random.key(self.cfg.seed), error.step - 1)
        taught = self.teacher and self.teacher._replace(params=placement.to_host(self.teacher.params))
        with self.watchdog.paused():
            first = non_finite.origin(self.experiment.model, params, batch, key, self.cfg, taught)
        saved = self.checkpointer.steps()
        last = f"last checkpoint: {f'step {saved[0]}' if saved else 'none'}"
        ruined = [str(step) for step in saved if step >= error.step - error.steps]  # no update came after them
        names = f"{' and '.join(ruined)} in {self.checkpointer.folder}"
        before = f"move {names} elsewhere, which hold the same parameters, and " if ruined else ""
        return RunError(f"{error} ({first}; {last}); {before}{non_finite.advice(self.cfg)}")

    def close(self) -> None:
        """Stops the watchdog and the profiler, and waits for pending writes."""
        self.watchdog.close()
        self.profiler.close()
        self.checkpointer.close()
        self.record.close()
