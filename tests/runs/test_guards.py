"""The folder lock, the watchdog, the spike detector, steps that are not finite, and early stopping."""

import contextlib
import errno
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import numpy as np
import pytest

from tests.runs.conftest import small_config
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.config import Config, TrainConfig
from tformer_jax.parallel.multihost import ProcessGroup
from tformer_jax.runs import endings, experiment, guards
from tformer_jax.runs.endings import GracefulStop
from tformer_jax.runs.guards import HUNG, FolderLock, Watchdog
from tformer_jax.runs.run_folder import read_records
from tformer_jax.runs.training import Training
from tformer_jax.train import non_finite
from tformer_jax.train.monitor import BestMetric, NotFinite, SpikeDetector, StepMonitor


def test_the_first_interrupt_is_answered(capfd):
    with GracefulStop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "Stopping after this step, with a checkpoint; press Ctrl-C again to stop without" in capfd.readouterr().err


def test_an_ignored_interrupt_stays_ignored():
    """As in a background command of a shell script, which the terminal's Ctrl-C reaches, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_process_per_folder(tmp_path):
    run = tmp_path / "run"
    lock = FolderLock(run)
    with pytest.raises(UserError, match=r"run is in use by process \d+: wait for it to end, or choose another"):
        FolderLock(run)
    run.mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(UserError, match="link is in use by process"):
        FolderLock(tmp_path / "link")
    assert guards.is_locked(tmp_path / "link")
    lock.release()
    FolderLock(run).release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_recognized(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(guards.fcntl, "flock", refuse)
    with pytest.raises(UserError, match="cannot be locked") as caught:
        FolderLock(tmp_path / "run")
    assert os.strerror(number) in str(caught.value)
    assert "another process" not in str(caught.value)


def test_a_dead_process_holds_no_lock(tmp_path):
    program = "import os, sys, pathlib; from tformer_jax.runs.guards import FolderLock;"
    program += "lock = FolderLock(pathlib.Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False).returncode == 9
    FolderLock(tmp_path / "run").release()


WATCHED = "import time; from tformer_jax.runs.guards import Watchdog; dog = Watchdog(1); dog.beat()"
BEATS = "for _ in range(3): time.sleep(0.4); dog.beat()"
HANGS = f"{WATCHED}\n{BEATS}\nprint('alive', flush=True); time.sleep(60)"
REPORTS = """import time; from tformer_jax.runs import guards; guards.REPORT_SECONDS = 1
def report(problem): print(problem, flush=True); time.sleep(60)
dog = guards.Watchdog(1, report); dog.beat(); time.sleep(60)"""
PAUSES = f"{WATCHED}\nwith dog.paused(): time.sleep(1.7)\ntime.sleep(0.3)"

STOPS = f"""import os, signal, subprocess; {WATCHED}
subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {{os.getpid()}}"]); os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.3)"""


@pytest.fixture(scope="module")
def watched():
    """Programs with a watchdog, run at the same time."""

    def run(program):
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)

    with ThreadPoolExecutor() as pool:
        programs = (HANGS, REPORTS, PAUSES, STOPS)
        return dict(zip(programs, pool.map(run, programs), strict=True))


def test_a_step_that_hangs_ends_the_process(watched):
    done = watched[HANGS]
    assert done.returncode == HUNG
    assert done.stdout == "alive\n"
    assert "no step ended within train.hang_seconds=1" in done.stderr
    assert 'File "<string>", line 3 in <module>' in done.stderr


def test_a_step_that_hangs_is_reported_even_if_the_report_hangs(watched):
    done = watched[REPORTS]
    assert done.returncode == HUNG
    assert done.stdout == "no step ended within train.hang_seconds=1\n"


def test_a_hung_step_is_an_event(tmp_path, corpus_folder, monkeypatch):
    built = experiment.build(small_config(hang_seconds=60), tmp_path / "run", data_root=corpus_folder)
    monkeypatch.setattr(guards.os, "_exit", mock.Mock())
    with contextlib.closing(built), contextlib.closing(Training(built)) as training:
        training.watchdog._end()
    (event,) = read_records(tmp_path / "run" / "events.jsonl")
    assert (event["step"], event["kind"]) == (0, "failed")
    assert event["message"] == "no step ended within train.hang_seconds=60"


def test_no_alarm_while_paused(watched):
    assert watched[PAUSES].returncode == 0


def test_no_alarm_after_the_process_was_stopped_and_continued(watched):
    """Regression test: a run that Ctrl-Z stopped for longer than `train.hang_seconds` ended when it continued."""
    assert watched[STOPS].returncode == 0, watched[STOPS].stderr


def test_the_first_step_of_each_batch_shape_is_not_watched():
    watchdog, paused = Watchdog(0), []
    watchdog.beat()
    for length in (3, 3, 5, 3):
        with watchdog.around_step({"source": np.zeros((2, length))}):
            paused.append(watchdog._paused)
    assert paused == [True, False, True, False]


def test_spikes_are_detected_and_slow_changes_are_not():
    draw = np.random.default_rng(0)
    losses = 5 * np.exp(-np.arange(400) / 150) + draw.normal(0, 0.05, 400)
    losses[250] += 2
    detector = SpikeDetector()
    remarks = {step: remark for step, loss in enumerate(losses) if (remark := detector.detect(loss))}
    assert list(remarks) == [250]
    assert "is far above the" in remarks[250]


def test_a_lasting_rise_is_reported_for_a_limited_number_of_steps():
    """Then its losses are the usual ones, from which a further rise is a spike again."""
    detector, losses = SpikeDetector(), [1.0] * 100 + [1.6] * 1000 + [2.5]
    warned = [step for step, loss in enumerate(losses) if detector.detect(loss)]
    assert warned == [*range(100, 100 + SpikeDetector.MAX_SPIKES), 1100]


def test_repeated_short_spikes_are_all_reported():
    detector, most = SpikeDetector(), SpikeDetector.MAX_SPIKES
    losses = [1.0] * 100 + ([9.0] * (most - 1) + [1.0]) * 5
    warned = [loss for loss in losses if detector.detect(loss)]
    assert warned == [9.0] * (most - 1) * 5


def test_a_detector_continues_where_it_stopped():
    losses = np.random.default_rng(1).normal(3, 0.1, 120)
    losses[65:95] += 5
    uninterrupted, first = SpikeDetector(), SpikeDetector()
    for loss in losses[:70]:
        uninterrupted.detect(loss), first.detect(loss)
    resumed = SpikeDetector(**first.state())
    for loss in losses[70:]:
        uninterrupted.detect(loss), resumed.detect(loss)
    assert resumed.state() == uninterrupted.state()
    assert not resumed.detect(math.nan)


def not_finite_at_step_six() -> NotFinite:
    """Returns the error of a monitor that has checked four of seven steps that were started."""
    monitor = StepMonitor(SpikeDetector(), checked=4, max_skipped=2, report=lambda *_: None)
    for step in range(1, 8):
        monitor.remember(step, {"step": np.array(step)})
    with pytest.raises(NotFinite) as ended:
        monitor.check([{"loss": math.nan, "skipped": count} for count in (1, 2, 3)])
    return ended.value


def explained(error: NotFinite, saved: Sequence[int] = (3, 2)) -> str:
    """Returns the message of a run that ends with this error."""
    run = mock.MagicMock(spec=Training, cfg=Config(seed=3))
    for name in ("experiment", "trainer", "checkpointer", "watchdog"):
        setattr(run, name, mock.MagicMock())
    run.trainer.state.params, run.watchdog.paused, run.teacher = {}, contextlib.nullcontext, None
    run.checkpointer.steps.return_value, run.checkpointer.folder = saved, "RUN/checkpoints"
    return str(Training._explained(run, error))


def test_a_step_that_is_not_finite_is_explained_by_its_own_batch_and_dropout(monkeypatch):
    """Of seven steps that were started, the sixth is the second in a row that was skipped."""
    looked_at = mock.Mock(return_value="output of decoder/norm")
    monkeypatch.setattr(non_finite, "first_non_finite", looked_at)
    sentence = (
        "2 consecutive steps up to step 6 .*first non-finite value: the output of decoder/norm; last checkpoint: step 3"
    )
    assert re.match(sentence, explained(not_finite_at_step_six()))
    (_, _, batch, key, *_), _ = looked_at.call_args
    assert batch == {"step": 6}
    assert key == jax.random.fold_in(jax.random.key(3), 5)  # of the state before the step


@pytest.mark.parametrize(
    ("saved", "moved"),
    [
        ((3, 2), ""),
        ((), ""),
        ((4, 2), "move 4 in RUN/checkpoints"),
        ((5, 4, 3), "move 5 and 4 in RUN/checkpoints"),
    ],
)
def test_checkpoints_without_an_update_after_them_are_to_be_moved(saved, moved, monkeypatch):
    """Regression test: steps 5 and 6 were skipped, so that each resume from step 4 or 5 ends in the same way."""
    monkeypatch.setattr(non_finite, "first_non_finite", mock.Mock(return_value="loss"))
    advice = explained(not_finite_at_step_six(), saved).partition("); ")[2]
    assert advice.startswith(
        f"{moved} elsewhere, which hold the same parameters, and repeat" if moved else "repeat the command"
    )


FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9\nof 8 GiB")


def test_a_search_that_does_not_fit_in_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(non_finite, "first_non_finite", mock.Mock(side_effect=FULL))
    actual = explained(not_finite_at_step_six())
    assert (
        "(the search for the first non-finite value failed: RESOURCE_EXHAUSTED: 9 of 8 GiB; last checkpoint: step 3"
        in actual
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_lack_of_memory_is_explained(count):
    sentence = "the run does not fit in memory .RESOURCE_EXHAUSTED: 9 of 8 GiB.: use --resume with more devices"
    with pytest.raises(RunError, match=sentence), endings.as_run_errors(ProcessGroup(0, count)):
        raise FULL


def test_a_full_disk_is_explained():
    full = OSError(errno.ENOSPC, "No space left on device", "run/result.json")
    sentence = r"run/result.json cannot be written \(No space left on device\): free some space, .* --resume continues"
    with pytest.raises(RunError, match=sentence), endings.as_run_errors(ProcessGroup()):
        raise full
    with pytest.raises(FileNotFoundError), endings.as_run_errors(ProcessGroup()):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "corpus.txt")


def test_a_lost_loader_process_is_explained():
    """The error is Grain's."""
    lost = RuntimeError("Worker process was terminated unexpectedly with exit code -9. Search the logs above")
    sentence = r"the data loader failed \(Worker process .* exit code -9\), .*: free some; the .* fewer data.workers"
    with pytest.raises(RunError, match=sentence), endings.as_run_errors(ProcessGroup()):
        raise lost
    with pytest.raises(RuntimeError, match="a bug"), endings.as_run_errors(ProcessGroup()):
        raise RuntimeError("a bug")


def test_other_failures_are_those_of_a_process_or_unknown():
    bug = jax.errors.JaxRuntimeError("INTERNAL: a bug\nsomewhere")
    sentence = "a computation of 2 processes failed in process 1 .INTERNAL: a bug.; if another process was lost"
    with pytest.raises(RunError, match=sentence), endings.as_run_errors(ProcessGroup(1, 2)):
        raise bug
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), endings.as_run_errors(ProcessGroup()):
        raise bug


@pytest.mark.parametrize(
    ("metric", "values", "stops_at"),
    [
        ("loss", [3, 2, 2, 1, 1.5, 1.1, 0.5], 5),
        ("bleu", [3, 2, 5, 6, 6, 5, 9], 5),
        ("loss", [math.nan, 2, 1, 0.9], None),
        ("loss", [math.nan, math.nan], 1),
        ("loss", [2, math.nan, 1, math.nan, math.nan], 4),
        ("loss", [1, math.nan, math.inf], 2),
    ],
)
def test_patience(metric, values, stops_at):
    best = BestMetric(TrainConfig(metric=metric, patience=2))
    stopped = None
    for number, value in enumerate(values):
        best = BestMetric(TrainConfig(metric=metric, patience=2), **best.state())
        best.update({metric: value})
        if best.exhausted and stopped is None:
            stopped = number
    assert stopped == stops_at


def test_zero_patience_never_stops():
    best = BestMetric(TrainConfig())
    for _ in range(100):
        best.update({"loss": 1.0})
    assert not best.exhausted
