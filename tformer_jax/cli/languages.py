"""Flags for the languages of texts and for the beginnings of outputs, the same for all lines or by line."""

import argparse
from collections.abc import Sequence
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.inference.requests import Request

FIELDS = {
    "to_field": "target_language",
    "from_field": "source_language",
    "prefix_field": "prefix",
    "constraints_field": "constraints",
}
"""Fields of `Request` that lines may have after their texts, by the option that names them."""

LANGUAGES = {"to": "target_language", "source_language": "source_language"}
"""Fields of `Request` that are the same for all lines, by option."""


def add_languages(parser: argparse.ArgumentParser, *, by_line: bool = True) -> None:
    """Adds the flags for the languages of texts; `by_line` also adds the flags of fields."""
    group = parser.add_argument_group(
        "languages", "For models of several languages, by code or English name (de, pt_BR, German)."
    )
    group.add_argument("--to", metavar="LANGUAGE", help="language to translate into (default: the only one)")
    group.add_argument(
        "--from", dest="source_language", metavar="LANGUAGE", help="language of the texts, if the model is told it"
    )
    if by_line:
        _add_field(group, "--to-field", "the language to translate each line into", "--to")
        _add_field(group, "--from-field", "the language of each text", "--from")


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for prefixes and for phrases that the outputs of each line must contain."""
    _add_field(parser, "--prefix-field", "the text that outputs of each line start with", "decode.prefix")
    phrases = 'phrases that outputs of beam search must contain, in .jsonl a list such as ["x", ["this", "or this"]]'
    _add_field(parser, "--constraints-field", phrases, "none")


def given_fields(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the options that name fields of `FIELDS`."""
    return tuple(name for name in FIELDS if getattr(options, name, None) is not None)


def given_languages(options: argparse.Namespace) -> dict[str, str]:
    """Returns the languages of all lines, by their field of `Request`."""
    given = {field: getattr(options, option, None) for option, field in LANGUAGES.items()}
    return {field: language for field, language in given.items() if language is not None}


def check_languages(options: argparse.Namespace, cfg: ModelConfig) -> None:
    """Raises `UserError` if languages are given to a model that reads none."""
    if not cfg.model_class.reads_source and (given_languages(options) or given_fields(options)):
        raise UserError(f"languages have no effect for model.family={cfg.family!r}: leave them out")


def make_request(options: argparse.Namespace, text: str, fields: Sequence[str] = ()) -> str | Request:
    """Returns the request of a line, given the values of `given_fields`; without any value, the text itself."""
    by_line = zip(given_fields(options), fields, strict=True)
    given: dict[str, Any] = dict(given_languages(options))
    given |= {FIELDS[option]: value for option, value in by_line if value}
    return Request(text, **given) if given else text


def _add_field(group: "argparse._ActionsContainer", name: str, meaning: str, default: str) -> None:
    group.add_argument(
        name,
        metavar="NAME",
        help=f"field in .jsonl, or a further column after a tab, with {meaning}; empty, or null or missing in .jsonl: "
        f"{default}",
    )
