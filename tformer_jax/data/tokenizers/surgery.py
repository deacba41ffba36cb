"""Changes vocabularies: removes tokens, or adds some, and says which ids the tokens had before."""

import base64
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import FIRST, TAG, Tokenizer
from tformer_jax.data.tokenizers.files import from_json
from tformer_jax.data.tokenizers.huggingface import BYTE, HFTokenizer
from tformer_jax.data.tokenizers.language_tags import languages_of, matching_languages
from tformer_jax.data.tokenizers.notation import BYTES, byte_names
from tformer_jax.data.tokenizers.segmentation import JoinedPieces, LongestPieces, MergedPieces, Pieces, ScoredPieces
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer, parse_model
from tformer_jax.data.tokenizers.simple import PieceTokenizer

Ids = Mapping[int | str, int]
"""New ids by old ids, and by added pieces."""
NORMAL, BPE = 1, 2
"""Numbers of the type of pieces, and of the type of models, of SentencePiece."""


class Changed(NamedTuple):
    """A changed tokenizer."""

    tokenizer: Tokenizer
    rows: tuple[tuple[int, ...], ...]
    """For each id, its id before the change, or the ids of the tokens that it replaces."""


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """Returns the pieces of a tokenizer, without symbols and special tokens.

    Raises:
        UserError: its vocabulary cannot be changed.
    """
    if isinstance(tokenizer, PieceTokenizer):
        return Pieces(tokenizer.pieces)
    if isinstance(tokenizer, HFTokenizer):
        return _library_pieces(tokenizer.describe()["model"]["model"])
    if isinstance(tokenizer, SentencePieceTokenizer):
        model = parse_model(tokenizer.model)
        scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
        return JoinedPieces(scores) if model.trainer_spec.model_type == BPE else ScoredPieces(scores)
    raise UserError(f"the vocabulary of a tokenizer of the kind {tokenizer.kind!r} cannot be changed")


def _library_pieces(model: Mapping[str, Any]) -> Pieces:
    """Returns the pieces of the `model` of a tokenizer.json."""
    match model["type"]:
        case "Unigram":
            return ScoredPieces(dict(model["vocab"]))
        case "WordPiece":
            return LongestPieces(model["vocab"], model["continuing_subword_prefix"])
        case "WordLevel":
            return Pieces(model["vocab"])
    if model.get("continuing_subword_prefix"):
        raise UserError("a BPE with continuing_subword_prefix cannot be changed")
    ranks = {merge: rank for rank, merge in enumerate(map(_read_merge, model["merges"]))}
    return MergedPieces(model["vocab"], ranks.get, model.get("end_of_word_suffix") or "")


def needed_tokens(tokenizer: Tokenizer, used: Iterable[int]) -> set[int]:
    """Returns the ids to keep so that texts with the tokens `used` are tokenized as before.

    These are `used`, the pieces that `used` are merged from, their characters, special tokens, tags, added tokens and
    single bytes. Symbols and appended special tokens, which are always kept, are not among them.
    """
    size, special, pieces = tokenizer.own_size, tokenizer.own_special, pieces_of(tokenizer)
    ids = tokenizer.vocabulary()[1]
    names = {i: name for name, i in ids.items()}
    others = _other_tokens(tokenizer)
    fixed = {*dict(special.names), *special.used, *special.suppressed, *others} | tokenizer.fallback_bytes
    fixed |= {special.pad} if special.pad is not None else set()
    alphabet = byte_names() if tokenizer.vocabulary()[0] == BYTES else []
    used = {i for i in used if i < size}
    of_texts = (names[i] for i in used - tokenizer.fallback_bytes if i in names)
    needed = {piece for name in of_texts if name in pieces.present for piece in pieces.needed(name)}
    chosen = used | fixed | {ids[piece] for piece in (*needed, *pieces.always_needed, *alphabet) if piece in ids}
    return {i for i in chosen if i < size and (i in names or i in others)}


def trim(tokenizer: Tokenizer, ids: Collection[int]) -> Changed:
    """Removes the tokens that are not among `ids`, which `needed_tokens` returns; symbols and tags stay."""
    return _change(tokenizer, sorted(ids), None, [], (), ())


def extend(
    tokenizer: Tokenizer, texts: Iterable[str], symbols: Sequence[str] = (), languages: Sequence[str] = ()
) -> Changed:
    """Adds pieces, symbols and tags of languages that a vocabulary lacks.

    A new piece replaces the pieces that the tokenizer segmented it into; BPE also gets the pieces that it is merged
    from. In `rows`, a new piece or symbol has the ids of the tokens that it replaces, and a new tag has the ids of all
    existing tags of languages. If there are none, it has the ids of all tokens.

    Args:
        texts: pieces, as the vocabulary writes them.
        languages: codes.
    """
    old, pieces, ids = pieces_of(tokenizer), pieces_of(tokenizer), tokenizer.vocabulary()[1]
    new = [piece for text in texts for piece in (() if text in ids else pieces.add(text)) if piece not in ids]
    replaced = [tuple(_ids_of(tokenizer, ids, old.segment(piece))) for piece in new]
    symbols = [text for text in dict.fromkeys(symbols) if text not in tokenizer.symbols]
    tags = [TAG.format(code) for code in dict.fromkeys(languages) if not matching_languages(tokenizer, code)]
    changed = _change(tokenizer, range(tokenizer.own_size), pieces, new, symbols, tags)
    of_symbols, every = map(tuple, tokenizer.encode_normalized(symbols)), tuple(range(tokenizer.vocab_size))
    of_tags = [tuple(languages_of(tokenizer).values())] * len(tags)
    sources = iter([row or every for row in (*replaced, *of_symbols, *of_tags)])
    return changed._replace(rows=tuple(row or next(sources) for row in changed.rows))


def _ids_of(tokenizer: Tokenizer, ids: Mapping[str, int], pieces: Iterable[str]) -> Iterable[int]:
    """Yields the id of each piece; a missing piece gives the ids of its bytes, or the unknown token."""
    for piece in pieces:
        spelled = [*map(BYTE.format, piece.encode())] if tokenizer.fallback_bytes else []
        unknown = [] if tokenizer.special.unknown is None else [tokenizer.special.unknown]
        yield from [ids[piece]] if piece in ids else [ids[name] for name in spelled if name in ids] or unknown


def _change(
    tokenizer: Tokenizer,
    own_ids: Sequence[int],
    pieces: Pieces | None,
    new: list[str],
    symbols: Sequence[str],
    tags: Sequence[str],
) -> Changed:
    """Returns the tokenizer with the ids `own_ids` of its own tokens, then new pieces, symbols and tags.

    Rows of new tokens are empty.
    """
    own, end = tokenizer.own_size, _first_after_pieces(tokenizer)
    order: list[int | str] = [*(i for i in own_ids if i < end), *new, *(i for i in own_ids if i >= end)]
    ids: Ids = {old: number for number, old in enumerate(order)}
    first, size = own + len(tokenizer.symbols), tokenizer.vocab_size
    values = {"kind": tokenizer.kind, **tokenizer.describe()}

    def moved(i: int) -> int:
        new_before = (len(symbols) if i >= first else 0) + (len(tags) if i >= size else 0)
        return ids[i] if i < own else i - own + len(order) + new_before

    if "special" in values:
        values["special"] = dataclasses.asdict(tokenizer.own_special.renumbered(moved))
    edit = next(edit for kind, edit in EDITORS.items() if isinstance(tokenizer, kind))
    changed = from_json(values | edit(tokenizer, ids, pieces))
    _check_ids(tokenizer, changed, ids)
    assert changed.vocab_size == len(order)
    if everywhere := (*tokenizer.symbols, *symbols):
        changed = changed.with_symbols(everywhere, tokenizer.placeholders)
    if tokenizer.steps:
        changed = changed.normalized(tokenizer.steps, tokenizer.language)
    changed = changed.extended((*tokenizer.extension, *tags))
    if tokenizer.chat:
        changed = changed.with_chat(tokenizer.chat, tuple(map(moved, tokenizer.special.eos)))
    rows = [() if isinstance(old, str) else (old,) for old in order]
    rows += [(own + number,) for number in range(len(tokenizer.symbols))] + [()] * len(symbols)
    return Changed(changed, (*rows, *((i,) for i in range(first, size)), *([()] * len(tags))))


def _check_ids(before: Tokenizer, after: Tokenizer, ids: Ids) -> None:
    """Raises `UserError` unless each token has the id that it was given."""
    old, new = before.vocabulary()[1], after.vocabulary()[1]
    expected = {piece: ids[i] for piece, i in old.items() if i in ids}
    expected |= {piece: i for piece, i in ids.items() if isinstance(piece, str)}
    if after.vocab_size != len(ids) or any(new.get(piece) != i for piece, i in expected.items()):
        raise UserError(
            "its added tokens do not have the ids after its other tokens, so its vocabulary cannot be changed"
        )


def _first_after_pieces(tokenizer: Tokenizer) -> int:
    """Returns the first id after the pieces, which new ones get; added tokens may follow."""
    if isinstance(tokenizer, HFTokenizer):
        vocab = tokenizer.describe()["model"]["model"]["vocab"]
        return _shift(tokenizer) + (len(vocab) if isinstance(vocab, list) else max(vocab.values()) + 1)
    return max(tokenizer.vocabulary()[1].values(), default=FIRST - 1) + 1


def _other_tokens(tokenizer: Tokenizer) -> set[int]:
    """Returns the ids of all tokens that are not pieces of texts, named or not, including the unknown token."""
    ids = tokenizer.vocabulary()[1]
    if isinstance(tokenizer, SentencePieceTokenizer):
        others = (piece.piece for piece in parse_model(tokenizer.model).pieces if piece.type != NORMAL)
        own = () if tokenizer.keeps_ids else range(FIRST)
        return {*own, *tokenizer.added.tokens, *(ids[piece] for piece in others if piece in ids)}
    if isinstance(tokenizer, HFTokenizer):
        library, shift = tokenizer.backend_tokenizer, _shift(tokenizer)
        model = tokenizer.describe()["model"]["model"]
        unknown = {model.get("unk_id"), library.token_to_id(model.get("unk_token") or "")} - {None}
        return {shift + i for i in (*library.get_added_tokens_decoder(), *unknown)} | {*range(shift)}
    return {*range(FIRST)}


def _shift(tokenizer: HFTokenizer) -> int:
    """Returns the number of special tokens before the library's tokens."""
    return tokenizer.own_size - max(tokenizer.backend_tokenizer.get_vocab().values()) - 1


def _edit_pieces(tokenizer: PieceTokenizer, ids: Ids, pieces: Pieces | None) -> dict[str, Any]:
    names = {i: piece for piece, i in tokenizer.vocabulary()[1].items()}
    return {"pieces": [old if isinstance(old, str) else names[old] for old in ids if old not in range(FIRST)]}


def _edit_library(tokenizer: HFTokenizer, ids: Ids, pieces: Pieces | None) -> dict[str, Any]:
    library, shift = tokenizer.describe()["model"], _shift(tokenizer)
    new = {old if isinstance(old, str) else old - shift: i - shift for old, i in ids.items()}
    model = library["model"]
    added = [old for old in new if isinstance(old, str)]
    if isinstance(model["vocab"], list):
        scores = pieces.scores if isinstance(pieces, ScoredPieces) else {}
        old_pieces = [pair for i, pair in enumerate(model["vocab"]) if i in new]
        model["vocab"] = [*old_pieces, *([piece, scores[piece]] for piece in added)]
        model["unk_id"] = new.get(model["unk_id"])
    else:
        vocab = {piece: new[i] for piece, i in model["vocab"].items() if i in new}
        model["vocab"] = vocab | {piece: new[piece] for piece in added}
    if model["type"] == "BPE":
        merges = [*map(_read_merge, model["merges"]), *(pieces.merges if isinstance(pieces, MergedPieces) else ())]
        model["merges"] = [[a, b] for a, b in merges if {a, b, a + b} <= model["vocab"].keys()]
    library["added_tokens"] = [token | {"id": new[token["id"]]} for token in library["added_tokens"]]
    _renumber_template(library["post_processor"], new)
    return {"model": json.loads(hf.Tokenizer.from_str(json.dumps(library)).to_str())}


def _renumber_template(step: dict[str, Any] | None, new: Mapping[int | str, int]) -> None:
    """Changes the ids of the tokens that a post-processor puts around texts."""
    for part in (step or {}).get("processors", ()):
        _renumber_template(part, new)
    for name in ("sep", "cls"):
        if step and name in step:
            step[name] = [step[name][0], new[step[name][1]]]
    for token in (step or {}).get("special_tokens", {}).values():
        token["ids"] = [new[i] for i in token["ids"]]


def _edit_model(tokenizer: SentencePieceTokenizer, ids: Ids, pieces: Pieces | None) -> dict[str, Any]:
    model, old = parse_model(tokenizer.model), tokenizer.vocabulary()[1]
    removed = {piece for piece, i in old.items() if i not in ids}
    left = [piece for piece in model.pieces if piece.piece not in removed]
    lowest = min(piece.score for piece in model.pieces)
    del model.pieces[:]
    model.pieces.extend(left)
    for number, piece in enumerate((old for old in ids if isinstance(old, str)), start=1):
        score = pieces.scores[piece] if isinstance(pieces, ScoredPieces) else lowest - number
        model.pieces.add(piece=piece, score=score, type=NORMAL)
    values: dict[str, Any] = {"model": base64.b64encode(model.SerializeToString()).decode()}
    if tokenizer.vocab is not None:
        added = {piece: i for piece, i in ids.items() if isinstance(piece, str)}
        values["vocab"] = {piece: ids[i] for piece, i in tokenizer.vocab.items() if i in ids} | added
    if tokenizer.keeps_ids:
        values["added"] = {str(ids[i]): fields for i, fields in tokenizer.added.tokens.items()}
    return values


EDITORS: dict[type[Tokenizer], Callable[[Any, Ids, Pieces | None], dict[str, Any]]] = {
    PieceTokenizer: _edit_pieces,
    HFTokenizer: _edit_library,
    SentencePieceTokenizer: _edit_model,
}
"""Functions that return the changed fields of the description of a tokenizer."""


def _read_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
