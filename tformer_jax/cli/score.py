"""`scripts/score.py`: computes log-probabilities of given texts with a trained model."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tformer_jax.cli import lines
from tformer_jax.cli.inputs import Fields, Line
from tformer_jax.cli.outputs import as_json
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.special_tokens import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tformer_jax.inference.score import Scored


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
        perplexity = f"{math.exp(self.nats / self.tokens):.4g}" if self.tokens else "unknown"
        return f"perplexity {perplexity} ({self.tokens:,} tokens of {self.texts:,} texts)"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints log-probability, number of scored tokens and text, tab-separated, per text; the perplexity to stderr."""
    options = parser().parse_args(argv)
    source = lines.opened(options, options.text)
    from tformer_jax.cli import loading
    from tformer_jax.inference.score import Scorer

    trained = loading.load(options.run, "seq2seq", "decoder_lm", mesh=options.mesh)
    score = Scorer(trained.cfg, trained.model, trained.tokenizers)
    totals = Totals()

    def results(found: Iterator[Line], skip: int) -> "Iterator[Scored]":
        for result in score.stream(trained.params, (line.texts for line in found), skip=skip):
            totals.add(result)
            yield result

    def added(_: Line, result: "Scored") -> dict[str, Any]:
        return record(result, trained.tokenizers.target, per_token=options.per_token)

    def plain(line: Line, result: "Scored") -> list[str]:
        if options.per_token:
            return [as_json({**line.record, **added(line, result)})]
        return [f"{result.total:.4f}\t{len(result.tokens)}\t{line.texts[-1]}"]

    fields = fields_of(options, trained.cfg.model.family)
    names = ("log_probability", "tokens", "log_probabilities")
    settings = {"command": {"per_token": options.per_token, **fields}}
    before = lines.process(options, source, lines.Work(fields, settings, results, plain, added, names))
    print(f"{totals}, after {before:,} texts of the interrupted command" if before else totals, file=sys.stderr)


def fields_of(options: argparse.Namespace, family: str) -> Fields:
    """Returns the fields to score: source and target, or a text."""
    if family == "seq2seq":
        return {"--source-field": options.source_field, "--target-field": options.target_field}
    return {"--field": options.field}


def record(result: "Scored", tokenizer: Tokenizer, *, per_token: bool) -> dict[str, Any]:
    """Returns the log-probability of a text, with its number of tokens, or with each token and its log-probability."""
    if not per_token:
        return {"log_probability": result.total, "tokens": len(result.tokens)}
    texts = [SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else tokenizer.decode([i]) for i in result.tokens]
    return {"log_probability": result.total, "tokens": texts, "log_probabilities": result.log_probabilities}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    result = lines.parser(
        "score.py",
        "Computes log-probabilities of texts with a language model, or of targets with a translation model. Lines of "
        "pairs are source<tab>target. The first token of a text is not scored; the end of a target is.",
    )
    for name in ("text", "source", "target"):
        lines.add_field(result, name)
    result.add_argument(
        "--per-token", action="store_true", help="write JSON: each scored token and its log-probability"
    )
    return result
