"""Shared parts of `translate.py` and `generate.py`."""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tformer_jax.cli import decoding, interactive, interrupt, lines
from tformer_jax.cli.common import load_run
from tformer_jax.cli.inputs import Line
from tformer_jax.config import DecodeConfig
from tformer_jax.config.fields import flag
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.outputs import Output, count_limits, describe_limits, describe_unknown
from tformer_jax.inference.text import TextGenerator, Translator

SETTINGS = ("seed", "outputs", "scores")
"""Options, besides those of `DecodeConfig`, that determine the outputs."""


@dataclasses.dataclass
class Generation:
    """A trained model, with the decoding settings of the command line."""

    options: argparse.Namespace
    params: Any
    decode: DecodeConfig
    model: Translator | TextGenerator
    limits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of outputs so far that each limit ended."""
    unknown: int = 0
    """Number of outputs so far that have unknown tokens."""
    outputs: int = 0
    """Number of outputs so far."""

    def stream(self, texts: Iterator[str], *, skip: int, long_texts: LongTexts) -> Iterator[list[Output]]:
        """Yields the outputs of each text, in order, without those of the first `skip` texts."""
        wanted = {name: getattr(self.options, name) for name in SETTINGS}
        for found in self.model.stream(self.params, texts, **wanted, skip=skip, long_texts=long_texts):
            self._count(found)
            yield found

    def _count(self, found: list[Output]) -> None:
        self.limits += count_limits(found)
        self.unknown += sum(output.unknown > 0 for output in found)
        self.outputs += len(found)

    def report(self, before: int = 0) -> None:
        """Prints the numbers of outputs that each limit ended, and of those with unknown tokens, to stderr.

        Args:
            before: number of texts whose outputs the interrupted command has written.
        """
        after = f", after {before:,} texts of the interrupted command" if before else ""
        sentences = list(describe_limits(self.limits, self.model.cfg))
        if self.unknown:
            sentences.append(describe_unknown(self.unknown, self.outputs, self.decode))
        for sentence in sentences:
            print(f"{sentence}{after}", file=sys.stderr)

    def answer(self) -> None:
        """Answers texts at an interactive prompt, each with a different seed."""
        long_texts = LongTexts(self.options.on_long_line)

        def pieces(text: str, count: int) -> Iterator[str]:
            seed = self.options.seed + count
            found = self.model.stream_pieces(self.params, text, seed=seed, long_texts=long_texts)
            if long_texts.pop(0):
                print(f"too long for the model and {lines.DONE[long_texts.action]}", file=sys.stderr)
            unknown = 0
            for output in found:
                self.limits += count_limits([output])
                unknown += output.unknown
                yield output.text
            self.unknown += unknown > 0
            self.outputs += 1

        with interrupt.raised():
            interactive.ask(pieces)

    def work(self, shown: Callable[[str, Output], str]) -> lines.Work[list[Output]]:
        """Returns what `lines.process` needs; `shown` formats an input and an output as plain text."""
        options = self.options

        def plain(line: Line, found: list[Output]) -> list[str]:
            return [self._with_score(output, shown(line.texts[0], output)) for output in found]

        def added(_: Line, found: list[Output]) -> dict[str, Any]:
            values = {
                "outputs": [output.text for output in found],
                "finish_reasons": [output.finish_reason for output in found],
                "unknown_tokens": [output.unknown for output in found],
                "scores": [output.score for output in found],
            }
            return {name: values[name] for name in names}

        names = ("outputs", "finish_reasons", "unknown_tokens", *(("scores",) if options.scores else ()))
        facts, count = {"decode": dataclasses.asdict(self.decode)}, options.outputs
        return lines.Work(
            options, self.stream, plain, added, names, settings=SETTINGS, facts=facts, lines_per_text=count
        )

    def _with_score(self, output: Output, text: str) -> str:
        """Returns `text` after the output's score, if scores are requested and the output has one."""
        return f"{output.score:.4f}\t{text}" if self.options.scores and output.score is not None else text


def load(options: argparse.Namespace, command: str, family: str) -> Generation:
    """Loads the run for a command that needs a model of a family, with the settings of the command line.

    Raises:
        UserError: the folder is not a run folder, its model is of another family, or a setting is invalid.
    """
    run = load_run(options)
    run.require(command, family)
    decode = run.decoding(decoding.given(options), options.outputs, flag)
    return Generation(options, run.params, decode, run.generator(decode))
