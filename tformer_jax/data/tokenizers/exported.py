"""Writes tokenizers in the formats that transformers reads."""

import json
from pathlib import Path
from typing import Any, TypeGuard

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.data import characters
from tformer_jax.data.tokenizers.base import SENTINEL_TOKENS, Tokenizer
from tformer_jax.data.tokenizers.chats import role_names
from tformer_jax.data.tokenizers.checkpoints import LANGUAGES, PIECES, T5S, TAGS_LAST
from tformer_jax.data.tokenizers.classes import BUILDERS, REBUILT
from tformer_jax.data.tokenizers.files import Tokenizers
from tformer_jax.data.tokenizers.huggingface import CHECKPOINT, HFTokenizer
from tformer_jax.data.tokenizers.language_tags import languages_of, tag_names, tagged_language
from tformer_jax.data.tokenizers.normalization import WHITESPACE
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer

CLASSES = {**dict.fromkeys(T5S, "T5Tokenizer"), "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"}
"""Tokenizers of transformers that read a SentencePiece model, by `model_type`; other types use Llama's."""

M2M_100 = "M2M100Tokenizer"

CODE = '''"""Reads tokenizer.json as it is."""

from transformers import PreTrainedTokenizerFast


class ExportedTokenizer(PreTrainedTokenizerFast):
    """A tokenizer with the parts of tokenizer.json."""
'''


def export_tokenizers(
    folder: Path, tokenizers: Tokenizers, model_type: str, *, pair: bool, rows: int | None = None
) -> str | None:
    """Writes tokenizers into an existing folder as transformers reads them, or returns why that is impossible.

    Args:
        pair: the model is a `Seq2Seq` model, whose sources and targets end in an EOS token.
        rows: size of the model's vocabulary; None: of the tokenizers.

    Returns:
        Why transformers has no class for these tokenizers; None if they were written.
    """
    source, target = tokenizers.source, tokenizers.target
    mask = {"mask_token": target.mask[1]} if target.mask else {}
    options: dict[str, Any] = role_names(target) | mask | {"clean_up_tokenization_spaces": False}
    if _is_plain_model(source) and _is_plain_model(target):
        options |= _save_pieces(folder, source, target, model_type)
        if options["tokenizer_class"] == M2M_100:
            options["num_madeup_words"] = max((rows or 0) - target.vocab_size, 0)
    elif source.to_json() != target.to_json():
        return "the source and the target have different tokenizers"
    elif (library := _make_library(target)) is not None:
        if target.kind != CHECKPOINT:
            ends = [(options["eos_token"], target.special.eos[0])] if pair else []
            template = " ".join(("$A", *(name for name, _ in ends)))
            library.post_processor = hf.processors.TemplateProcessing(single=template, special_tokens=ends)
        split = not isinstance(target, HFTokenizer) or target.split_special_tokens
        options |= {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": split}
        options |= language_options(target, model_type)
        if model_type in REBUILT and not _is_rebuilt_alike(library, REBUILT[model_type]):
            options |= _keep_as_written(folder)
        library.save(str(folder / "tokenizer.json"))
    else:
        return _reason_against(target)
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    return None


def _keep_as_written(folder: Path) -> dict[str, Any]:
    """Makes `AutoTokenizer` read tokenizer.json as it is, although the class of the model type builds its own parts.

    transformers 5 leaves the declared class to its default only if tokenizer_config.json names a class outside of the
    library, which it imports only if the caller trusts the folder's code.
    """
    (folder / "exported_tokenizer.py").write_text(CODE, encoding="utf-8")
    return {"auto_map": {"AutoTokenizer": [None, "exported_tokenizer.ExportedTokenizer"]}}


def _is_rebuilt_alike(library: hf.Tokenizer, kind: str) -> bool:
    """Returns whether a class of transformers has the parts of this tokenizer."""
    rebuilt = hf.Tokenizer.from_str(library.to_str())
    try:
        BUILDERS[kind](rebuilt, {})
    except UserError:
        return False
    return rebuilt.to_str() == library.to_str()


def _is_plain_model(tokenizer: Tokenizer) -> TypeGuard[SentencePieceTokenizer]:
    """Returns whether a tokenizer is a checkpoint's SentencePiece model, which nothing precedes or extends."""
    return isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.keeps_ids and tokenizer.is_plain


def _is_m2m_100(tokenizer: Tokenizer) -> bool:
    """Returns whether this is M2M-100's tokenizer, whose tags follow the vocabulary of its SentencePiece model."""
    return _is_plain_model(tokenizer) and tokenizer.vocab is not None and not tokenizer.codes


def _save_pieces(
    folder: Path, source: SentencePieceTokenizer, target: SentencePieceTokenizer, model_type: str
) -> dict[str, Any]:
    """Writes SentencePiece models, and returns the fields of tokenizer_config.json that they need."""
    if _is_m2m_100(source):
        return _save_m2m_100(folder, target)
    if source.vocab is not None:
        (folder / "source.spm").write_bytes(source.model)
        (folder / "target.spm").write_bytes(target.model)
        (folder / "vocab.json").write_text(json.dumps(source.vocab, ensure_ascii=False), encoding="utf-8")
        return {"tokenizer_class": "MarianTokenizer"} | _added_fields(target)
    (folder / ("spiece.model" if model_type in T5S else "tokenizer.model")).write_bytes(target.model)
    tokens = target.added.tokens
    return {
        "tokenizer_class": CLASSES.get(model_type, "LlamaTokenizer"),
        "add_bos_token": bool(target.special.before),
        "add_eos_token": bool(target.special.after),
        "added_tokens_decoder": {str(i): fields for i, fields in tokens.items()},
        "extra_ids": len({fields["content"] for fields in tokens.values()} & {*SENTINEL_TOKENS}),
        "legacy": target.spaced,
    }


def _save_m2m_100(folder: Path, tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """Writes the SentencePiece model of M2M-100, and returns fields of tokenizer_config.json."""
    (folder / PIECES[-1]).write_bytes(tokenizer.model)
    (folder / "vocab.json").write_text(json.dumps(tokenizer.vocab, ensure_ascii=False), encoding="utf-8")
    languages = " ".join(languages_of(tokenizer))
    return {
        "tokenizer_class": M2M_100,
        "language_codes": next(kind for kind, listed in LANGUAGES.items() if f"{languages} ".startswith(f"{listed} ")),
    } | _added_fields(tokenizer)


def _added_fields(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """Returns the fields of tokenizer_config.json about tokens beside a vocabulary of pieces.

    Only those that are named as special tokens, too, are left out of decoded texts.
    """
    tokens, roles = tokenizer.added.tokens, {*role_names(tokenizer).values()}
    special = [fields["content"] for fields in tokens.values() if fields["special"] and fields["content"] not in roles]
    return {"additional_special_tokens": special, "added_tokens_decoder": tokens}


def adds_tags(tokenizer: Tokenizer, model_type: str) -> bool:
    """Returns whether a class of transformers adds the tag of a language to each text, for an exported tokenizer."""
    return _is_m2m_100(tokenizer) or bool(language_options(tokenizer, model_type))


def language_options(tokenizer: Tokenizer, model_type: str) -> dict[str, Any]:
    """Returns the fields with which transformers adds the tag of a language to each text, if a class of it does so."""
    names = [name for name in tag_names(tokenizer) if name == tagged_language(name) and tokenizer.kind == CHECKPOINT]
    kind = {"m2m_100": "NllbTokenizer", "mbart": TAGS_LAST if tokenizer.special.tags_last else "MBart50Tokenizer"}
    if not names or model_type not in kind:
        return {}
    return {"tokenizer_class": kind[model_type], "additional_special_tokens": names}


def _make_library(tokenizer: Tokenizer) -> hf.Tokenizer | None:
    """Returns the tokenizer in the `tokenizers` library, with all that it does to texts; None if that is impossible."""
    library = tokenizer.to_library()
    if library is None or tokenizer.steps not in ((), (WHITESPACE,)):
        return None
    if tokenizer.steps:
        _clean_whitespace(library)
    _add_symbols(library, tokenizer)
    library.add_special_tokens(list(tokenizer.extension))
    ids = {name: library.token_to_id(name) for name in tokenizer.extension}
    alike = all(tokenizer.id_of(name) == i for name, i in ids.items())
    return library if alike and not _unwritten_symbol(tokenizer, library) else None


def _add_symbols(library: hf.Tokenizer, tokenizer: Tokenizer) -> None:
    library.add_tokens([hf.AddedToken(symbol, normalized=bool(tokenizer.steps)) for symbol in tokenizer.symbols])


def _unwritten_symbol(tokenizer: Tokenizer, library: hf.Tokenizer) -> str | None:
    """Returns a symbol that the library, to which symbols were added, does not read alike, or writes differently."""
    for symbol in tokenizer.symbols:
        ids = library.encode(text := f"a{symbol}a {symbol} a", add_special_tokens=False).ids
        if ids != tokenizer.encode(text) or library.decode([tokenizer.symbol_ids[symbol]]) != symbol:
            return symbol
    return None


def unspaced_symbol(tokenizer: Tokenizer) -> str | None:
    """Returns a symbol before which `AutoTokenizer` writes no space, although the tokenizer does; None: there is none.

    Decoders of SentencePiece's notation write the spaces of words alone.
    """
    if not (library := _make_library(tokenizer)):
        return None
    texts = {symbol: f"a {symbol}{symbol} a" for symbol in tokenizer.symbols}
    ids = {symbol: tokenizer.encode(text) for symbol, text in texts.items()}
    return next((symbol for symbol, row in ids.items() if library.decode(row) != tokenizer.decode(row)), None)


def _clean_whitespace(library: hf.Tokenizer) -> None:
    """Makes a tokenizer clean texts as `characters.clean_whitespace` does before everything else."""
    rules = characters.rules(lambda code: f"\\x{{{code:x}}}")
    steps = [*(hf.normalizers.Replace(hf.Regex(pattern), text) for pattern, text in rules), hf.normalizers.Strip()]
    following = [] if library.normalizer is None else [library.normalizer]
    library.normalizer = hf.normalizers.Sequence([*steps, *following])


def _reason_against(tokenizer: Tokenizer) -> str:
    """Returns why `_make_library` has no tokenizer."""
    if steps := tuple(step for step in tokenizer.steps if step != WHITESPACE):
        return f"tokenizer.json cannot hold data.normalize={steps!r}"
    if isinstance(tokenizer, SentencePieceTokenizer) and (added := (*tokenizer.symbols, *tokenizer.extension)):
        names = ", ".join(map(repr, added))
        return f"no class of transformers reads a SentencePiece model with the symbols or tags {names}"
    if library := tokenizer.to_library():
        _add_symbols(library, tokenizer)
        if symbol := _unwritten_symbol(tokenizer, library):
            return f"tokenizer.json cannot hold data.symbols with {symbol!r}"
    return f"tokenizer.json cannot hold a tokenizer of the kind {tokenizer.kind!r} with these ids"
