"""A metric that a program of the user computes."""

import json
import math
import shlex
import subprocess
from collections.abc import Sequence

from tformer_jax.base import programs
from tformer_jax.base.errors import UserError
from tformer_jax.config import EvalConfig
from tformer_jax.config.metrics import Metric, References


class Command(Metric):
    """Scores by the program `eval.command`, higher for better outputs.

    It reads a JSON object with `source`, `output` and `references` per line and writes a number per line, in order, or
    a JSON list of the numbers. It runs without a shell. The score of a corpus is the mean.
    """

    settings = ("command", "command_seconds")

    @staticmethod
    def check(section: EvalConfig) -> None:
        """Requires a program that can be split into words."""
        if section.command is None:
            raise section.error("command", "must name a program for eval.metrics='command' or 'command_error'")
        try:
            words = shlex.split(section.command)
        except ValueError as error:
            raise section.error("command", f"cannot be split into words: {error}") from error
        if not words:
            raise section.error("command", "must name a program")

    def __init__(self, *args: object):
        super().__init__(*args)  # type: ignore[arg-type]
        self.signature = f"command:{self.evaluation.command}"

    def score_texts(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> Sequence[float]:
        """As `Metric.score_texts`.

        Raises:
            UserError: the program fails, or does not write a finite number for each output.
        """
        rows = zip(sources, outputs, references, strict=True)
        records = ({"source": source, "output": output, "references": list(each)} for source, output, each in rows)
        text = self._run("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
        try:
            scores = [float(value) for value in (json.loads(text) if text.startswith("[") else text.splitlines())]
        except (TypeError, ValueError) as error:
            raise self._error(f"must write numbers, one per line or as a JSON list: {error}") from error
        if len(scores) != len(outputs):
            raise self._error(f"wrote {len(scores):,} scores of {len(outputs):,} outputs")
        if not all(map(math.isfinite, scores)):
            raise self._error("wrote a score that is not finite")
        return scores

    def _run(self, text: str) -> str:
        seconds = self.evaluation.command_seconds
        words = shlex.split(self.evaluation.command)
        try:
            done = programs.run(words, text, seconds)
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within eval.command_seconds={seconds}") from None
        except (OSError, ValueError) as error:
            raise self._error(f"cannot be run: {getattr(error, 'strerror', None) or error}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing on the standard error"])[-1].strip()
            raise self._error(f"ended with exit code {done.returncode}: {last}")
        return done.stdout.strip()

    def _error(self, problem: str) -> UserError:
        return UserError(f"eval.command={self.evaluation.command!r}: {problem}")


class CommandError(Command):
    """As `Command`, where lower scores are better."""

    lower_is_better = True
