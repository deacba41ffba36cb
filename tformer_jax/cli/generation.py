"""What `translate.py` and `generate.py` share: decoding flags, the outputs of texts, and the interactive prompt."""

import argparse
import contextlib
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.base.paths import checksum
from tformer_jax.cli import chats, interrupt, languages, lines
from tformer_jax.cli.common import add_number, load_run
from tformer_jax.cli.inputs import Line, check_argument
from tformer_jax.cli.outputs import Facts, join_lines
from tformer_jax.config import DecodeConfig
from tformer_jax.config.fields import allowed_types, flag
from tformer_jax.data.characters import is_blank
from tformer_jax.data.word_links import format_links
from tformer_jax.inference.encoding import LongTexts

if TYPE_CHECKING:
    from tformer_jax.inference.outputs import Output, OutputCounts
    from tformer_jax.inference.text import TextGenerator, Translator

with contextlib.suppress(ImportError):  # line editing and history, if available
    import readline  # noqa: F401

METAVARS = {int: "N", float: "X", str: "TEXT"}
SETTINGS = ("seed", "outputs", "scores")
"""Options that determine the outputs, besides the settings of `DecodeConfig`."""
PROMPT = "> "


def make_parser(command: str, description: str, outputs: str) -> argparse.ArgumentParser:
    """Returns the parser of a command that decodes lines; `outputs` is the flag for the number of outputs."""
    result = lines.make_parser(command, description)
    lines.add_field(result)
    languages.add_prefix(result)
    add_flags(result, outputs)
    result.add_argument(
        "--interactive", action="store_true", help="prompt for texts; Ctrl-C stops an output, Ctrl-D exits"
    )
    return result


def add_flags(parser: argparse.ArgumentParser, outputs: str) -> None:
    """Adds the decoding settings, the flag `outputs` for the number of outputs, `--seed` and `--scores`."""
    add_settings(parser)
    add_number(parser, outputs, "outputs per text", 1, dest="outputs")
    add_number(parser, "--seed", "random seed", 0, lowest=0, unit="S")
    parser.add_argument(
        "--scores",
        action="store_true",
        help="write the score and a tab before each output; neither it nor its length counts tokens of decode.prefix",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting of `DecodeConfig`."""
    group = parser.add_argument_group("generation", "The default of each flag is the setting of the run.")
    annotations = typing.get_type_hints(DecodeConfig)
    for field in dataclasses.fields(DecodeConfig):
        kinds = [kind for kind in allowed_types(annotations[field.name]) if kind is not types.NoneType]
        users = "".join(f"{strategy}: " for strategy in field.metadata["used_by"].get("strategy", ()))
        meaning = users + field.metadata["meaning"].replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "help": meaning}
        if tuple in kinds:
            options |= {"action": "append", "metavar": "TEXT", "help": f"{meaning} (repeatable)"}
        elif bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        else:
            choices = field.metadata["choices"]
            options |= {"type": kinds[0], "metavar": "{" + ",".join(choices) + "}" if choices else METAVARS[kinds[0]]}
        group.add_argument(flag(field.name), **options)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of `DecodeConfig` that are given on the command line, by name."""
    named = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(DecodeConfig)}
    return {name: value for name, value in named.items() if value is not None}


def run_command(
    options: argparse.Namespace,
    command: str,
    format_output: Callable[[str, "Output"], str],
    print_texts: Callable[[lines.Source, lines.Work[list["Output"]]], None] | None = None,
) -> None:
    """Writes the outputs of all lines, or answers texts at a prompt, and reports on stderr what ended outputs early.

    Args:
        format_output: formats an input and an output as plain text.
        print_texts: prints the outputs of texts on the command line that do not go to a file; None: as lines.

    Raises:
        UserError: flags contradict each other, the folder is not a run folder, its task is another, or a setting is
            invalid.
    """
    check_interactive(options)
    source = lines.open_source(options)
    run = load_run(options)
    run.require(command)
    decode = run.decoding(given_settings(options), options.outputs, flag)
    conversations = chats.Chats.given(options, run.tokenizers.target)
    generation = Generation(options, run.params, decode, run.generator(decode), chats=conversations)
    work, at_once = generation.work(format_output), print_texts and options.text and not options.output
    if not (options.interactive or at_once):
        lines.process_lines(source, work, generation.report)
        return
    try:
        if options.interactive:
            with interrupt.raising_interrupts():
                answer_prompts(generation.answer)
        elif print_texts:
            print_texts(source, work)
    finally:
        generation.report()


@dataclasses.dataclass
class Generation:
    """A trained model, with the decoding settings of the command line."""

    options: argparse.Namespace
    params: Any
    decode: DecodeConfig
    model: "Translator | TextGenerator"
    chats: "chats.Chats | None" = None
    """Makes the conversations of `--chat`."""

    @functools.cached_property
    def counts(self) -> "OutputCounts":
        """Numbers of outputs so far."""
        from tformer_jax.inference.outputs import OutputCounts

        return OutputCounts()

    def stream(self, texts: Iterator[Any], *, skip: int, long_texts: LongTexts) -> Iterator[list["Output"]]:
        """Yields the outputs of each text, or tuple of a text and its fields, after the first `skip`, in order."""
        wanted = {name: getattr(self.options, name) for name in SETTINGS}
        whole = ((text,) if isinstance(text, str) else text for text in texts)
        lines_of_texts = (languages.make_request(self.options, text, fields) for text, *fields in whole)
        requests = lines_of_texts if self.chats is None else self.chats.requests(texts)
        for outputs in self.model.stream(self.params, requests, **wanted, skip=skip, long_texts=long_texts):
            self.counts.add(outputs)
            yield outputs

    def report(self, before: int = 0) -> None:
        """Prints the numbers of `OutputCounts` to stderr.

        Args:
            before: number of texts whose outputs the interrupted command has written.
        """
        after = f", after {counted(before, 'text')} of the interrupted command" if before else ""
        for sentence in self.counts.describe(self.model.cfg):
            print(f"{sentence}{after}", file=sys.stderr)

    def answer(self, text: str, number: int) -> Iterator[str]:
        """Yields the pieces of the output of a text at the prompt; its number, from 0, changes the seed."""
        from tformer_jax.inference.outputs import Parts

        long_texts = LongTexts(self.options.on_long_line)
        if self.chats is not None and text.strip() == chats.NEW:
            self.chats.turns.clear()
            return
        request = self.chats.turn(text) if self.chats else languages.make_request(self.options, text)
        try:
            seed = self.options.seed + number
            pieces = self.model.stream_pieces(self.params, request, seed=seed, long_texts=long_texts)
        except UserError:
            if self.chats is not None:
                self.chats.keep("")
            raise
        if long_texts.pop(0):
            print(f"too long for the model and {lines.DONE[long_texts.action]}", file=sys.stderr)
        shown: list[Output] = []
        try:
            for output in pieces:
                shown.append(output)
                yield output.text
        finally:  # also if it is interrupted
            if self.chats is not None:
                self.chats.keep("".join(output.text for output in shown))
        if shown[-1].alignment is not None:
            yield f"\t{format_links(shown[-1].alignment)}"
        (whole,) = Parts((), ("",) * (len(shown) + 1)).join([[output] for output in shown])
        self.counts.add([whole._replace(sentences=shown[-1].sentences)])

    def work(self, format_output: Callable[[str, "Output"], str]) -> lines.Work[list["Output"]]:
        """Returns what `lines.process_lines` needs; `format_output` formats an input and an output as plain text."""

        def plain(line: Line, outputs: list["Output"]) -> list[str]:
            text = line.texts[0] if line.texts else ""
            return [self._annotated(output, format_output(text, output)) for output in outputs]

        def added(_: Line, outputs: list["Output"]) -> dict[str, Any]:
            values = {
                "outputs": [output.text for output in outputs],
                "finish_reasons": [output.finish_reason for output in outputs],
                "unknown_tokens": [output.unknown for output in outputs],
                "placeholders_kept": [output.placeholders_kept for output in outputs],
                "alignments": [None if each.alignment is None else format_links(each.alignment) for each in outputs],
                "constraints_met": [output.constraints_met for output in outputs],
                "sentences": outputs[0].sentences,
                "scores": [output.score for output in outputs],
            }
            return {name: values[name] for name in names}

        has_placeholders = self.model.tokenizers.placeholders or self.decode.markup == "align"
        optional = {
            "placeholders_kept": has_placeholders,
            "alignments": self.decode.alignments,
            "constraints_met": self.options.constraints_field or self.decode.glossary,
            "sentences": self.decode.split_sentences,
            "scores": self.options.scores,
        }
        names = ("outputs", "finish_reasons", "unknown_tokens", *(name for name, used in optional.items() if used))
        facts: Facts = {"decode": dataclasses.asdict(self.decode), "languages": languages.given_languages(self.options)}
        if self.decode.glossary and (path := Path(self.decode.glossary)).is_file():
            facts["glossary"] = {"sha256": checksum(path)}
        how: Any = {"facts": facts, "lines_per_text": self.options.outputs}
        if self.chats is None:
            how |= {"fields": ("field", *languages.given_fields(self.options)), "settings": SETTINGS}
        else:
            how |= {"fields": self.chats.fields, "settings": (*SETTINGS, *chats.SETTINGS)}
        return lines.Work(self.options, self.stream, plain, added, names, **how)

    def _annotated(self, output: "Output", text: str) -> str:
        """Returns `text` between the output's score and its alignment, as far as they are requested and known."""
        text = text if output.alignment is None else f"{join_lines(text)}\t{format_links(output.alignment)}"
        return f"{output.score:.4f}\t{text}" if self.options.scores and output.score is not None else text


def check_interactive(options: argparse.Namespace) -> None:
    """Raises `UserError` if other flags contradict `--interactive`."""
    others = {
        "texts": options.text,
        "--input": options.input,
        "--output": options.output,
        "--scores": options.scores,
        "several outputs": options.outputs > 1,
        "--resume": options.resume,
        **{flag(name): True for name in languages.given_fields(options)},
    }
    for name, given in others.items():
        if options.interactive and given:
            raise UserError(f"--interactive cannot be combined with {name}: omit one of them")


def answer_prompts(answer: Callable[[str, int], Iterator[str]]) -> None:
    """Prompts for texts, and prints the pieces of `answer(text, n)`, where n is the number of texts answered before.

    Errors are printed. Ctrl-C stops an answer or discards the line; Ctrl-D exits.
    """
    count = 0
    while True:
        try:
            text = input(PROMPT)
            if not is_blank(text):
                for piece in answer(check_argument(text), count):
                    print(piece, end="", flush=True)
                print()
                count += 1
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except (UserError, UnicodeDecodeError) as error:
            print(f"error: {error}", file=sys.stderr)
