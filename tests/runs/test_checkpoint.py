"""Checkpoints: damage is noticed, the right ones are kept, and states are restored to their shardings."""

import contextlib
import dataclasses
import errno
import gc
import logging
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import tiny
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.config import Config, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.parallel.multihost import ProcessGroup
from tformer_jax.runs import checkpoint
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.train import optimizers, state
from tformer_jax.train.state import TrainState

ROOT = Path(__file__).resolve().parents[2]
HOST = {"batches": {"next": 7}, "meter": {"tokens": 12}}


def made(step: int) -> TrainState:
    params = {"a": jnp.arange(4000.0) * step, "b": jnp.full((3, 5), step, jnp.bfloat16)}
    number = jnp.int32(step)
    return TrainState(step=number, skipped=number * 0, params=params, opt_state=(jnp.float32(0.5),), ema=None)


def abstract(state: TrainState | None = None) -> TrainState:
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single), state or made(1))


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    keeper = Checkpointer(folder, keep=3)
    for step in (1, 2, 3):
        keeper.save(step, made(step), {**HOST, "step": step})
    keeper.wait()
    keeper.close()
    return folder


@pytest.fixture
def copied(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def assert_is(actual: TrainState, step: int) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, made(step))


def test_keys_and_booleans_are_restored(tmp_path):
    """The states of noise and of guards against values that are not finite."""
    keys = jax.random.split(jax.random.key(1), 3)
    saved = made(1).replace(opt_state=(jax.random.key(7), keys, jnp.array([True, False]), jnp.array(True)))
    keeper = Checkpointer(tmp_path, keep=1)
    keeper.save(1, saved, HOST)
    keeper.wait()
    actual, _ = keeper.restore(abstract(saved))
    keeper.close()
    assert [leaf.dtype for leaf in jax.tree.leaves(actual)] == [leaf.dtype for leaf in jax.tree.leaves(saved)]
    numbers = [[optimizers.plain_array(leaf) for leaf in jax.tree.leaves(each)] for each in (actual, saved)]
    jax.tree.map(np.testing.assert_array_equal, *numbers)
    sums = [checkpoint.array_checksums(saved.replace(opt_state=each)) for each in (keys, keys[::-1], jax.random.key(7))]
    assert len({sums[i][".opt_state"] for i in range(3)}) == 3
    words = np.asarray(jax.random.key_data(keys), np.uint64).ravel()
    assert sums[0][".opt_state"] == int((words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum() % 2**32)


def test_bfloat16_is_restored_as_float32(copied):
    """As routers of runs from before they were float32."""
    new = made(3)
    new = new.replace(params=new.params | {"b": new.params["b"].astype(jnp.float32)})
    reader = Checkpointer(copied)
    actual, _ = reader.restore(abstract(new))
    reader.close()
    assert actual.params["b"].dtype == jnp.float32
    assert_is(actual, 3)


def test_permanent_checkpoints_stay(tmp_path):
    keeper = Checkpointer(tmp_path / "c", keep=1, permanent_every=3)
    for step in range(1, 9):
        keeper.save(step, made(step), HOST)
        keeper.wait()
    assert keeper.steps() == [8, 6, 3]
    keeper.close()


def test_an_interruption_deletes_no_scheduled_checkpoint(tmp_path):
    keeper = Checkpointer(tmp_path, keep=2, every=2)
    remaining = {}
    for step in (2, 4, 6, 7, 8, 9):
        keeper.save(step, made(step), HOST)
        keeper.wait()
        remaining[step] = keeper.steps()
    keeper.close()
    assert remaining == {2: [2], 4: [4, 2], 6: [6, 4], 7: [7, 6, 4], 8: [8, 6], 9: [9, 8, 6]}


def test_a_checkpoint_is_overdue_by_its_age(tmp_path):
    for seconds, overdue in ((0, False), (1, True), (1000, False)):
        keeper = Checkpointer(tmp_path / str(seconds), keep=1, seconds=seconds)
        keeper.save(1, made(1), HOST)
        keeper.wait()
        time.sleep(1.1 if overdue else 0)
        assert keeper.overdue(2) == overdue
        keeper.close()


def test_the_newest_is_restored_with_its_host_data(copied):
    keeper = Checkpointer(copied, keep=3)
    actual, host = keeper.restore(abstract())
    assert_is(actual, 3)
    assert host == {**HOST, "step": 3}
    keeper.close()


def test_a_truncated_one_is_quarantined_and_the_one_before_it_used(copied, caplog):
    largest = max(files(copied / "3"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    keeper = Checkpointer(copied, keep=3)
    actual, host = keeper.restore(abstract(), quarantine=True)
    assert_is(actual, 2)
    assert host["step"] == 2
    assert "checkpoints/3 is damaged" in caplog.text
    assert "going back to step 2" in caplog.text
    assert (copied.parent / "damaged" / "3").is_dir()
    keeper.save(3, made(3), HOST)
    keeper.wait()
    assert_is(keeper.restore(abstract())[0], 3)
    keeper.close()


class OtherFails(ProcessGroup):
    """A group in which another process cannot read its shards of step 3."""

    def run(self, action):
        actual = action()
        if int(actual[0].step) == 3:
            raise UserError("process 1 (host b): checkpoints/3 is damaged")
        return actual


def test_a_checkpoint_that_another_process_cannot_read_is_quarantined(copied, caplog):
    keeper = Checkpointer(copied, keep=3, group=OtherFails())
    actual, _ = keeper.restore(abstract(), quarantine=True)
    keeper.close()
    assert_is(actual, 2)
    assert "process 1 (host b): checkpoints/3 is damaged; going back to step 2" in caplog.text
    assert (copied.parent / "damaged" / "3").is_dir()


@pytest.mark.long
def test_corrupted_checkpoints_are_always_detected(original, tmp_path):
    """Changes three bytes of a file of step 3: either step 3 is restored exactly, or step 2."""
    draw, outcomes = random.Random(0), set()
    for number in range(12):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        path = draw.choice([path for path in files(folder / "3") if path.stat().st_size])
        content = bytearray(path.read_bytes())
        for _ in range(3):
            content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(content)
        keeper = Checkpointer(folder)
        actual, _ = keeper.restore(abstract())
        keeper.close()
        outcomes.add(int(actual.step))
        assert_is(actual, int(actual.step))
    assert outcomes == {2, 3}


def many_arrays() -> TrainState:
    return made(1).replace(opt_state=tuple(jnp.full(2000, number) for number in range(200)))


def restore_damaged(folder: str) -> None:
    keeper = Checkpointer(Path(folder))
    with pytest.raises(UserError) as caught:
        keeper.restore(abstract(many_arrays()))
    keeper.close()
    print(caught.value)
    gc.collect()


def fill_disk(folder: str) -> None:
    """Saves a checkpoint of which no file may have more than 4 KiB."""
    keeper = Checkpointer(Path(folder), keep=3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        keeper.save(1, many_arrays(), HOST)
        keeper.wait()
    except RunError as error:
        print(error)


@pytest.mark.long
def test_a_full_disk_is_reported_once(tmp_path):
    """Regression test: Orbax and TensorStore printed hundreds of lines of tracebacks before."""
    code = f"from tests.runs.test_checkpoint import fill_disk; fill_disk({str(tmp_path / 'checkpoints')!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.fullmatch(r"a checkpoint could not be written to .* \(File too large\); there is no .*\n", done.stdout)
    assert not {"Traceback", "ERROR"} & {*re.findall("[A-Za-z]+", done.stderr)}


@pytest.mark.slow
def test_damage_is_reported_once(tmp_path):
    """Regression test: Orbax's pending reads printed a traceback each, some of them after a garbage collection."""
    keeper = Checkpointer(tmp_path / "intact", keep=1)
    keeper.save(1, many_arrays(), HOST)
    keeper.wait()
    keeper.close()
    damaged = {"index": "manifest.ocdbt", "tree": "d/*", "data": "ocdbt.process_0/d/*"}
    for name, pattern in damaged.items():
        folder = Path(shutil.copytree(tmp_path / "intact", tmp_path / name))
        path = max((folder / "1" / "state").glob(pattern), key=lambda path: path.stat().st_size)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    program = "import sys\nfrom tests.runs.test_checkpoint import *\nfor each in sys.argv[1:]: restore_damaged(each)"
    command = [sys.executable, "-c", program, *(str(tmp_path / name) for name in damaged)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for name, line in zip(damaged, done.stdout.splitlines(), strict=True):
        assert f"{tmp_path / name / '1'} is damaged, or not of this config's model: " in line
        assert re.search(r'Error reading "\S+" in OCDBT database', line)


def test_intact_arrays_of_another_checkpoint_are_detected(copied):
    """The arrays of another valid checkpoint beside this one's host data: only the checksums can notice."""
    shutil.rmtree(copied / "3" / "state")
    shutil.copytree(copied / "2" / "state", copied / "3" / "state")
    keeper = Checkpointer(copied)
    with pytest.raises(UserError, match="the checksum of .* does not match"):
        keeper.restore_step(3, abstract())
    keeper.close()


@pytest.mark.parametrize("content", ["{}", "null", '{"host": {}, "host_checksum": 0, "checksums": {}}'])
def test_host_data_without_its_fields_or_checksum_is_damaged(copied, content):
    (copied / "3" / "host" / "metadata").write_text(content)
    keeper = Checkpointer(copied)
    with pytest.raises(UserError, match="checkpoints/3 is damaged: the checksum of its host data does not match"):
        keeper.restore_step(3, abstract())
    keeper.close()


def test_all_damaged(copied):
    for path in files(copied):
        if "ocdbt" in str(path):
            path.write_bytes(b"")
    keeper = Checkpointer(copied)
    with pytest.raises(UserError, match="checkpoints/1 is damaged, or not of this config's model"):
        keeper.restore(abstract())
    keeper.close()


def test_the_newest_and_the_best_are_kept(tmp_path):
    keeper = Checkpointer(tmp_path / "checkpoints", keep=1, keep_best=2)
    scores = {1: 0.1, 2: 0.9, 3: 0.5, 4: None, 5: 0.7, 6: float("nan"), 7: None}
    for step, score in scores.items():
        keeper.save(step, made(step), HOST, score=score)
    keeper.wait()
    assert keeper.steps() == [7, 5, 2]
    assert keeper.best_steps() == [2, 5]
    keeper.close()
    again = Checkpointer(tmp_path / "checkpoints", keep=1, keep_best=2)
    again.save(8, made(8), HOST, score=0.8)
    again.wait()
    assert again.steps() == [8, 2]
    assert again.best_steps() == [2, 8]
    again.close()


def test_scores_of_other_settings_are_not_compared(tmp_path):
    """Regression test: two resumes could do what one may not, and compare scores of two settings."""
    for fingerprint, scores in ((1, {1: 0.9, 2: 0.8}), (2, {3: 0.1, 4: 0.2})):
        keeper = Checkpointer(tmp_path / "checkpoints", keep=2, keep_best=1, fingerprint=fingerprint)
        for step, score in scores.items():
            keeper.save(step, made(step), HOST, score=score)
        keeper.wait()
        assert keeper.best_steps() == sorted(scores, key=scores.__getitem__, reverse=True)
        keeper.close()


def test_a_saved_step_may_be_scored_later(tmp_path):
    keeper = Checkpointer(tmp_path / "checkpoints", keep=2)
    for step, score in ((1, 0.1), (2, None), (2, 0.7)):
        keeper.save(step, made(step), HOST, score=score)
    keeper.wait()
    assert keeper.best_steps() == [2, 1]
    keeper.close()


def test_reading_does_not_disturb_a_save(copied):
    partial = copied / "4.orbax-checkpoint-tmp-0"
    partial.mkdir()
    keeper = Checkpointer(copied)
    assert keeper.latest_step() == 3
    keeper.close()
    assert partial.is_dir()
    Checkpointer(copied, keep=3).close()
    for _ in range(1000):  # it is removed in the background
        if not partial.exists():
            break
        time.sleep(0.01)
    assert not partial.exists()


@pytest.mark.slow
def test_restored_onto_another_mesh(tmp_path):
    model = registry.build(tiny("decoder_lm"))
    cfg = Config(
        model=model.cfg,
        data=DataConfig(source="stdlib_text", batching="windows", window=8),
        optim=OptimConfig(optimizer="muon"),
        train=TrainConfig(ema_decay=0.9),
    )
    optimizer = optimizers.build(cfg, registry.shapes(model))
    start = None
    meshes = {"data": 8}, {"data": 2}, {"data": 1}, {"preset": "fsdp+tp"}, {"preset": "zero1"}
    for number, sizes in enumerate(meshes, start=1):
        cfg = dataclasses.replace(cfg, parallel=ParallelConfig(**sizes))
        mesh = make_mesh(cfg.parallel)
        keeper = Checkpointer(tmp_path / "checkpoints", keep=9)
        if start is None:
            actual = start = state.create(model, optimizer, cfg, mesh)
        else:
            actual, _ = keeper.restore(state.abstract(model, optimizer, cfg, mesh))
        assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(actual)} == {sizes.get("data", 8)}
        jax.tree.map(np.testing.assert_array_equal, actual, start)
        keeper.save(number, actual, HOST)
        keeper.wait()
        keeper.close()


@pytest.mark.parametrize("content", [b"", b'{"sco', b"\xff"])
@pytest.mark.parametrize("keep", [None, 3])
def test_a_damaged_score_is_named(copied, keep, content):
    for path in copied.glob("*/metrics/metrics"):
        path.unlink()
    path = copied / "2" / "metrics" / "metrics"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(UserError, match="checkpoints/2/metrics/metrics is damaged: move .*checkpoints/2 elsewhere"):
        Checkpointer(copied, keep=keep)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(28, "No space left on device"), "free some space or restore write permission"),
        (
            jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat timeout."),
            "if a process was lost, restart all",
        ),
    ],
)
def test_the_remedy_fits_the_cause(copied, monkeypatch, error, remedy):
    keeper = Checkpointer(copied, keep=3)

    def fail():
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(keeper._manager, "wait_until_finished", fail)
        with pytest.raises(RunError, match=f"that of step 3 is intact: {remedy}"):
            keeper.wait()
    keeper.close()


def test_after_a_failed_write_its_tracebacks_are_dropped_for_good(tmp_path, monkeypatch):
    """Regression test: those that the garbage collector found later came after the error."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    for name in ("asyncio", "absl"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    for failed in (False, True):
        with contextlib.closing(Checkpointer(tmp_path, keep=1)) as keeper:
            _ = keeper._not_saved(OSError(errno.ENOSPC, "full")) if failed else None
        assert len(logging.getLogger("asyncio").filters) == failed
