"""Phrases that outputs must contain, given with a text or by a glossary: where they occur, and their tokens."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.data.characters import LETTER, clean_whitespace, whole_words
from tformer_jax.data.markup import take_out
from tformer_jax.data.placeholders import mask_target
from tformer_jax.data.tokenizers import NO_PLACEHOLDERS, Placeholders, Tokenizer
from tformer_jax.data.tokenizers.normalization import detokenizer
from tformer_jax.data.transforms.terminology import cuts_span, read_glossary
from tformer_jax.inference.batching import power_of_two
from tformer_jax.inference.casing import FIXED
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.encoding import dropped_characters
from tformer_jax.inference.forced import CONTEXTS, encode_continuation
from tformer_jax.inference.requests import Constraint, PhraseTokens, TokenConstraints

MAX_PHRASES = 64
"""Maximum number of constraints of a text, and of alternatives of each constraint."""
SMALLEST = (4, 4, 8)
"""Smallest sizes of arrays for constraints, alternatives and tokens: fewer would be compiled separately."""
CACHED = 4096
FORMAT = "constraints must be a text, or a list of texts or of lists of alternative texts, none empty"


def read_constraints(value: Any) -> tuple[Constraint, ...]:
    """Returns constraints in the form that JSON and Python callers write, such as `["x", ["a", "b"]]`.

    Raises:
        UserError: the value has another form.
    """
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, list | tuple):
        raise UserError(FORMAT)
    alternatives = [(each,) if isinstance(each, str) else each for each in several]
    for each in alternatives:
        if not (isinstance(each, list | tuple) and each and all(isinstance(p, str) and p.strip() for p in each)):
            raise UserError(FORMAT)
    return tuple(tuple(phrase.strip() for phrase in each) for each in alternatives)


def are_met(constraints: Iterable[Constraint], text: str, decode: DecodeConfig) -> bool:
    """Returns whether an output contains a phrase of each constraint, as whole words.

    Markup that is put back may stand within a phrase, and case that is changed may differ.
    """
    written = [text, take_out(text).plain] if decode.markup == "align" else [text]
    if decode.casing != "keep":
        written = [text.casefold() for text in written]
        constraints = [tuple(phrase.casefold() for phrase in phrases) for phrases in constraints]
    return all(any(whole_words(phrases).search(text) for text in written) for phrases in constraints)


@functools.lru_cache(4)
def _read_glossary(path: Path, version: tuple[int, int] | None) -> dict[str, tuple[str, ...]]:
    """As `read_glossary`; a file that changes is read again, since it is another `version`."""
    return read_glossary(path)


def glossary_constraints(path: str, source: str) -> tuple[Constraint, ...]:
    """Returns the translations of each term in a source; where terms overlap, of the longest one, from the left.

    Within tags, placeholders and addresses there are no terms. White space is compared as `clean_whitespace` leaves it.

    Raises:
        UserError: the glossary cannot be read, or a line is malformed.
    """
    state = Path(path).stat() if Path(path).is_file() else None
    terms = _read_glossary(Path(path), state and (state.st_mtime_ns, state.st_size))
    source = clean_whitespace(source)
    fixed = [match.span() for match in FIXED.finditer(source)]
    matches = (match for match in whole_words(tuple(terms)).finditer(source) if not cuts_span(*match.span(), fixed))
    return tuple(dict.fromkeys(terms[match[0]] for match in matches))


def constraints_of(decode: DecodeConfig, text: str, given: Any) -> tuple[Constraint, ...]:
    """Returns the constraints `given` with a text, as for `read_constraints`, and the constraints of the glossary.

    With `decode.markup="align"`, terms are searched in the text without its markup.
    """
    read = take_out(text).plain if decode.glossary and decode.markup == "align" else text
    of_glossary = glossary_constraints(decode.glossary, read) if decode.glossary else ()
    return (*read_constraints(given), *of_glossary)


def encode_constraints(
    decode: DecodeConfig,
    tokenizer: Tokenizer,
    constraints: Sequence[Constraint],
    limit: int,
    names: Placeholders = NO_PLACEHOLDERS,
    originals: tuple[str, ...] | None = None,
) -> TokenConstraints:
    """Returns the tokens of constraints.

    Args:
        limit: maximum number of tokens of an output.
        names, originals: as for `mask_target`, which replaces the placeholders of the source.

    Raises:
        UserError: the strategy has no beams, there are too many constraints, or the vocabulary cannot represent a
            phrase as it is written, within the limit.
    """
    if constraints and decode.strategy != "beam":
        raise UserError(f"constraints need decode.strategy='beam', not {decode.strategy!r}: choose a number of beams")
    if len(constraints) > MAX_PHRASES or any(len(phrases) > MAX_PHRASES for phrases in constraints):
        raise UserError(
            f"a text has at most {MAX_PHRASES} constraints, each with at most {MAX_PHRASES} alternatives: give fewer"
        )
    encoded = []
    for phrases in constraints:
        masked = [mask_target(names, phrase, originals) for phrase in phrases]
        encoded.append(tuple(ids for phrase in masked for ids in _encode_phrase(tokenizer, phrase, decode.detokenize)))
        if (needed := min(len(each.ids) for each in encoded[-1])) > limit:
            written = " or ".join(map(repr, phrases))
            raise UserError(f"constraint {written} has {needed} tokens, but an output has at most {limit}: shorten it")
    return tuple(encoded)


def with_phrases(constraints: Constraints, phrases: TokenConstraints, tokenizer: Tokenizer) -> Constraints:
    """Returns the static constraints of a lane for such phrases; few sizes are compiled."""
    longest = max(len(tokens.ids) for each in phrases for tokens in each)
    sizes: Any = map(power_of_two, map(max, SMALLEST, (len(phrases), max(map(len, phrases)), longest)))
    return dataclasses.replace(constraints, phrase_sizes=tuple(sizes), word_edges=word_edges(tokenizer))


@functools.lru_cache(CACHED)
def _encode_phrase(tokenizer: Tokenizer, phrase: str, detokenize: bool) -> tuple[PhraseTokens, ...]:
    """Returns the tokens of a phrase after a space, and without one."""
    texts = phrase, f" {phrase}"
    variants: list[Any] = [tokenizer.encode(text) for text in texts]
    variants += [encode_continuation(tokenizer, text, context) for text in texts for context in CONTEXTS]
    finish = detokenizer(tokenizer.steps, tokenizer.language) if detokenize else str
    encoded = [ids for ids in dict.fromkeys(map(tuple, variants)) if ids and tokenizer.special.unknown not in ids]
    if not encoded or dropped_characters(tokenizer, phrase):
        raise UserError(f"constraint {phrase!r} cannot be encoded with this vocabulary; leave it out")
    written = {ids: _text_after_letter(tokenizer, ids) for ids in encoded}
    exact = {ids: text for ids, text in written.items() if finish(text.removeprefix(" ")) == phrase}
    if not exact:
        shown = finish(written[encoded[0]].removeprefix(" "))
        raise UserError(f"outputs have constraint {phrase!r} only as {shown!r}: write that")
    return tuple(PhraseTokens(ids, *(bool(re.match(LETTER, text[e])) for e in (0, -1))) for ids, text in exact.items())


def _text_after_letter(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns what tokens add to a text that ends with a letter."""
    context = [] if tokenizer.special.context is None else [tokenizer.special.context]
    return tokenizer.decode([*context, *ids])[len(tokenizer.decode(context)) :]


@functools.lru_cache(4)
def word_edges(tokenizer: Tokenizer) -> bytes:
    """Returns which tokens begin with a letter, and which end with one: two rows of one bit per token."""
    texts = [_text_after_letter(tokenizer, [token]) for token in range(tokenizer.vocab_size)]
    edges = [[bool(text and re.match(LETTER, text[end])) for text in texts] for end in (0, -1)]
    return np.packbits(np.array(edges), axis=1).tobytes()
