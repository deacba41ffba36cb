"""Kills a command that writes a file with SIGKILL at random moments and resumes it until it ends.

python -m tests.cli.kill_lines INPUT OUTPUT SEED prints how often it was killed.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tformer_jax.cli import lines
from tformer_jax.cli.inputs import Line, Source
from tformer_jax.inference.batching import run_in_chunks
from tformer_jax.inference.encoding import LongTexts

SECONDS_A_CHUNK = 0.01
UNUSED = {"step": None, "quantize": None, "ensemble": ()}
"""Options of the commands that choose other weights of the run."""


def echo(source: Path, output: Path, *, resume: bool, sleep: float) -> None:
    """Writes each line twice, slowly, like a model with chunks of four texts."""
    run = source.parent / "run"
    defaults = {"on_long_line": "stop", "field": "text", **UNUSED}
    options = argparse.Namespace(output=output, resume=resume, run=run, **defaults)

    def stream(texts: Iterator[str], *, skip: int, long_texts: LongTexts) -> Iterator[str]:
        def compute(texts: list[str]) -> Iterator[str]:
            time.sleep(sleep)
            return [text.upper() for text in texts]

        return run_in_chunks(texts, lambda _, text: text, compute, skip=skip, size=4)

    def plain(_: Line, text: str) -> list[str]:
        return [text] * 2

    work = lines.Work(options, stream, plain, lambda _, text: {"out": text}, ("out",), lines_per_text=2)
    lines.process_lines(Source([], source), work)


def kill_until_done(source: Path, output: Path, draw: random.Random) -> int:
    """Returns the number of processes that were killed."""
    kills = 0
    while True:
        child = os.fork()
        if not child:
            echo(source, output, resume=True, sleep=SECONDS_A_CHUNK)
            os._exit(0)
        time.sleep(draw.uniform(0, 0.08 + 0.005 * kills))  # on a busy machine, too, one child will end
        os.kill(child, 9)
        if os.waitpid(child, 0)[1] == 0:
            return kills
        kills += 1


if __name__ == "__main__":
    print(kill_until_done(Path(sys.argv[1]), Path(sys.argv[2]), random.Random(sys.argv[3])))
