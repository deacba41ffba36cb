"""Shared parts of the commands: entry point, exit statuses and common flags."""

import argparse
import contextlib
import difflib
import errno
import gc
import io
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tformer_jax.base.cpu import keep_memory, run_in_calling_thread
from tformer_jax.base.errors import FULL_DISK, RunError, UserError
from tformer_jax.base.numbers import GIB, KIB, MIB
from tformer_jax.base.paths import as_path, check_replaceable, resolved, write_text
from tformer_jax.base.workarounds import silence_orbax
from tformer_jax.cli import compilation_cache, interrupt
from tformer_jax.config import MESH_PRESETS
from tformer_jax.config.fields import INT32_MAX
from tformer_jax.config.kinds import import_modules
from tformer_jax.config.layers import MEANS, QUANTIZATIONS
from tformer_jax.runs.provenance import program

if TYPE_CHECKING:
    from tformer_jax.api import Run

FAILED, USER_ERROR, INTERRUPTED = 1, 2, interrupt.STATUS
FILE_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EROFS)
"""Errors of the names or permissions of files that a user gives."""
DATA_VARIABLE = "TFORMER_DATA"
"""Environment variable with the default of `--data`."""


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs a command and exits; errors are reported in one sentence on stderr.

    The status is 0, 2 for a user error, 1 for a run that cannot continue, or 130 for Ctrl-C.
    """
    interrupt.install_handler()
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    silence_orbax()
    keep_memory()
    compilation_cache.enable_cache()
    gc.set_threshold(100_000, 50, 100)  # tracing allocates many long-lived objects
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
        gc.freeze()  # the final collection at exit then skips all objects
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR if isinstance(error, UserError) else FAILED)
    except KeyboardInterrupt:
        interrupt.end_process()
    except BrokenPipeError:
        discard_output()
    except OSError as error:
        if error.errno in FILE_ERRORS and error.filename is not None:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            sys.exit(USER_ERROR)
        if error.errno not in FULL_DISK:
            raise
        discard_output()
        print(f"error: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)
    sys.exit(0)


def load_run(options: argparse.Namespace, *, needs_head: bool = True) -> "Run":
    """Loads the run of the flags of `add_run` and `add_weights`; JAX then runs its programs in the calling thread.

    Raises:
        UserError: there is no such run, or it has no output head, which the command needs.
    """
    import tformer_jax

    import_modules(options.imports)
    run_in_calling_thread()
    names = {"quantize": "quantization", "ensemble": "ensemble", "mean": "mean"}
    weights = {name: given for option, name in names.items() if (given := getattr(options, option, None))}
    if "mean" in weights and "ensemble" not in weights:
        raise UserError("--mean is for an ensemble: add --ensemble DIR, or leave it out")
    run = tformer_jax.load(options.run, mesh=options.mesh, step=options.step, **weights)
    if needs_head:
        run.require_head("this command")
    return run


def discard_output() -> None:
    """Discards output that stdout has not accepted, so that the interpreter does not write it again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Once(argparse.Action):
    """Stores the value of a flag, and refuses a second one, which would replace it without a word."""

    _filled: argparse.Namespace | None = None

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None and self._filled is namespace:
            raise argparse.ArgumentError(self, "is written twice; write it once")
        self._filled = namespace
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """A parser, or one of a subcommand, whose flags are written in full and once."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)
        self.register("action", None, _Once)
        self._given: Sequence[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses the flags; returns settings, `--config.SECTION.SETTING`, and other arguments as unknown ones.

        Raises:
            UserError: another flag is unknown; the message names the nearest one.
        """
        self._given = sys.argv[1:] if args is None else args
        options, others = super().parse_known_args(args, namespace)
        for argument in others:
            if (flag := re.match(r"--[a-z][\w-]*(?![\w.-])|-[a-z]\b", argument)) and flag[0] != "--import":
                hint = self._nearest(flag[0]) or f"; {self.prog} --help lists the flags"
                raise UserError(f"unknown flag {flag[0]!r}{hint}")
        return options, others

    def error(self, message: str) -> NoReturn:
        """Exits with the usage and a message, which names the nearest flag to an unknown one."""
        flags = {argument.partition("=")[0] for argument in self._given if re.match(r"--(?!config\.)", argument)}
        hints = [f"{flag!r} is unknown{hint}" for flag in sorted(flags) if (hint := self._nearest(flag))]
        super().error("; ".join([message, *hints]))

    def _nearest(self, flag: str) -> str:
        """Returns a hint for an unknown flag: `; did you mean '--beams'?`; "" for a known flag or if none is close."""
        known = set(re.findall(r"--[\w.-]+", self.format_usage()))
        close = [] if flag in known else difflib.get_close_matches(flag, known, n=1)
        return f"; did you mean {close[0]!r}?" if close else ""


def new_parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser without flags, named `tformer COMMAND` as installed, `COMMAND.py` as a script."""
    started = program()
    name = " ".join([*started, command]) if started else f"{command}.py"
    return _Parser(prog=name, description=description, epilog=epilog)


def run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of `add_run`."""
    result = new_parser(command, description)
    add_run(result)
    return result


def add_run(
    parser: argparse.ArgumentParser, *, required: bool = True, meaning: str = "run folder of scripts/train.py"
) -> None:
    """Adds the flags `--run`, `--step`, `--mesh` and `--import`, which `load_run` reads."""
    parser.add_argument("--run", type=run_path, required=required, metavar="DIR", help=meaning)
    parser.add_argument(
        "--step",
        type=integer(0),
        metavar="N",
        help="use the checkpoint of this step: its parameters, or their EMA if train.weights='ema' (default: the final "
        "weights, or the newest checkpoint of a run that has not finished)",
    )
    add_mesh(parser)
    add_imports(parser)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Adds the flags `--quantize`, `--ensemble` and `--mean`, which `load_run` reads."""
    parser.add_argument(
        "--ensemble",
        type=run_path,
        action="append",
        default=[],
        metavar="DIR",
        help="decode together with this run, which has the same vocabulary (repeatable)",
    )
    parser.add_argument("--mean", choices=MEANS, help=f"what an ensemble averages at each token (default: {MEANS[0]})")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="store the kernels of layers as int8 (int8_weights), and also multiply in int8 (int8); extra: quantize",
    )


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--import`."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module that registers kinds, from the current folder or Python's path; a run records it "
        "(repeatable)",
    )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--mesh`."""
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="shard the model and the rows over devices, such as data=2,tensor=4, or a preset: "
        f"{', '.join(MESH_PRESETS)} (default: one device)",
    )


def add_data(parser: argparse.ArgumentParser, meaning: str = "data folder, for configs that read files") -> None:
    """Adds the flag `--data`."""
    text = f"{meaning} (default: the variable {DATA_VARIABLE})"
    add_path(parser, "--data", text, "DIR", default=os.environ.get(DATA_VARIABLE))


def run_path(text: str) -> Path:
    """Returns the path of a run folder, local or `gs://BUCKET/FOLDER`; an argparse type."""
    try:
        return as_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def integer(lowest: int, highest: int = INT32_MAX) -> Callable[[str], int]:
    """Returns an argparse type for integers from `lowest` to `highest`, by default 2^31 - 1."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if highest < INT32_MAX and not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{text} must be an integer from {lowest} to {highest}")
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text} is not an integer of at least {lowest}")
        if value > highest:
            raise argparse.ArgumentTypeError(f"{text} is too large: at most {highest}")
        return value

    return number


def add_number(
    parser: "argparse._ActionsContainer",
    flag: str,
    meaning: str,
    default: int | None = None,
    *,
    lowest: int = 1,
    highest: int = INT32_MAX,
    unit: str = "N",
    dest: str | None = None,
) -> None:
    """Adds a flag for an integer from `lowest` to `highest`, whose help ends with the default, if there is one."""
    text = meaning if default is None else f"{meaning} (default: {default})"
    parser.add_argument(flag, type=integer(lowest, highest), default=default, metavar=unit, help=text, dest=dest)


def add_seconds(parser: argparse.ArgumentParser, flag: str, meaning: str, default: float) -> None:
    """Adds a flag for a positive number of seconds, whose help ends with the default."""
    text = f"{meaning} (default: {default:g})"
    parser.add_argument(flag, type=positive_seconds, default=default, metavar="S", help=text)


def add_path(parser: "argparse._ActionsContainer", flag: str, meaning: str, unit: str = "FILE", **options: Any) -> None:
    """Adds a flag for a path; `options` are further ones of `add_argument`."""
    parser.add_argument(flag, type=local_path, metavar=unit, help=meaning, **options)


def local_path(text: str) -> Path:
    """Returns a path, which is no URL; an argparse type."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL: name a local file or folder")
    return Path(text)


def positive_seconds(text: str) -> float:
    """Returns a positive, finite number; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def format_size(count: int) -> str:
    """Formats a number of bytes as KiB, MiB or GiB."""
    unit, name = (GIB, "GiB") if count >= GIB else (MIB, "MiB") if count >= MIB else (KIB, "KiB")
    return f"{count / unit:.2f} {name}"


def check_writable(path: Path, flag: str = "--record") -> None:
    """Checks, before anything is computed, that `path`, which `flag` names, can be written; creates its folder.

    Raises:
        UserError: the folder cannot be created or written to, the name is too long, or `path` is a folder or a file
            that a run needs.
    """
    if path.is_dir():
        raise UserError(f"{flag} {path}: cannot be written, because it is a folder; name a file")
    path = resolved(path)
    check_not_of_run(path, flag)
    if path.exists() and not path.is_file():  # a device or a pipe
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = f".{path.name}."  # the temporary file of the record has a name of this length
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=partial).close()
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); name a file in a writable folder"
        raise UserError(f"{flag} {path}: {problem}") from error


def check_not_of_run(path: Path, flag: str) -> None:
    """Checks that a file which `flag` names is not one that a run needs.

    Raises:
        UserError: it is.
    """
    from tformer_jax.runs import run_folder

    if run := run_folder.owner(path):
        raise UserError(f"{flag} {path}: is a file of the run {run}; name another")


@contextlib.contextmanager
def reporting_writes(path: Path) -> Iterator[None]:
    """Context manager that reports a file `path` that cannot be written.

    Raises:
        UserError: the block raises an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another file") from error


def write_output(path: Path, text: str) -> None:
    """Writes a text to a file; raises `UserError` if the file cannot be written."""
    with reporting_writes(path):
        write_text(path, text)


def check_new_folder(path: Path) -> None:
    """Checks, before anything is computed, that the argument FOLDER is new or empty, and can be created.

    Raises:
        UserError: it is not.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} already exists: name a new folder")
    check_writable_folder(path, "FOLDER")


def check_writable_folder(path: Path, flag: str) -> None:
    """Checks, before anything is computed, that the folder `path`, which `flag` names, can be created.

    Raises:
        UserError: its parent cannot be created or written to, or the working directory is in the folder.
    """
    check_replaceable(path)
    parent = path.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name}.").cleanup()
    except OSError as error:
        reason = f"{parent} is a file" if parent.is_file() else error.strerror
        problem = f"cannot be written ({reason}); name a folder in a writable folder"
        raise UserError(f"{flag} {path}: {problem}") from error
