"""The destinations of metrics, and the records that a resumed run drops."""

import errno
import importlib.util
import json
import subprocess
import sys
import threading
import types
from unittest import mock

import pytest
from tensorboardX.proto import event_pb2

from tests.runs.conftest import small_config
from tformer_jax.base.errors import RunError, UserError, first_line, one_line
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.runs import metrics, run_folder
from tformer_jax.runs.metrics import MetricsWriter, TensorBoard
from tformer_jax.runs.record import EventLog
from tformer_jax.runs.training import Training


def lines(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_a_resumed_run_are_continuous(tmp_path):
    first = MetricsWriter(tmp_path, small_config())
    for step in (1, 2, 3):
        first.write(step, "train", {"loss": 1.0 / step})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    second = MetricsWriter(tmp_path, small_config(), resume_step=2)
    second.write(3, "train", {"loss": 0.5})
    second.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def events(run) -> list[tuple[str, int]]:
    """Returns the starts and losses in TensorBoard's files of a run, in the order of writing, with their steps."""
    actual = []
    for path in sorted((run / "tensorboard").iterdir()):
        raw = path.read_bytes()
        while raw:  # the length of a record and its checksum, the record and its checksum
            size = int.from_bytes(raw[:8], "little")
            event, raw = event_pb2.Event.FromString(raw[12 : 12 + size]), raw[16 + size :]
            actual += [("start", event.step)] if event.HasField("session_log") else []
            actual += [(value.tag, event.step) for value in event.summary.value]
    return actual


@pytest.mark.parametrize("resume_step", [0, 2])
def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path, resume_step):
    """Also those before the first checkpoint: TensorBoard drops earlier events from the step of a start on."""
    writer = MetricsWriter(tmp_path, small_config(), resume_step=resume_step)
    writer.write(resume_step + 1, "train", {"loss": 1.0})
    writer.close()
    assert events(tmp_path) == [("start", resume_step + 1), ("train/loss", resume_step + 1)]


def test_tensorboard_does_not_import_pytorch(tmp_path):
    """tensorboardX would, if it is installed, at the cost of seconds; the user's own import works afterwards."""
    (tmp_path / "torch.py").write_text("")
    code = (
        "import sys\nfrom pathlib import Path\nfrom tformer_jax.runs.metrics import TensorBoard\n"
        "TensorBoard(Path('run'), 0).write(1, 'train', {'loss': 1.0})\n"
        "assert 'torch' not in sys.modules\nimport torch\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_flush_writes_the_records(tmp_path, monkeypatch):
    """Those of a bucket at once."""
    monkeypatch.setattr(metrics, "is_remote", lambda path: True)
    writer = MetricsWriter(tmp_path, small_config())
    for step in range(1, 31):
        writer.write(step, "train", {"loss": 1.0})
    assert lines(tmp_path) == []
    writer.flush()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 31))
    assert [step for tag, step in events(tmp_path) if tag == "train/loss"] == list(range(1, 31))


def test_a_full_disk_is_an_error_of_each_write(tmp_path, monkeypatch):
    """Regression test: a thread of tensorboardX ended with a traceback, and writes waited for it forever."""
    threads, board = threading.active_count(), TensorBoard(tmp_path, 0)
    board.write(1, "train", {"loss": 1.0})
    assert threading.active_count() == threads
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(board._writer._py_recordio_writer, "_writer", mock.Mock(write=full))
        for step in range(2, 20):
            with pytest.raises(OSError, match="No space left"):
                board.write(step, "train", {"loss": 1.0})
    board.write(20, "train", {"loss": 1.0})
    board.close()
    assert events(tmp_path)[-1] == ("train/loss", 20)


def test_a_save_flushes_the_metrics_first():
    """So that a run resumed from the checkpoint has all records before it."""
    run, calls = mock.MagicMock(spec=Training, cfg=small_config()), mock.Mock()
    for name in ("trainer", "record", "evaluations", "watchdog", "changes"):
        setattr(run, name, mock.MagicMock())
    run.record.metrics, run.checkpointer = calls.metrics, calls.checkpointer
    run.trainer.batches.get_state.return_value = {}
    Training.save(run)
    assert [call[0] for call in calls.mock_calls] == ["metrics.flush", "checkpointer.save"]


def test_damaged_records_are_left_out(tmp_path):
    remaining = {"step": 1, "group": "train", "loss": 1.0}
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\n[1]\n3\n\x00\x00\n{"loss": 2}\n' + json.dumps(remaining).encode() + b'\n{"step": 2, "gr')
    assert run_folder.read_records(path) == [remaining]
    assert run_folder.read_records(tmp_path / "missing") == []
    MetricsWriter(tmp_path, small_config(), resume_step=1).close()
    assert lines(tmp_path) == [remaining]


def test_events_after_an_incomplete_line_are_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(tmp_path).write(1, "start")
    path.write_text(path.read_text() + '{"step": 2, "ki')
    EventLog(tmp_path).write(3, "resume")
    assert [event["step"] for event in run_folder.read_records(path)] == [1, 3]
    assert path.read_text().count("\n") == 3


def test_non_finite_numbers_become_null(tmp_path, caplog):
    """Regression test: tensorboardX warned of each number, without its name or step."""
    writer = MetricsWriter(tmp_path, small_config())
    writer.write(1, "train", {"loss": float("nan"), "noise_scale": float("inf")})
    writer.close()
    assert lines(tmp_path) == [{"step": 1, "group": "train", "loss": None, "noise_scale": None}]
    assert not caplog.records


def test_a_full_disk_is_reported_with_a_remedy(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, small_config())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics.JsonLines, "write", full)
    with pytest.raises(RunError, match=r"\(No space left on device\): free some space .* --resume continues from"):
        writer.write(1, "train", {"loss": 1.0})


class Recorder(types.ModuleType):
    """A fake wandb package."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.ended = [], [], 0

    def init(self, **options):
        self.begun.append(options)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.ended += 1


@pytest.fixture
def wandb(monkeypatch) -> Recorder:
    actual = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", actual)
    return actual


def make_run(folder):
    tokenizer = CharacterTokenizer("ab")
    run_folder.create(folder, small_config(), Tokenizers(tokenizer, tokenizer), None)


def test_weights_and_biases_receives_the_same_metrics_and_is_resumed(tmp_path, wandb):
    make_run(tmp_path)
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, small_config(wandb="cards"), resume_step=step - 1)
        writer.write(step, "train", {"loss": 2.0})
        writer.close()
    assert wandb.logged == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
    assert wandb.ended == 2
    first, second = wandb.begun
    assert first["project"] == "cards"
    assert first["config"]["train"]["steps"] == 8
    assert (first["id"], first["resume"]) == (second["id"], "allow")


def test_runs_at_the_same_path_are_separate_in_weights_and_biases(tmp_path, wandb):
    """Runs at the same path, as in two containers, have different ids; a moved run keeps its id."""
    for _ in range(2):
        make_run(tmp_path / "run")
        MetricsWriter(tmp_path / "run", small_config(wandb="cards")).close()
    (tmp_path / "run").rename(tmp_path / "moved")
    MetricsWriter(tmp_path / "moved", small_config(wandb="cards")).close()
    first, second, moved = (options["id"] for options in wandb.begun)
    assert first != second == moved


def test_a_missing_package_is_reported_before_training(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train.wandb needs wandb: pip install"):
        metrics.check_installed(small_config(wandb="cards"))
    metrics.check_installed(small_config())


def test_a_failure_is_recorded_whole(tmp_path):
    """Regression test: 300 characters of it were recorded, which ended within the advice."""
    with pytest.raises(RunError), EventLog(tmp_path).failure_recorded(lambda: 3):
        raise RunError("x" * 500)
    (event,) = run_folder.read_records(tmp_path / "events.jsonl")
    assert event["message"] == "x" * 500
    assert one_line("x" * 500) == first_line("x" * 500) == "x" * 300 + "…"
