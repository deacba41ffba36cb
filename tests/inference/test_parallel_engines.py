"""Engines in threads: their number, the outputs of one engine, and no thread after an error or an abandoned stream."""

import dataclasses
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from tests.inference.engines import BEAM, GREEDY, LETTERS, SAMPLE, TOKENIZERS, plain
from tformer_jax.config import EvalConfig
from tformer_jax.inference import outputs
from tformer_jax.inference.engine import Engine, parallel
from tformer_jax.inference.requests import EncodedRequest

TEXTS = ["abc", "gfedcba" * 3, "a", "", "bb", "cab", "fed", "gg", "abcdefg"]


@pytest.mark.parametrize(
    ("cores", "rows", "width", "parameters", "engines"),
    [
        (2, 64, 1, 8_000_000, 2),
        (2, 16, 1, 8_000_000, 2),
        (2, 15, 5, 8_000_000, 1),  # 7 rows each
        (16, 64, 5, 8_000_000, 8),
        (3, 64, 1, 8_000_000, 3),
        (1, 64, 5, 8_000_000, 1),
        (2, 32, 1, 60_000_000, 1),  # 16 rows for 60 million parameters
        (2, 64, 1, 60_000_000, 2),
        (2, 32, 4, 60_000_000, 2),
        (2, 32, 4, 240_000_000, 1),
        (2, 64, 1, 3_000_000_000, 1),
    ],
)
def test_number_of_engines_by_hand(cores, rows, width, parameters, engines, monkeypatch):
    monkeypatch.setattr(parallel, "usable_cores", lambda: cores)
    params = {"kernel": jax.ShapeDtypeStruct((parameters // 1000, 1000), np.float32)}
    assert parallel.engine_count(rows, width, params) == engines


def test_a_gpu_has_one_engine(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert parallel.engine_count(64, 5, {"kernel": jax.ShapeDtypeStruct((2, 2), np.float32)}) == 1


def decode(monkeypatch, engines: int, settings, family: str = "seq2seq", count: int = 1):
    cfg, *parts = plain(family)
    monkeypatch.setattr(outputs, "engine_count", lambda *_: engines)
    cfg = dataclasses.replace(cfg, decode=settings, eval=EvalConfig(batch_size=8))
    rows = [EncodedRequest(LETTERS.encode(text)) for text in TEXTS]
    return outputs.RowDecoder(cfg, *parts, TOKENIZERS)(rows, seed=3, outputs=count, scores=True)


@pytest.mark.parametrize(
    ("settings", "count", "family"),
    [(GREEDY, 1, "seq2seq"), (BEAM, 2, "seq2seq"), (SAMPLE, 3, "decoder_lm")],
    ids=["greedy", "beam", "samples"],
)
def test_outputs_of_several_engines_are_those_of_one(settings, count, family, monkeypatch):
    alone, first, again = (decode(monkeypatch, engines, settings, family, count) for engines in (1, 3, 3))
    assert first == again  # bit for bit
    for expected, actual in zip(alone, first, strict=True):
        assert [output.text for output in actual] == [output.text for output in expected]
        np.testing.assert_allclose(*([output.score or 0.0 for output in row] for row in (actual, expected)), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "lengths", "count", "rows"),
    [(GREEDY, [33, 1], 1, 1), (SAMPLE, [3] * 64, 20, 20), (BEAM, [3] * 64, 2, 32)],
    ids=["prompts of 3 pages and 1", "rows for whole texts", "a row for each text"],
)
def test_engines_have_one_size(settings, lengths, count, rows, monkeypatch):
    cfg, *parts = plain("decoder_lm")
    monkeypatch.setattr(outputs, "engine_count", lambda *_: 2)
    cfg = dataclasses.replace(cfg, decode=settings, eval=EvalConfig(batch_size=64))
    first, second = outputs.RowDecoder(cfg, *parts, TOKENIZERS)._engines(lengths, len(lengths), count)
    assert first.max_rows == second.max_rows == rows
    assert first._pages == second._pages  # or each would compile programs of its own


def test_engines_step_at_the_same_time():
    meeting = threading.Barrier(2, timeout=10)

    class Meeting:
        idle = False

        def step(self):
            meeting.wait()  # BrokenBarrierError if the other one waits for this step to end
            self.idle = True
            return []

    assert len(list(parallel.run_engines([Meeting(), Meeting()]))) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("threefry_partitionable", False), ("enable_x64", True), ("disable_jit", True), ("debug_infs", True)],
)
def test_settings_of_the_caller_hold_in_each_engine(name, value):
    class Watched:
        idle = False

        def step(self):
            self.idle = True
            return [getattr(jax.config, f"jax_{name}")]

    with getattr(jax, name)(value):
        seen = dict(parallel.run_engines([Watched(), Watched()]))
    assert seen == {0: [value], 1: [value]}


def test_each_engine_steps_in_a_thread_of_its_own_with_the_precision_of_the_caller(monkeypatch):
    step, seen = Engine.step, []

    def watched(self):
        seen.append((id(self), threading.get_ident(), jax.config.jax_default_matmul_precision))
        return step(self)

    monkeypatch.setattr(Engine, "step", watched)
    with jax.default_matmul_precision("highest"):
        decode(monkeypatch, 2, GREEDY)
    assert len({engine for engine, *_ in seen}) == 2
    assert threading.get_ident() not in {thread for _, thread, _ in seen}
    assert {precision for *_, precision in seen} == {"highest"}


def test_the_error_of_an_engine_reaches_the_caller_and_no_thread_is_left(monkeypatch):
    before, step = threading.active_count(), Engine.step

    def fails(self):
        if self._next == 3:
            raise ValueError("no room")
        return step(self)

    monkeypatch.setattr(Engine, "step", fails)
    with pytest.raises(ValueError, match="no room"):
        decode(monkeypatch, 3, GREEDY)  # 8 texts: 3, 3 and 2 requests
    assert threading.active_count() == before


def test_an_abandoned_stream_leaves_no_thread(monkeypatch):
    before = threading.active_count()
    cfg, *parts = plain("seq2seq")
    monkeypatch.setattr(outputs, "engine_count", lambda *_: 2)
    decoder = outputs.RowDecoder(dataclasses.replace(cfg, decode=GREEDY), *parts, TOKENIZERS)
    rows = [EncodedRequest(LETTERS.encode(text)) for text in TEXTS]
    stream = decoder.stream(rows, 0, seed=0, outputs=1, scores=False, window=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before


def test_a_script_that_abandons_a_stream_ends_without_a_word():
    script = """
from tformer_jax.inference.engine.parallel import run_engines

class Endless:
    idle = False
    def step(self):
        return []

steps = run_engines([Endless(), Endless()])
next(steps)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
