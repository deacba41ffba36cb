"""Several engines as a group: equal outputs, requests in the first free engine, divided samples, cancelling, errors."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from tests.inference.engines import BEAM, GREEDY, SAMPLE, TEXTS, alone, encode, endless, engine, finish, plain
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.engine import Engine, Request, compiled, group, parallel
from tformer_jax.inference.engine.group import EngineGroup


def grouped(trained, count: int = 2, max_rows: int = 2, **options) -> EngineGroup:
    return EngineGroup([engine(trained, max_rows, **options) for _ in range(count)])


def submit(served: EngineGroup, text: str, decode: DecodeConfig, family: str = "decoder_lm", **options) -> int:
    return served.submit(Request(encode(text, family), decode, **options))


@pytest.mark.parametrize(
    ("rows", "width", "parameters", "engines"),
    [
        (64, 1, 8_000_000, 4),
        (64, 5, 8_000_000, 8),
        (32, 1, 8_000_000, 2),
        (8, 5, 8_000_000, 1),
        (64, 4, 240_000_000, 2),  # at most 3 have enough rows, and 3 do not divide 64
        (50, 1, 8_000_000, 2),
        (53, 5, 8_000_000, 1),
        (64, 1, 3_000_000_000, 1),
    ],
)
def test_number_of_engines_of_a_server_by_hand(rows, width, parameters, engines, monkeypatch):
    params = {"kernel": jax.ShapeDtypeStruct((parameters // 1000, 1000), np.float32)}
    assert parallel.served_engine_count(rows, width, params) == engines
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert parallel.served_engine_count(rows, width, params) == 1


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    ("family", "settings"), [("seq2seq", GREEDY), ("seq2seq", BEAM), ("decoder_lm", SAMPLE)], ids=str
)
def test_outputs_are_those_of_the_texts_alone(cores, family, settings, monkeypatch):
    monkeypatch.setattr(group, "usable_cores", lambda: cores)
    served = grouped(plain(family))
    numbers = [submit(served, text, settings, family) for text in TEXTS]
    assert numbers == list(range(len(TEXTS)))
    assert (served.max_rows, served.pending, served.running) == (4, len(TEXTS), 0)
    outputs = finish(served)
    assert {key: text for key, (text, _) in outputs.items()} == {
        (number, 0): alone(plain(family), text, settings) for number, text in enumerate(TEXTS)
    }
    assert not served._parts


def test_samples_of_a_divided_request_are_those_of_a_large_engine():
    expected, served = engine(plain("decoder_lm"), 5), grouped(plain("decoder_lm"), 3)
    for each in (expected, served):
        submit(each, "abc", SAMPLE, num_outputs=5, seed=3, index=2)
    outputs = [{key: text for key, (text, _) in finish(each).items()} for each in (expected, served)]
    assert outputs[0] == outputs[1]
    assert sorted(outputs[1]) == [(0, sample) for sample in range(5)]


def test_a_request_with_more_outputs_than_all_rows_is_refused():
    served = grouped(plain("decoder_lm"))
    with pytest.raises(UserError, match="^5 outputs are more than --max-rows 4$"):
        submit(served, "abc", SAMPLE, num_outputs=5)
    with pytest.raises(UserError, match="^4 outputs are more than decode.beams=3$"):
        submit(served, "abc", BEAM, num_outputs=4)
    assert served.idle


def test_requests_go_to_the_first_engine_with_free_rows_then_to_the_least_loaded():
    served = grouped(endless()[0], 3)
    loads = []
    for _ in range(8):
        submit(served, "abc", GREEDY)
        loads.append([each.pending for each in served._engines])
    assert loads[:6] == [[1, 0, 0], [2, 0, 0], [2, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2]]
    assert loads[6:] == [[3, 2, 2], [3, 3, 2]]
    finish(served)
    submit(served, "abc", GREEDY)
    assert [each.pending for each in served._engines] == [1, 0, 0]


def test_a_cancelled_request_frees_all_its_rows():
    served = grouped(endless()[0])
    number = submit(served, "abc", SAMPLE, num_outputs=4)
    served.step()
    assert served.running == 2  # a part in each engine
    served.cancel(number)
    served.cancel(number)
    assert served.idle
    assert not served._parts


def test_only_engines_with_requests_step_and_share_the_duration(monkeypatch):
    shares, step = [], Engine.step

    def watched(self, share=1.0):
        shares.append(share)
        return step(self, share)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(group, "usable_cores", lambda: 2)
    served = grouped(endless()[0], 4, max_rows=1)
    for busy, share in ((1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5)):
        submit(served, "abc", GREEDY)
        shares.clear()
        served.step()
        assert shares == [share] * busy


def test_engines_step_at_the_same_time_with_the_settings_of_the_caller(monkeypatch):
    meeting, seen = threading.Barrier(2, timeout=10), set()

    def step(self, share):
        meeting.wait()  # BrokenBarrierError if the other one waits for this step to end
        seen.add(jax.config.jax_default_matmul_precision)
        return []

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(group, "usable_cores", lambda: 2)
    served = grouped(plain("seq2seq"), 2, max_rows=1)
    for text in TEXTS[:2]:
        submit(served, text, GREEDY, "seq2seq")
    with jax.default_matmul_precision("highest"):
        assert served.step() == []
    assert seen == {"highest"}


def test_the_error_of_an_engine_reaches_the_caller_after_the_steps_of_the_others(monkeypatch):
    ended = []

    def step(self, share):
        if self is served._engines[0]:
            raise ValueError("no room")
        time.sleep(0.2)
        ended.append(True)
        return []

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(group, "usable_cores", lambda: 2)
    served = grouped(plain("decoder_lm"), max_rows=1)
    for _ in range(2):
        submit(served, "abc", GREEDY)
    with pytest.raises(ValueError, match="no room"):
        served.step()
    assert ended


def test_after_the_warm_up_no_engine_compiles():
    """Without its own warm-up, the second engine would have shorter arrays."""
    served, settings = grouped(plain("seq2seq"), few_shapes=True), dataclasses.replace(GREEDY, max_new_tokens=33)
    functions = [compiled.admit, compiled.advance, compiled.resize, compiled.empty_state]
    served.warm_up(settings)
    before = [function._cache_size() for function in functions]
    for text in TEXTS:
        submit(served, text, settings, "seq2seq")
    finish(served)
    assert [function._cache_size() for function in functions] == before
