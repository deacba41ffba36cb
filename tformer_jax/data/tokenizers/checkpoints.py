"""Reads the tokenizer of a checkpoint folder in Hugging Face's format, with the ids and templates of transformers."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.config.noise import SENTINELS
from tformer_jax.data.tokenizers.added import Fields, read_added, special_token
from tformer_jax.data.tokenizers.base import import_library
from tformer_jax.data.tokenizers.declared import add_declared, content, special_names
from tformer_jax.data.tokenizers.json_files import read_json
from tformer_jax.data.tokenizers.pair import Tokenizers
from tformer_jax.data.tokenizers.pretrained import CheckpointTokenizer, PiecesTokenizer
from tformer_jax.data.tokenizers.replaced_parts import (
    Settings,
    bert_normalizer,
    rebuilding_class,
    replace_ends,
    replace_parts,
    surround,
)
from tformer_jax.special_tokens import SpecialTokens

BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
BEGIN_WITH_BOS = ("llama", "mistral", "mixtral", "gemma2", "gemma3_text")
"""Model types whose SentencePiece tokenizers begin texts with BOS; the others end them with EOS."""
PAIRS = ("bart", "marian", "t5")
"""Model types of encoder-decoders."""
BYTE_LEVEL = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "Qwen2Tokenizer")
"""Tokenizers of transformers that are read from vocab.json and merges.txt."""
OF_OUTPUTS = ("forced_bos_token_id", "force_bos_token_to_be_generated", "bad_words_ids", "suppress_tokens")
"""Fields about tokens of outputs alone, of `generation_config.json`, or of `config.json` if there is no such file."""
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def load_checkpoint_tokenizers(folder: Path) -> Tokenizers:
    """Reads `tokenizer.json`, BERT's `vocab.txt`, Marian's `source.spm` and `target.spm`, or a SentencePiece model.

    Ids of the beginning, the end, padding and the decoder's start are those of `generation_config.json` and
    `config.json`; the tokens around a text are those that the tokenizer adds.

    Raises:
        UserError: the folder has none of these files, or one of them is damaged.
    """
    settings = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():  # transformers then reads how to generate from it alone
        generation = read_json(folder / "generation_config.json")
        settings = {name: value for name, value in settings.items() if name not in OF_OUTPUTS}
        settings |= {name: value for name, value in generation.items() if value is not None}
    for name, load in LOADERS.items():
        if (folder / name).is_file():
            return _checked(folder / name, load, settings)
    raise UserError(f"{folder} has no tokenizer: one of the files {', '.join(LOADERS)}")


def _checked(path: Path, load: Callable[[Path, Settings], Tokenizers], settings: Settings) -> Tokenizers:
    try:
        return load(path.parent, settings)
    except UserError:
        raise
    except Exception as error:  # the libraries raise their own types, including bare Exception
        reason = first_line(error, 200)
        raise UserError(f"{path} is not a valid tokenizer ({reason})") from error


def _tokenizer_json(folder: Path, settings: Settings) -> Tokenizers:
    tokenizer = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    options, kind = read_json(folder / "tokenizer_config.json", {}), settings.get("model_type", "")
    rebuilt = rebuilding_class(tokenizer, kind, options)
    replace_parts(tokenizer, rebuilt, options)
    tokenizer, options = add_declared(tokenizer, folder, options, rebuilt)
    replace_ends(tokenizer, rebuilt, options)
    return of_library(tokenizer, settings, options)


def _vocab_txt(folder: Path, settings: Settings) -> Tokenizers:
    """Builds BERT's tokenizer: WordPiece between [CLS] and [SEP]."""
    if settings.get("model_type") != "bert":
        raise UserError(f"{folder} has only vocab.txt, which is read for BERT: save its tokenizer.json")
    options = read_json(folder / "tokenizer_config.json", {})
    names = BERT_TOKENS | {role: name for role, name in _named(options).items() if role in BERT_TOKENS}
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {line: number for number, line in enumerate(lines)}  # a line may be U+2028, at which splitlines breaks
    if missing := [names[role] for role in ("unk", "cls", "sep") if names[role] not in vocab]:
        raise UserError(f"{folder / 'vocab.txt'} has no {', '.join(missing)}")
    tokenizer = hf.Tokenizer(hf.models.WordPiece(vocab, unk_token=names["unk"]))
    tokenizer.normalizer = bert_normalizer(options)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = hf.decoders.WordPiece(prefix="##")
    ends = names["cls"], names["sep"]
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="{} $A {}".format(*ends), special_tokens=[(name, vocab[name]) for name in ends]
    )
    tokenizer, options = add_declared(tokenizer, folder, options, "BertTokenizer")
    return of_library(tokenizer, settings, options)


def _vocab_and_merges(folder: Path, settings: Settings) -> Tokenizers:
    """Builds a byte-level BPE of GPT-2, BART or Qwen."""
    options = read_json(folder / "tokenizer_config.json", {})
    model = hf.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = hf.Tokenizer(model)
    kind = rebuilding_class(tokenizer, settings.get("model_type", ""), options)
    if kind not in BYTE_LEVEL:
        known = ", ".join(BYTE_LEVEL)
        raise UserError(f"{folder} has only vocab.json and merges.txt, which are read for {known}: save tokenizer.json")
    replace_parts(tokenizer, kind, options)
    tokenizer, options = add_declared(tokenizer, folder, options, kind)
    surround(tokenizer, *_own_ends(options))
    replace_ends(tokenizer, kind, options)
    return of_library(tokenizer, settings, options)


def _own_ends(options: Settings) -> tuple[list[str], list[str]]:
    """Returns the names of BOS and EOS if they surround texts, which without tokenizer.json is a setting."""
    roles = [options.get(f"{role}_token") if options.get(f"add_{role}_token") else None for role in ("bos", "eos")]
    before, after = ([] if token is None else [content(token)] for token in roles)
    return before, after


def of_library(tokenizer: hf.Tokenizer, settings: Settings, options: Settings) -> Tokenizers:
    """Wraps a tokenizer as transformers 5 does, which ignores `add_bos_token` and `add_eos_token` here.

    Args:
        settings: ids of special tokens, as in config.json.
        options: settings of tokenizer_config.json.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    roles = _named(options)
    added = tokenizer.get_added_tokens_decoder()
    names = {i: token.content for i, token in added.items() if token.special}
    unknown = roles.get("unk") or getattr(tokenizer.model, "unk_token", None)
    probe = _probe(tokenizer)
    before, after = _template(tokenizer, probe)
    special = _special(settings, names, before, after, unknown and tokenizer.token_to_id(unknown))
    found = CheckpointTokenizer(tokenizer, special, split_special_tokens=bool(options.get("split_special_tokens")))
    found.special = dataclasses.replace(special, context=_context(found))
    return Tokenizers(found, found)


def _context(tokenizer: CheckpointTokenizer) -> int | None:
    """Returns a token after which others are decoded as within a text; None: they are always decoded alike.

    Some decoders leave out the space before the first word, also if it is the text of a token alone.
    """
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special.used]
    texts = dict(zip(ids, tokenizer.decode_batch([[i] for i in ids]), strict=True))
    encoded = (i for text in ("a", *texts.values()) for i in tokenizer.encode(text)[-1:])
    context = next((i for i in encoded if i not in tokenizer.fallback_bytes and texts.get(i)), None)
    if context is None:
        return None
    pairs = tokenizer.decode_batch([[context, i] for i in ids])
    alike = all(pair == texts[context] + texts[i] for i, pair in zip(ids, pairs, strict=True))
    return None if alike else context


def _probe(tokenizer: hf.Tokenizer) -> str:
    """Returns a text that the tokenizer has a token for: "a", or else a token's text."""
    texts = itertools.chain("a", (tokenizer.decode([i]) for i in sorted(tokenizer.get_vocab().values())))
    for text in texts:
        if not all(tokenizer.encode(text).special_tokens_mask):
            return text
    raise UserError("the tokenizer has only special tokens")


def _template(tokenizer: hf.Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that the tokenizer adds before and after a text."""
    encoding = tokenizer.encode(text)
    flags = encoding.special_tokens_mask
    count = sum(1 for _ in itertools.takewhile(bool, flags)), sum(1 for _ in itertools.takewhile(bool, flags[::-1]))
    return tuple(encoding.ids[: count[0]]), tuple(encoding.ids[len(flags) - count[1] :])


def _marian(folder: Path, settings: Settings) -> Tokenizers:
    """Builds the two tokenizers of a Marian model, which share a vocabulary."""
    if read_json(folder / "tokenizer_config.json", {}).get("separate_vocabs"):
        raise UserError(f"{folder}: separate_vocabs=True is not supported, only a shared vocabulary is")
    vocab = read_json(folder / "vocab.json")
    names = {vocab[name]: name for name in ("<unk>", "</s>", "<pad>") if name in vocab}
    special = _special(settings, names, (), (vocab["</s>"],), vocab["<unk>"])
    models = [(folder / f"{side}.spm").read_bytes() for side in ("source", "target")]
    added = {i: special_token(name) for i, name in names.items()}
    return Tokenizers(*(PiecesTokenizer(model, vocab, special, added) for model in models))


def _pieces(folder: Path, settings: Settings) -> Tokenizers:
    """Builds the tokenizer of a SentencePiece model, with the tokens that its JSON files add."""
    raw = next(folder / name for name in PIECES if (folder / name).is_file()).read_bytes()
    model = import_library("sentencepiece").SentencePieceProcessor(model_proto=raw)
    kind, options = settings.get("model_type"), read_json(folder / "tokenizer_config.json", {})
    begins = kind in BEGIN_WITH_BOS
    before = (model.bos_id(),) if options.get("add_bos_token", begins) else ()
    after = (model.eos_id(),) if options.get("add_eos_token", not begins) else ()
    added = _added(folder, options, model, options.get("extra_ids", SENTINELS) if kind == "t5" else 0)
    names = {i: token["content"] for i, token in added.items() if token["special"]}
    special = _special(settings, names, before, after, model.unk_id())
    special = dataclasses.replace(special, context=_piece_context(model))
    found = PiecesTokenizer(raw, None, special, added, spaced=not begins or bool(options.get("legacy")))
    return Tokenizers(found, found)


def _piece_context(model: Any) -> int | None:
    """Returns a piece with a text after which others are decoded as within a text; `_context` says why."""
    ids = itertools.chain(model.encode("a")[-1:], range(model.get_piece_size()))
    special = (model.is_control, model.is_unknown, model.is_unused, model.is_byte)
    return next((i for i in ids if not any(kind(i) for kind in special) and model.decode([i])), None)


def _added(folder: Path, options: Settings, model: Any, sentinels: int) -> dict[int, Fields]:
    """Returns the added tokens by id; the files besides tokenizer_config.json are those of transformers before 4.34."""
    if "added_tokens_decoder" in options:
        declared = {int(i): fields for i, fields in options["added_tokens_decoder"].items()}
        return read_added(model, special_names(options), declared, sentinels)
    names = special_names(options | read_json(folder / "special_tokens_map.json", {}))
    listed = read_json(folder / "added_tokens.json", {})
    declared = {i: special_token(name, special=name in names) for name, i in listed.items()}
    return read_added(model, names, declared, sentinels)


LOADERS: dict[str, Callable[[Path, Settings], Tokenizers]] = {
    "tokenizer.json": _tokenizer_json,
    "vocab.txt": _vocab_txt,
    "source.spm": _marian,
    "merges.txt": _vocab_and_merges,
    **dict.fromkeys(PIECES, _pieces),
}
"""Functions that read a tokenizer, by the file that is looked for; the first one that exists is read."""


def _special(
    settings: Settings,
    names: Mapping[int, str],
    before: tuple[int, ...],
    after: tuple[int, ...],
    unknown: int | None,
) -> SpecialTokens:
    """Returns the special tokens, given the ids of `config.json` and `generation_config.json`."""
    eos, bos = settings.get("eos_token_id"), settings.get("bos_token_id")
    size = settings.get("vocab_size")
    eos_ids = tuple(eos) if isinstance(eos, list) else after[-1:] if eos is None else (eos,)
    endless = not eos_ids and "eos_token_id" in settings and size is not None  # null
    if endless:
        eos_ids = (size,)  # never predicted: outputs end at their maximum length
    if not eos_ids:
        raise UserError("config.json has no eos_token_id, with which outputs end")
    start, forced = (_one(settings, name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
    if forced is None and settings.get("force_bos_token_to_be_generated"):
        forced = bos
    if start is None and bos is None and settings.get("model_type") in PAIRS:
        raise UserError("config.json has no decoder_start_token_id, with which the inputs of the decoder start")
    start = start if start is not None else bos if bos is not None else eos_ids[0]
    used = {start, *eos_ids, *(() if forced is None else (forced,))} - {*names, *(eos_ids if endless else ())}
    if used and size is not None and max(used) >= size:
        raise UserError(f"config.json: the special token {max(used)} is not one of its {size} tokens")
    words = (words[0] for words in settings.get("bad_words_ids") or () if len(words) == 1)
    suppressed = tuple(dict.fromkeys([*words, *(settings.get("suppress_tokens") or ())]))
    return SpecialTokens(
        names=tuple(sorted(names.items())),
        start=start,
        eos=eos_ids,
        bos=bos,
        pad=settings.get("pad_token_id"),
        unknown=unknown,
        suppressed=suppressed,
        forced=() if forced is None else (forced,),
        before=before,
        after=after,
    )


def _one(settings: Settings, name: str) -> int | None:
    """Returns the id `name`, for which config.json may have a list of one id.

    Raises:
        UserError: it is neither.
    """
    found = settings.get(name)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if found is not None and not isinstance(found, int):
        raise UserError(f"config.json: {name}={found!r} is not a token id")
    return found


def _named(options: Settings) -> dict[str, str]:
    """Returns the names of special tokens in `tokenizer_config.json` by their roles, such as "bos"."""
    roles = ("bos", "eos", "unk", "pad", "cls", "sep", "mask")
    return {role: content(options[f"{role}_token"]) for role in roles if options.get(f"{role}_token")}
