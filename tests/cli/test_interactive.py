"""The interactive prompt shows pieces as they are generated, and survives errors and Ctrl-C."""

import argparse
import builtins
import io
import sys
import types

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import generation
from tformer_jax.config import Config, DecodeConfig
from tformer_jax.inference.outputs import Output


def typed(monkeypatch, *lines) -> None:
    """Makes `input` return lines and raise exceptions, then end."""
    waiting = iter([*lines, EOFError()])

    def read(prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)


def test_answers_are_shown_piece_by_piece(monkeypatch):
    shown = []

    class Screen(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    typed(monkeypatch, "ab", "  ", "c")
    asked = []

    def answer(text, number):
        asked.append((text, number))
        yield from text

    generation.answer_prompts(answer)
    assert shown == ["a", "ab", "ab\nc"]
    assert asked == [("ab", 0), ("c", 1)]


def test_ctrl_c_stops_an_answer_and_forgets_a_line(monkeypatch, capsys):
    closed = []

    def answer(text, _):
        try:
            yield text
            if text == "long":
                raise KeyboardInterrupt
            yield "!"
        finally:
            closed.append(text)

    typed(monkeypatch, "long", KeyboardInterrupt(), "short")
    generation.answer_prompts(answer)
    assert capsys.readouterr().out == "long\n\nshort!\n\n"
    assert closed == ["long", "short"]


def test_an_error_is_printed_and_the_next_text_is_answered(monkeypatch, capsys):
    def answer(text, _):
        if text == "bad":
            raise UserError("too long")
        yield text

    typed(monkeypatch, "bad", "\udcff", "good")
    generation.answer_prompts(answer)
    actual = capsys.readouterr()
    assert actual.err.splitlines() == ["error: too long", "error: a text on the command line is not valid UTF-8"]
    assert actual.out == "good\n\n"


@pytest.mark.parametrize(
    ("given", "name"),
    [({"input": "x"}, "--input"), ({"output": "x"}, "--output"), ({"scores": True}, "--scores"), ({}, "texts")],
)
def test_contradicting_flags(given, name):
    options = {"interactive": True, "input": None, "output": None, "scores": False, "outputs": 1, "resume": False}
    with pytest.raises(UserError, match=f"--interactive cannot be combined with {name}"):
        generation.check_interactive(argparse.Namespace(**options | given, text=[] if given else ["a"]))


def test_an_answer_ends_with_its_alignment_and_is_counted():
    """Regression test: the prompt said nothing of alignments, placeholders, case and markup."""
    first = [Output("a", None, unknown=1), Output("b", None, None, 1, False, ((0, 1),), False, recased=2, invented=1)]
    second = [Output("c", None), Output("", None, "decode.max_new_tokens", 0, True, constraints_met=True)]
    answers = iter([first, second])
    cfg = Config(decode=DecodeConfig(max_new_tokens=2))
    model = types.SimpleNamespace(cfg=cfg, stream_pieces=lambda *_, **__: iter(next(answers)))
    options = argparse.Namespace(seed=0, on_long_line="stop")
    asked = generation.Generation(options, None, cfg.decode, model)
    assert ["".join(asked.answer("x", number)) for number in range(2)] == ["ab\t0-1", "c"]
    counted = {"limits": {"decode.max_new_tokens": 1}, "outputs": 2, "texts": 2, "sentences": 2}
    counted |= dict.fromkeys(("unknown", "other_placeholders", "lacking", "recased", "invented"), 1)
    assert {name: getattr(asked.counts, name) for name in counted} == counted
