"""Separate processes with CPU devices that train one model together."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.programs import process_batches, processes
from tests.programs.processes import Bench
from tformer_jax.data.corpora import load_corpus
from tformer_jax.data.tokenizers import Tokenizers

SAME = 1e-5


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("processes"))


def assert_batches_of_one(bench: Bench, count: int) -> None:
    """The global batches equal those of the pipeline alone, and each process reads its share of their bytes."""
    actual = processes.batches(bench, count)
    texts = [["\u00e9" * (index + 1) for index in range(count)], "from 0"]
    assert [(each["index"], each["texts"], each["devices"]) for each in actual] == [(i, texts, 4) for i in range(count)]
    cfg = process_batches.config()
    data = dataclasses.replace(cfg.data, source="prepared", train=(str(bench.folder / "rows" / "prepared"),))
    cfg = dataclasses.replace(cfg, data=data)
    corpus = load_corpus(cfg, None)
    alone = process_batches.facts(cfg, corpus, Tokenizers.load(corpus.tokenizers))
    for kind in process_batches.KINDS:
        assert all(each[kind]["sums"] == alone[kind]["sums"] for each in actual)
        assert all(each[kind]["bytes"] < 1.2 * alone[kind]["bytes"] / count for each in actual)


@pytest.mark.slow
def test_two_processes_build_the_batches_of_one(bench):
    assert_batches_of_one(bench, 2)


@pytest.mark.slow
def test_four_processes_build_the_batches_of_one(bench):
    assert_batches_of_one(bench, 4)


@pytest.fixture(scope="module")
def whole(bench) -> Path:
    """Trains with one process and four devices."""
    run = bench.folder / "whole"
    assert [each["status"] for each in bench.trained(1, run)] == [0]
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_losses_and_parameters_of_one_process(bench, whole, count):
    """Evaluations, checkpoints and final weights equal those of one process on the same mesh."""
    run = bench.folder / f"of_{count}"
    assert [each["status"] for each in bench.trained(count, run)] == [0] * count
    assert processes.difference(run, whole) <= SAME
    assert (run / "result.json").exists()
    assert not list(run.glob(".shared*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_saved_by_two_and_resumed_by_one_and_by_four(bench, whole):
    for actual in processes.resumed_by_others(bench):
        assert not any(actual["status"]), actual["says"]
        assert actual["difference"] <= SAME


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0)])
def test_all_end_when_one_is_killed_and_the_run_is_resumed(bench, count, victim):
    *ended, after = processes.lost(bench, count, victim)
    others = [each for number, each in enumerate(ended) if number != victim]
    assert all(other["status"] not in (0, 2, 130) for other in others)
    assert after["resumed"] == [0] * count
    assert after["seconds"] < 90


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_checkpoint_that_one_process_cannot_read_is_moved_aside(bench, victim):
    """Parameters are sharded over two processes; the files that one of them wrote are zeroed."""
    run = bench.folder / f"unreadable_{victim}"
    wide = {"model__dim": 64, "parallel__data": 1, "parallel__fsdp": 2}  # smaller arrays are in one file of both
    assert [each["status"] for each in bench.trained(2, run, train__steps=6, **wide)] == [0, 0]
    for path in (run / f"checkpoints/6/state/ocdbt.process_{victim}/d").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    ended = bench.trained(2, run, "--resume", **wide)
    assert [each["status"] for each in ended] == [0, 0], ended
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    assert [event["step"] for event in events if event["kind"] == "resume"] == [4]
    assert (run / "damaged" / "6").is_dir()
    assert json.loads((run / "result.json").read_text())["steps"] == 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_stops_all_at_the_same_step(bench):
    first, second, after = processes.stopped(bench)
    assert (first["status"], second["status"]) == (130, 130)
    assert first["says"] == f"Stopped at step {after['saved']}; the same command with --resume continues from there."


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_errors_are_one_sentence_in_every_process(bench):
    settings = "optim.learning_rate=0.5, but process 0 has 0.01; start all processes the same way"
    for story, status, sentence in (
        (processes.other_settings, 2, settings),
        (processes.missing, 1, "processes 1, 3 of 4 did not start within"),
        (processes.nobody_there, 1, "processes 0 of 2 did not start within"),
        (processes.port_in_use, 2, "process 0 cannot listen on port"),
    ):
        for each in story(bench):
            assert each["status"] == status
            assert sentence in each["says"]
            assert each["lines"] == 1
