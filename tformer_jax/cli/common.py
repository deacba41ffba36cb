"""What the commands share: how they end, and the run they use."""

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tformer_jax.config import MESH_AXES, PRESETS, ConfigError, ParallelConfig
from tformer_jax.config.fields import nearest
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train.errors import RunError
from tformer_jax.train.trained import Trained, load_trained

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130
COMMANDS = {"seq2seq": "translate.py", "decoder_lm": "generate.py", "classifier": "classify.py"}
"""The script that uses a model, by its family."""


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs a command; it ends with one sentence on stderr and a status.

    2 for a user's mistake, 1 for a run that cannot go on, 130 for Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what it is told to do
    try:
        main()
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def load(run: Path, *families: str, mesh: ParallelConfig | None = None) -> Trained:
    """The trained model of a run, on a mesh of this machine's devices (None: on the first one).

    Raises:
        ConfigError: it is not a run folder, its model is of none of these families, or the mesh does not fit it.
    """
    placed = None if mesh is None else make_mesh(mesh)
    trained = load_trained(run, placed)
    if placed is not None:
        rules.check(trained.cfg, placed.shape)
    kind = trained.cfg.model.family
    if kind not in families:
        raise ConfigError(f"{run} holds a {kind} model: use scripts/{COMMANDS[kind]}")
    return trained


def run_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flag that names the run folder."""
    result = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    result.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder of scripts/train.py")
    result.add_argument(
        "--mesh",
        type=mesh,
        metavar="MESH",
        help=f"spread the model and the rows over devices: one of {', '.join(PRESETS)}, or sizes such as tensor=4 or "
        "fsdp=2,tensor=2, where data is what is left (default: one device)",
    )
    return result


def mesh(text: str) -> ParallelConfig:
    """An argparse type: a preset of `parallel`, or sizes of mesh axes, `AXIS=SIZE,...`."""
    if text in PRESETS:
        return ParallelConfig(preset=text)
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in MESH_AXES:
            raise argparse.ArgumentTypeError(f"{name!r} is no axis of the mesh{nearest(name, MESH_AXES)}")
        if not re.fullmatch(r"-1|[1-9]\d*", size):
            raise argparse.ArgumentTypeError(f"{part!r} is no size; write {name}=2, or {name}=-1 for all devices left")
        sizes[name] = int(size)
    return ParallelConfig(**sizes)


def whole(lowest: int) -> Callable[[str], int]:
    """An argparse type: a number from `lowest` to 2^31 - 1."""

    def number(text: str) -> int:
        value = int(text)
        if not lowest <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {lowest} on")
        return value

    return number
