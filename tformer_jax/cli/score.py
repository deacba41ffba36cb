"""`scripts/score.py`: computes log-probabilities of given texts with a trained model."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tformer_jax.cli import lines
from tformer_jax.cli.common import load_run
from tformer_jax.cli.inputs import Fields, Line
from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers import Tokenizer, token_texts
from tformer_jax.inference.encoding import LongTexts

if TYPE_CHECKING:
    from tformer_jax.inference.score import Scored

FIELDS = {"--field": "text", "--source-field": "source", "--target-field": "target"}
"""Fields of .jsonl by flag, with their defaults."""
NAMES = ("log_probability", "tokens", "log_probabilities")
"""Fields that are added to a record, the last one only with --per-token."""


@dataclasses.dataclass
class Totals:
    """Totals over all scored texts."""

    nats: float = 0.0
    tokens: int = 0
    texts: int = 0

    def add(self, result: "Scored") -> None:
        """Adds one text."""
        self.nats -= result.total
        self.tokens += len(result.tokens)
        self.texts += 1

    def __str__(self) -> str:
        mean = self.nats / self.tokens if self.tokens else math.nan
        value = math.inf if mean > math.log(sys.float_info.max) else math.exp(mean)
        perplexity = f"{value:.4g}" if self.tokens else "unknown"
        return f"perplexity {perplexity} (tokens: {self.tokens:,}, texts: {self.texts:,})"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints log-probability, number of scored tokens and text, tab-separated, per text; the perplexity to stderr."""
    options = parser().parse_args(argv)
    source = lines.opened(options, options.text)
    run = load_run(options.run, options.mesh)
    scorer, long_texts, totals = run.scorer(), LongTexts(options.on_long_line), Totals()

    def results(found: Iterator[Line], skip: int) -> "Iterator[Scored]":
        return scorer.stream(run.params, (line.texts for line in found), skip=skip, long_texts=long_texts)

    def added(_: Line, result: "Scored") -> dict[str, Any]:
        totals.add(result)
        return record(result, run.tokenizers.target, per_token=options.per_token)

    def plain(line: Line, result: "Scored") -> list[str]:
        totals.add(result)
        return [f"{result.total:.4f}\t{len(result.tokens)}\t{line.texts[-1]}"]

    fields = fields_of(options, run.config.model.family)
    settings = {"command": {"per_token": options.per_token, **fields}}
    names = NAMES if options.per_token else NAMES[:2]
    work = lines.Work(
        fields=fields,
        settings=settings,
        results=results,
        plain=plain,
        added=added,
        names=names,
        long_texts=long_texts,
        as_json=options.per_token,
    )
    before = lines.process(options, source, work)
    print(f"{totals}, after {before:,} texts of the interrupted command" if before else totals, file=sys.stderr)


def fields_of(options: argparse.Namespace, family: str) -> Fields:
    """Returns the fields to score: source and target, or a text.

    Raises:
        ConfigError: a field is named that this family does not read.
    """
    text = {"--field": options.field}
    pair = {"--source-field": options.source_field, "--target-field": options.target_field}
    read, unread = (pair, text) if family == "seq2seq" else (text, pair)
    for flag, name in unread.items():
        if name != FIELDS[flag]:
            raise ConfigError(f"{flag} has no effect for model.family={family!r}; write {' and '.join(read)}")
    return read


def record(result: "Scored", tokenizer: Tokenizer, *, per_token: bool) -> dict[str, Any]:
    """Returns the log-probability of a text, with its number of tokens, or with each token and its log-probability."""
    if not per_token:
        return {"log_probability": result.total, "tokens": len(result.tokens)}
    texts = token_texts(tokenizer, result.tokens)
    return {"log_probability": result.total, "tokens": texts, "log_probabilities": result.log_probabilities}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = lines.parser(
        "score",
        "Computes log-probabilities of texts with a language model, or of targets with a translation model. Lines of "
        "pairs are source<tab>target. The first token of a text is not scored, unless the tokenizer begins texts with "
        "a special token; the end of a target is.",
    )
    for name in FIELDS.values():
        lines.add_field(result, name)
    result.add_argument(
        "--per-token", action="store_true", help="write JSON: each scored token and its log-probability"
    )
    return result
