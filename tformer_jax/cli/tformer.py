"""The installed command: `tformer train --config FILE` runs the same function as `python scripts/train.py`."""

import importlib
import sys
from collections.abc import Sequence

from tformer_jax import __version__
from tformer_jax.base.errors import UserError
from tformer_jax.cli import interrupt
from tformer_jax.cli.common import run_main
from tformer_jax.config.fields import nearest

COMMANDS = {
    "train": "train a config, or resume a run",
    "configs": "list the configs that come with the package",
    "translate": "translate texts",
    "generate": "continue prompts",
    "classify": "label texts",
    "fill_mask": "fill the masked tokens of texts",
    "score": "print log-probabilities of given texts",
    "rerank": "choose among the outputs of n-best lists",
    "evaluate": "evaluate a run on a split of its data",
    "embed": "embed texts as vectors",
    "serve": "serve a run over HTTP",
    "attention": "show what a model attends to",
    "report": "show runs in one HTML file",
    "compare": "compare two runs",
    "sweep": "train a config for each combination of settings",
    "pipeline": "run the commands of a file in order, and continue after an interruption",
    "prepare_data": "tokenize a corpus once",
    "import_hf": "import a Hugging Face checkpoint as a run",
    "vocabulary": "make a run with fewer or more tokens",
    "export_hf": "export a run for Hugging Face, CTranslate2 or PEFT",
    "completion": "print completions of commands, flags and settings for a shell",
}
"""Modules of `tformer_jax.cli`, with what they do."""
LAB_COMMANDS = {
    "explain": "explain Transformers with figures",
    "describe": "show what a model costs before it runs",
    "doctor": "check the machine, the mesh and the data before a run",
    "benchmark": "measure training, decoding, caches, attention, data and growth",
    "export_steps": "write the forward pass, the train step and greedy decoding of a run as StableHLO",
    "xla_flags": "print XLA flags for a mesh axis",
}
"""Modules of `tformer_jax.lab.commands`, with what they do."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command named by the first argument with the other arguments; without arguments, lists the commands."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: tformer [--version] COMMAND [--help]\n")
        print("\n".join(f"  {name:<14}{meaning}" for name, meaning in (COMMANDS | LAB_COMMANDS).items()))
        return
    if name == "--version":
        print(__version__)
        return
    importlib.import_module(f"{command_package(name)}.{name}").main(rest)


def command_package(command: str) -> str:
    """Returns the package with the module of a command.

    Raises:
        UserError: there is no such command.
    """
    if command not in COMMANDS | LAB_COMMANDS:
        raise UserError(f"unknown command {command!r}{nearest(command, COMMANDS | LAB_COMMANDS)}")
    return "tformer_jax.cli" if command in COMMANDS else "tformer_jax.lab.commands"


def run() -> None:
    """Runs the installed command."""
    interrupt.install_handler()
    run_main(main)
