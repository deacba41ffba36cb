"""`scripts/score.py`: computes log-probabilities of given texts with a trained model."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.cli import chats, languages, lines, outputs
from tformer_jax.cli.common import load_run
from tformer_jax.cli.inputs import Line
from tformer_jax.config import ModelConfig
from tformer_jax.config.fields import flag
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.tokenizers import Tokenizer, token_texts

if TYPE_CHECKING:
    from tformer_jax.inference.scores import Scored

FIELDS = {"field": "text", "source_field": "source", "target_field": "target"}
"""Default names of fields of .jsonl, by option."""
NAMES = ("log_probability", "tokens", "unknown_tokens", "log_probabilities")
"""Fields that are added to a record, the last one only with --per-token."""


@dataclasses.dataclass
class Totals:
    """Totals over all scored texts."""

    nats: float = 0.0
    tokens: int = 0
    texts: int = 0
    """Number of texts with a scored token."""
    unscored: int = 0
    """Number of other texts, such as blank lines."""
    unknown: int = 0
    """Number of unknown tokens; the score does not depend on their texts."""

    def add(self, result: "Scored", unknown: int) -> None:
        """Adds one text with its number of unknown tokens."""
        self.nats -= result.total
        self.tokens += len(result.tokens)
        self.texts += bool(result.tokens)
        self.unscored += not result.tokens
        self.unknown += unknown

    def __str__(self) -> str:
        mean = self.nats / self.tokens if self.tokens else math.nan
        value = math.inf if mean > math.log(sys.float_info.max) else math.exp(mean)
        perplexity = f"{value:.4g}" if self.tokens else "unknown"
        unscored = f", texts without a scored token: {self.unscored:,}" if self.unscored else ""
        unknown = f", unknown tokens: {self.unknown:,}, whose texts do not affect scores" if self.unknown else ""
        return f"perplexity {perplexity} (tokens: {self.tokens:,}, texts: {self.texts:,}{unscored}{unknown})"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints log-probability, number of scored tokens and text, tab-separated, per text; the perplexity to stderr."""
    options = parser().parse_args(argv)
    source = lines.open_source(options)
    run = load_run(options)
    scorer, totals = run.scorer(), Totals()
    fields = text_fields(options, run.config.model)
    count = len(fields)
    if options.chat:
        fields = chats.record_fields(options, run.tokenizers.target)

    def example(texts: Any) -> tuple[Any, ...] | Chat:
        """Returns the text, or the source with its languages and the target."""
        if isinstance(texts, Chat):
            return texts
        if count == 1:
            return (texts,)
        source, target, *by_line = texts
        return languages.make_request(options, source, by_line), target

    def stream(texts: Iterator[Any], **how: Any) -> "Iterator[Scored]":
        given = chats.read_records(texts, options.field) if options.chat else texts
        return scorer.stream(run.params, map(example, given), **how)

    special = run.tokenizers.target.special

    def added(_: Line, result: "Scored") -> dict[str, Any]:
        totals.add(result, special.count_unknown(result.tokens))
        return score_fields(result, run.tokenizers.target, per_token=options.per_token)

    def plain(line: Line, result: "Scored") -> list[str]:
        totals.add(result, special.count_unknown(result.tokens))
        text = line.texts[count - 1] if line.texts else run.tokenizers.target.decode(result.tokens)
        return [f"{result.total:.4f}\t{len(result.tokens)}\t{text}"]

    names = NAMES if options.per_token else NAMES[:3]
    settings = ("per_token", "chat", "field") if options.chat else ("per_token",)
    facts: outputs.Facts = {"languages": languages.given_languages(options)}
    how: dict[str, Any] = {"settings": settings, "facts": facts}
    fields = (*fields, *languages.given_fields(options))
    work = lines.Work(options, stream, plain, added, names, fields=fields, as_json=options.per_token, **how)
    before = lines.process_lines(source, work)
    after = f", after {counted(before, 'text')} of the interrupted command" if before else ""
    print(f"{totals}{after}", file=sys.stderr)


def text_fields(options: argparse.Namespace, cfg: ModelConfig) -> tuple[str, ...]:
    """Returns the options that name the fields to score: source and target, or text.

    Raises:
        UserError: a field is named that the model does not read.
    """
    text, *pair = FIELDS
    read, unread = (pair, [text]) if cfg.model_class.reads_source else ([text], pair)
    for name in unread:
        if getattr(options, name) != FIELDS[name]:
            flags = " and ".join(map(flag, read))
            raise UserError(f"{flag(name)} has no effect for model.family={cfg.family!r}; write {flags}")
    languages.check_languages(options, cfg)
    return tuple(read)


def score_fields(result: "Scored", tokenizer: Tokenizer, *, per_token: bool) -> dict[str, Any]:
    """Returns the log-probability of a text with its numbers of tokens, or with each token and its log-probability."""
    tokens = token_texts(tokenizer, result.tokens) if per_token else len(result.tokens)
    unknown = tokenizer.special.count_unknown(result.tokens)
    result_record = {"log_probability": result.total, "tokens": tokens, "unknown_tokens": unknown}
    return result_record | ({"log_probabilities": result.log_probabilities} if per_token else {})


def parser() -> argparse.ArgumentParser:
    result = lines.make_parser(
        "score",
        "Computes log-probabilities of texts with a language model, or of targets with a translation model. Lines of "
        "pairs are source<tab>target. The first token of a text is not scored, unless the tokenizer puts a special "
        "token before it; the end of a target is scored.",
    )
    for name in FIELDS.values():
        lines.add_field(result, name)
    languages.add_languages(result)
    chats.add_chat(result, "score the answers of the conversation of each .jsonl record, given what is before them")
    result.add_argument(
        "--per-token", action="store_true", help="write JSON: each scored token and its log-probability"
    )
    return result
