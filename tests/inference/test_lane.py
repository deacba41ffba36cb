"""Lengths of a lane's arrays."""

import dataclasses

import pytest

from tests.inference.test_engine import BEAM, GREEDY, TEXTS, alone, endless, engine, finish, models
from tformer_jax.inference.engine import Request, compiled
from tformer_jax.inference.engine import lane as lanes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "limit", "length"), [("abcdefg" * 3, 33, 32), ("abcdefg" * 3, 9, 16), ("abc", 33, 16)]
)
def test_arrays_of_translations_start_as_long_as_the_source(text, limit, length):
    """Lengths are powers of two from 16; a source has the text's tokens and EOS."""
    served = engine(models("seq2seq"), seconds=0.0)
    served.submit(Request(text, dataclasses.replace(GREEDY, max_new_tokens=limit)))
    served.step()
    (lane,) = served._lanes.values()
    assert lane._size.output == length


@pytest.mark.slow
def test_compaction_does_not_change_beam_search(monkeypatch):
    """With requests that start at different steps, in half of the slots of all beams and positions."""
    monkeypatch.setattr(lanes, "COMPACTION_LENGTH", 16)
    used, compact = [], compiled.compact

    def counted(plan, state):
        state, counts = compact(plan, state)
        used.append(int(counts.max()))
        return state, counts

    monkeypatch.setattr(compiled, "compact", counted)
    trained, _ = endless("seq2seq")
    norm = trained[2]["decoder"]["norm"]
    norm["scale"] *= 0.3  # beams of an unsure model have common ancestors
    norm["bias"] *= 0.3
    served, decode = engine(trained, slots=2), dataclasses.replace(BEAM, beams=4, max_new_tokens=30)
    numbers, events = [], []
    for text in TEXTS[:3]:
        numbers.append(served.submit(Request(text, decode)))
        for _ in range(8):
            events += served.step()
    (lane,) = served._lanes.values()
    assert (lane._size.output, lane._size.positions) == (32, 16)
    found = finish(served, events)
    assert [found[number, 0][0] for number in numbers] == [alone(trained, text, decode) for text in TEXTS[:3]]
    assert len(used) > 1 and max(used) < 17 * 4
