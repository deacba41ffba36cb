"""Shared parts of `translate.py` and `generate.py`."""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tformer_jax.cli import decoding, interactive, interrupt, lines, loading
from tformer_jax.cli.inputs import Line, Source
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.outputs import Output
from tformer_jax.inference.text import TextGenerator, Translator

KINDS: dict[str, Callable[..., Translator | TextGenerator]] = {"seq2seq": Translator, "decoder_lm": TextGenerator}
"""Classes that generate outputs, by model family."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """A trained model, with the generation settings of the command line."""

    options: argparse.Namespace
    params: Any
    decode: DecodeConfig
    model: Translator | TextGenerator

    def outputs(self, texts: Iterable[str], skip: int = 0) -> Iterator[list[Output]]:
        """Yields the outputs of each text, in order, without those of the first `skip` texts."""
        options = self.options
        wanted = {"seed": options.seed, "outputs": options.outputs, "scores": options.scores}
        return self.model.stream(self.params, texts, **wanted, skip=skip)

    def answer(self) -> None:
        """Answers texts at an interactive prompt, each with a different seed."""
        with interrupt.raised():
            interactive.ask(lambda text, n: self.model.stream_pieces(self.params, text, seed=self.options.seed + n))

    def process(self, source: Source, shown: Callable[[str, Output], str]) -> None:
        """Writes the outputs of each line; `shown` formats an input and an output as plain text."""

        def results(found: Iterator[Line], skip: int) -> Iterator[list[Output]]:
            return self.outputs((line.texts[0] for line in found), skip)

        def plain(line: Line, found: list[Output]) -> list[str]:
            return [self.with_score(output, shown(line.texts[0], output)) for output in found]

        def added(_: Line, found: list[Output]) -> dict[str, Any]:
            scores = {"scores": [output.score for output in found]} if self.options.scores else {}
            return {"outputs": [output.text for output in found], **scores}

        options = self.options
        command = {name: getattr(options, name) for name in ("field", "seed", "outputs", "scores")}
        settings = {"command": command, "decode": dataclasses.asdict(self.decode)}
        fields = {"--field": options.field}
        names = ("outputs", "scores") if options.scores else ("outputs",)
        lines.process(options, source, lines.Work(fields, settings, results, plain, added, names, options.outputs))

    def with_score(self, output: Output, text: str) -> str:
        """Returns `text` after the output's score, if scores are requested and the output has one."""
        return f"{output.score:.4f}\t{text}" if self.options.scores and output.score is not None else text


def load(options: argparse.Namespace, family: str) -> Generation:
    """Loads the model of the run, with the settings of the command line.

    Raises:
        ConfigError: the folder is not a run folder, its model is of another family, or a setting is invalid.
    """
    trained = loading.load(options.run, family, mesh=options.mesh)
    decode = decoding.decode_config(trained.cfg.decode, options, decoding.STRATEGIES[family])
    cfg = dataclasses.replace(trained.cfg, decode=decode)
    return Generation(options, trained.params, decode, KINDS[family](cfg, trained.model, trained.tokenizers))
