"""`scripts/completion.py`: prints completions of the command `tformer` for bash, which zsh reads too."""

import contextlib
import dataclasses
import io
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from tformer_jax.cli import tformer
from tformer_jax.cli.common import new_parser
from tformer_jax.cli.config_file import shipped_configs
from tformer_jax.config import Config
from tformer_jax.config.fields import Section

SCRIPT = """_tformer() {{
  local words="" word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={commands}
  elif [ "$before" = --config ]; then
    words={configs}
  elif [[ "$word" == --config.* ]]; then
    words={settings}
    compopt -o nospace 2>/dev/null
  elif [[ "$word" == -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{flags}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tformer tformer"""
"""Completes from lists of words; it never starts Python."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the completions; they name what this version of the package has."""
    new_parser(
        "completion",
        "Prints completions of commands, flags, configs and settings. Write them to a file that "
        "your shell sources, in zsh after `autoload bashcompinit; bashcompinit`.",
    ).parse_args(argv)
    commands = tformer.COMMANDS | tformer.LAB_COMMANDS
    flags = (f"      {name}) words={_quoted(_flags(name))} ;;" for name in commands)
    words = {"configs": _quoted(shipped_configs()), "settings": _quoted(_settings(Config))}
    print(SCRIPT.format(flags="\n".join(flags), commands=_quoted(commands), **words))


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _flags(command: str) -> list[str]:
    """Returns the flags that the help of a command, and of its subcommands, lists."""
    text = _help(command)
    if re.search(r"^usage: .* \.\.\.$", text, re.MULTILINE):
        text += "".join(_help(command, name) for name in re.findall(r"^    ([a-z]+)\b", text, re.MULTILINE))
    columns = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
    return [*dict.fromkeys(flag for column in columns for flag in re.findall(r"--[\w-]+", column))]


def _help(*command: str) -> str:
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        tformer.main([*command, "--help"])
    return text.getvalue()


def _settings(section: type[Section], prefix: str = "--config.") -> Iterator[str]:
    """Yields `--config.SECTION.SETTING=` for all settings of a section."""
    nested = section.nested()
    for field in dataclasses.fields(section):
        if field.name in nested:
            yield from _settings(nested[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}="
