"""Reads the tokenizers of checkpoints, with the ids and templates of transformers: of folders, or of given files."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.json_files import Settings, read_json
from tformer_jax.base.lfs_pointers import check_fetched
from tformer_jax.config.examples import SENTINELS
from tformer_jax.data.chat.template import TEMPLATE_FILE, default_template
from tformer_jax.data.tokenizers.chats import with_chat
from tformer_jax.data.tokenizers.classes import (
    CLASS_ROLES,
    SYNONYMS,
    complete_tokenizer,
    names_by_role,
    rebuilding_class,
    special_names,
)
from tformer_jax.data.tokenizers.files import Tokenizers
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.language_tags import tagged_language
from tformer_jax.data.tokenizers.sentencepiece import (
    Fields,
    SentencePieceTokenizer,
    load_model,
    own_tokens,
    parse_model,
    read_added,
    special_token,
)
from tformer_jax.special_tokens import SpecialTokens

Ends = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens before and after a text."""
PAIRS = ("bart", "mbart", "marian", "m2m_100", "t5", "mt5", "umt5", "t5gemma")
"""Model types of encoder-decoders."""
T5S = ("t5", "mt5", "umt5")
"""Model types whose SentencePiece tokenizers are T5's."""
GENERIC = ("", "PreTrainedTokenizer", "TokenizersBackend", "SentencePieceBackend")
"""Names of classes of any model."""
PIECE_CLASSES = {"m2m_100": "M2M100Tokenizer", "mbart": "MBartTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}
PIECE_CLASSES |= dict.fromkeys(T5S, "T5Tokenizer") | {"albert": "AlbertTokenizer"}
"""Classes of SentencePiece models by the model types that name none; the default is Llama's."""
VOCAB_CLASSES = dict.fromkeys(("bert", "distilbert"), "BertTokenizer")
"""Classes of `vocab.txt` by model types that name none."""
PLAIN = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", "AlbertTokenizer")
"""Classes that keep the ids of the SentencePiece model."""
END_WITH_EOS = ("T5Tokenizer", "AlbertTokenizer")
"""Classes whose texts end with EOS; texts of other classes begin with BOS."""
TAGS_LAST = "MBartTokenizer"
"""The class whose language tags are placed as `SpecialTokens.tags_last` says."""
BYTE_LEVEL = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer")
"""Tokenizers of transformers that are read from vocab.json and merges.txt."""
OF_OUTPUTS = ("forced_bos_token_id", "force_bos_token_to_be_generated", "bad_words_ids", "suppress_tokens")
"""Fields about tokens of outputs alone: read from `generation_config.json`, or if it is missing, from `config.json`."""
ENDS = {"gpt2": 50256, "phi3": 32000, "olmo2": 50279, "stablelm": 0}
ENDS |= dict.fromkeys(("llama", "mistral", "mixtral", "granite"), 2)
ENDS |= dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), 1)
"""`eos_token_id` of language models by type, as the classes of transformers 5 have it if config.json has none.

A smaller vocabulary has no such token; the class may have written it nevertheless.
"""
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
LANGUAGES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht "
        "hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps "
        "pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}
"""Languages of M2M-100 in the order of their tags, by `language_codes` of tokenizer_config.json."""
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
"""Names of fairseq's special tokens, the first ones."""
MASK = {"content": "<mask>", "lstrip": True, "special": True}
"""The mask token of mBART."""


def load_checkpoint_tokenizers(folder: Path) -> Tokenizers:
    """Reads `tokenizer.json`, BERT's `vocab.txt`, Marian's `source.spm` and `target.spm`, or a SentencePiece model.

    The ids of BOS, EOS, padding and the decoder's start are read from `generation_config.json` and `config.json`; the
    tokens around a text are as the tokenizer adds them.

    Raises:
        UserError: the folder has none of these files, or one of them is damaged.
    """
    settings = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():  # transformers then reads how to generate from it alone
        generation = read_json(folder / "generation_config.json")
        settings = {name: value for name, value in settings.items() if name not in OF_OUTPUTS}
        settings |= {name: value for name, value in generation.items() if value is not None}
    name = next((name for name in LOADERS if (folder / name).is_file()), None)
    if name is None:
        raise UserError(f"{folder} has no tokenizer: one of the files {', '.join(LOADERS)}")
    check_fetched(folder / name)
    try:
        options = read_json(folder / "tokenizer_config.json", {})
        return _with_template(folder, LOADERS[name](folder, settings, options), settings, options)
    except UserError:
        raise
    except Exception as error:  # the libraries raise their own types, including bare Exception
        problem = f"or a JSON file beside it, is not valid ({first_line(error, 200)})"
        raise UserError(f"the tokenizer {folder / name}, {problem}") from error


def _with_template(folder: Path, tokenizers: Tokenizers, settings: Settings, options: Settings) -> Tokenizers:
    """Returns the tokenizers of a language model with the template of its conversations, if the folder has one."""
    file = folder / TEMPLATE_FILE
    text = file.read_text("utf-8") if file.is_file() else default_template(options.get("chat_template"))
    if not text or settings.get("model_type") in PAIRS:
        return tokenizers
    tokens = {f"{role}_token": name for role, name in names_by_role(options).items()}
    tokenizer = with_chat(tokenizers.target, text, tokens)
    return Tokenizers(tokenizer, tokenizer)


def _read_tokenizer_json(folder: Path, settings: Settings, options: Settings) -> Tokenizers:
    library = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    kind = rebuilding_class(library, settings.get("model_type", ""), _with_class(options, settings))
    return wrap_library(*complete_tokenizer(library, folder, options, kind), settings, tags_last=kind == TAGS_LAST)


def _read_vocab_txt(folder: Path, settings: Settings, options: Settings) -> Tokenizers:
    """Builds BERT's tokenizer: WordPiece between [CLS] and [SEP]."""
    model_type = str(settings.get("model_type"))
    kind = _named_class(options, settings) or VOCAB_CLASSES.get(model_type, model_type)
    if kind != "BertTokenizer":
        raise UserError(f"{folder} has only vocab.txt, which is not read for {kind}: save its tokenizer.json")
    names = CLASS_ROLES["BertTokenizer"] | names_by_role(options)
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {line: number for number, line in enumerate(lines)}  # a line may be U+2028, at which splitlines breaks
    if missing := [names[role] for role in ("unk", "cls", "sep") if names[role] not in vocab]:
        raise UserError(f"{folder / 'vocab.txt'} has no {', '.join(missing)}")
    library = hf.Tokenizer(hf.models.WordPiece(vocab, unk_token=names["unk"]))
    return wrap_library(*complete_tokenizer(library, folder, options, "BertTokenizer"), settings)


def _read_vocab_and_merges(folder: Path, settings: Settings, options: Settings) -> Tokenizers:
    """Builds a byte-level BPE of GPT-2, BART or Qwen."""
    library = hf.Tokenizer(hf.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    kind = rebuilding_class(library, settings.get("model_type", ""), options)
    if kind not in BYTE_LEVEL:
        read = ", ".join(BYTE_LEVEL)
        raise UserError(f"{folder} has only vocab.json and merges.txt, which are read for {read}: save tokenizer.json")
    return wrap_library(*complete_tokenizer(library, folder, options, kind, own_ends=True), settings)


def _named_class(options: Settings, settings: Settings) -> str:
    """Returns the class that tokenizer_config.json or config.json names; "" if it is none of one model."""
    kind = str(options.get("tokenizer_class") or settings.get("tokenizer_class") or "").removesuffix("Fast")
    return "" if kind in GENERIC else SYNONYMS.get(kind, kind)


def _with_class(options: Settings, settings: Settings) -> Settings:
    """Returns the settings of tokenizer_config.json with the class that config.json may name instead, as mBART's do."""
    named = {"tokenizer_class": settings["tokenizer_class"]} if settings.get("tokenizer_class") else {}
    return (named if settings.get("model_type") in ("mbart", "m2m_100") else {}) | options


def wrap_library(
    library: hf.Tokenizer, options: Settings, settings: Settings, *, tags_last: bool = False
) -> Tokenizers:
    """Wraps a tokenizer as transformers 5 does, which ignores `add_bos_token` and `add_eos_token` here.

    Args:
        options: settings of tokenizer_config.json.
        settings: ids of special tokens, as in config.json.
        tags_last: as in `SpecialTokens`.
    """
    library.no_truncation()
    library.no_padding()
    pair, added = settings.get("model_type") in PAIRS, library.get_added_tokens_decoder()
    chosen = (i for i, token in added.items() if token.special or (pair and tagged_language(token.content)))
    names = {i: added[i].content for i in chosen}
    unknown = names_by_role(options).get("unk") or getattr(library.model, "unk_token", None)
    ends = _surrounding_tokens(library)
    special = _special_tokens(settings, names, ends, unknown and library.token_to_id(unknown))
    tokenizer = HFTokenizer(library, special, split_special_tokens=bool(options.get("split_special_tokens")))
    tokenizer.special = dataclasses.replace(special, context=_find_context(tokenizer), tags_last=tags_last)
    return Tokenizers(tokenizer, tokenizer)


def _find_context(tokenizer: HFTokenizer) -> int | None:
    """Returns a token after which other tokens are decoded as within a text; None: they are always decoded alike.

    Some decoders leave out the space before the first word, even when they decode a single token.
    """
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special.used]
    texts = dict(zip(ids, tokenizer.backend_tokenizer.decode_batch([[i] for i in ids]), strict=True))
    encoded = (i for text in ("a", *texts.values()) for i in tokenizer.encode(text)[-1:])
    context = next((i for i in encoded if i not in tokenizer.fallback_bytes and texts.get(i)), None)
    if context is None:
        return None
    pairs = tokenizer.backend_tokenizer.decode_batch([[context, i] for i in ids])
    alike = all(pair == texts[context] + texts[i] for i, pair in zip(ids, pairs, strict=True))
    return None if alike else context


def _surrounding_tokens(library: hf.Tokenizer) -> Ends:
    """Returns the tokens that a tokenizer adds before and after a text: "a", or else the text of a token."""
    for text in itertools.chain("a", (library.decode([i]) for i in sorted(library.get_vocab().values()))):
        encoding = library.encode(text)
        added = encoding.special_tokens_mask
        if not all(added):
            return tuple(encoding.ids[: added.index(0)]), tuple(encoding.ids[len(added) - added[::-1].index(0) :])
    raise UserError("the tokenizer has only special tokens")


def _read_marian(folder: Path, settings: Settings, options: Settings) -> Tokenizers:
    """Builds the two tokenizers of a Marian model, which share a vocabulary."""
    if options.get("separate_vocabs"):
        raise UserError(f"{folder}: separate_vocabs=True is not supported, only a shared vocabulary is")
    if not (folder / "target.spm").is_file():
        raise UserError(f"{folder} has source.spm, but no target.spm")
    vocab = read_json(folder / "vocab.json")
    if missing := {"<unk>", "</s>"} - vocab.keys():
        raise UserError(f"{folder / 'vocab.json'} has no {sorted(missing)[0]}")
    own: dict[str, int] = {name: vocab[name] for name in ("<unk>", "</s>", "<pad>") if name in vocab}
    added, special = _read_vocab_tokens(folder, settings, options, vocab, own)
    tags = {i: name for name, i in vocab.items() if tagged_language(name)}
    if len(tags) > 1:  # a model of one tag may be given it in texts, or not
        special = dataclasses.replace(special, names=tuple(sorted((dict(special.names) | tags).items())))
    models = [(folder / f"{side}.spm").read_bytes() for side in ("source", "target")]
    return Tokenizers(*(SentencePieceTokenizer(model, special, vocab, added) for model in models))


def _read_pieces(folder: Path, settings: Settings, options: Settings) -> Tokenizers:
    """Builds the tokenizer of a SentencePiece model, with the tokens that its JSON files add."""
    raw = next(folder / name for name in PIECES if (folder / name).is_file()).read_bytes()
    kind = _named_class(options, settings) or PIECE_CLASSES.get(settings.get("model_type", ""), "LlamaTokenizer")
    if kind not in READERS:
        raise UserError(f"{folder} has only a SentencePiece model, which is not read for {kind}: save tokenizer.json")
    return READERS[kind](folder, raw, settings, options | {"tokenizer_class": kind})


def _read_plain(folder: Path, raw: bytes, settings: Settings, options: Settings) -> Tokenizers:
    """Builds the tokenizer of a SentencePiece model whose ids the checkpoint uses."""
    model, kind = load_model(raw), options["tokenizer_class"]
    begins = kind not in END_WITH_EOS
    before = (model.bos_id(),) if options.get("add_bos_token", begins) else ()
    after = (model.eos_id(),) if options.get("add_eos_token", not begins) else ()
    own = own_tokens(model, options.get("extra_ids", SENTINELS) if kind == "T5Tokenizer" else 0)
    added = read_added(folder, options, own, {model.id_to_piece(i): i for i in range(model.get_piece_size())})
    names = {i: token["content"] for i, token in added.items() if token["special"]}
    special = _special_tokens(settings, names, (before, after), model.unk_id())
    special = dataclasses.replace(special, context=_find_piece(model))
    spaced = not begins or bool(options.get("legacy"))
    tokenizer = SentencePieceTokenizer(raw, special, added=added, spaced=spaced)
    return Tokenizers(tokenizer, tokenizer)


def _read_m2m_100(folder: Path, raw: bytes, settings: Settings, options: Settings) -> Tokenizers:
    """Builds the tokenizer of M2M-100, whose tags follow the vocabulary, or of NLLB, which has no `vocab.json`."""
    if not (folder / "vocab.json").is_file():
        return _read_fairseq(folder, raw, settings, options | {"tokenizer_class": "NllbTokenizer"})
    vocab = read_json(folder / "vocab.json")
    codes = LANGUAGES[options.get("language_codes", "m2m100")].split()
    own = {name: vocab[name] for name in FAIRSEQ} | {f"__{code}__": len(vocab) + i for i, code in enumerate(codes)}
    added, special = _read_vocab_tokens(folder, settings, options, vocab, own)
    tokenizer = SentencePieceTokenizer(raw, special, vocab, added, codes=False)
    return Tokenizers(tokenizer, tokenizer)


def _read_vocab_tokens(
    folder: Path, settings: Settings, options: Settings, vocab: Mapping[str, int], own: Mapping[str, int]
) -> tuple[dict[int, Fields], SpecialTokens]:
    """Returns the added tokens beside `vocab.json`, among them the special tokens `own`, and all special tokens.

    Raises:
        UserError: a token has the id of another one, as M2M100Tokenizer of transformers 5 gives tokens that it adds.
    """
    ids = {**vocab, **own}
    added = read_added(folder, options, {i: special_token(name) for name, i in own.items()}, ids)
    for name, i in ids.items():
        if i in added and added[i]["content"] != name:
            raise UserError(f"{folder}: its added token {added[i]['content']!r} has the id of {name!r}, {i}")
    names = {i: fields["content"] for i, fields in added.items() if fields["special"]}
    return added, _special_tokens(settings, names, ((), (vocab["</s>"],)), vocab["<unk>"])


def _read_fairseq(folder: Path, raw: bytes, settings: Settings, options: Settings) -> Tokenizers:
    """Builds the tokenizer of mBART, NLLB or XLM-R, with fairseq's ids; tags of languages follow the pieces."""
    model = parse_model(raw)
    options = read_json(folder / "special_tokens_map.json", {}) | options
    tagged = options["tokenizer_class"] != "XLMRobertaTokenizer"
    options |= {"mask_token": MASK} if tagged else {}
    tags = [name for name in special_names(options) if tagged_language(name)]
    if tagged and not tags:
        raise UserError(f"{folder} has no tokenizer.json, and no additional_special_tokens, the tags of languages")
    scored = [(piece.piece, piece.score) for piece in model.pieces[3:]]
    vocab = [*((name, 0.0) for name in FAIRSEQ), *scored, *((name, 0.0) for name in (*tags, MASK["content"]))]
    if model.trainer_spec.model_type == model.trainer_spec.BPE:
        ids = {name: i for i, (name, _) in enumerate(vocab)}
        tokenizer = hf.Tokenizer(hf.models.BPE(ids, _find_merges(dict(scored), ids), unk_token="<unk>", fuse_unk=True))
    else:
        tokenizer = hf.Tokenizer(hf.models.Unigram(vocab, FAIRSEQ.index("<unk>")))
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        tokenizer.normalizer = hf.normalizers.Precompiled(charsmap)
    kind = rebuilding_class(tokenizer, settings["model_type"], options)
    return wrap_library(*complete_tokenizer(tokenizer, folder, options, kind), settings, tags_last=kind == TAGS_LAST)


def _find_merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE of SentencePiece in their order: two pieces become a third with its score."""
    merges = [
        (score, len(left), len(right), left, right)
        for piece, score in scores.items()
        for left, right in ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if left in ids and right in ids
    ]
    return [merge[3:] for merge in sorted(merges, key=operator.itemgetter(0, 1, 2), reverse=True)]


def _find_piece(model: Any) -> int | None:
    """Returns a piece with a text after which others are decoded as within a text; `_find_context` says why."""
    ids = itertools.chain(model.encode("a")[-1:], range(model.get_piece_size()))
    special = (model.is_control, model.is_unknown, model.is_unused, model.is_byte)
    return next((i for i in ids if not any(kind(i) for kind in special) and model.decode([i])), None)


READERS: dict[str, Callable[[Path, bytes, Settings, Settings], Tokenizers]] = {
    **dict.fromkeys(PLAIN, _read_plain),
    **dict.fromkeys(("M2M100Tokenizer", "NllbTokenizer"), _read_m2m_100),
    **dict.fromkeys(("MBartTokenizer", "MBart50Tokenizer", "XLMRobertaTokenizer"), _read_fairseq),
}
"""Functions that read a SentencePiece model, by the class of its tokenizer."""


LOADERS: dict[str, Callable[[Path, Settings, Settings], Tokenizers]] = {
    "tokenizer.json": _read_tokenizer_json,
    "vocab.txt": _read_vocab_txt,
    "source.spm": _read_marian,
    "merges.txt": _read_vocab_and_merges,
    **dict.fromkeys(PIECES, _read_pieces),
}
"""Functions that read a tokenizer, by the file that is looked for; the first one that exists is read."""


def _special_tokens(settings: Settings, names: Mapping[int, str], ends: Ends, unknown: int | None) -> SpecialTokens:
    """Returns the special tokens, given the ids of `config.json` and `generation_config.json`."""
    (before, after), size = ends, settings.get("vocab_size")
    default = ENDS.get(settings.get("model_type", ""))
    absent = default if size is not None and default is not None and default >= size else None
    eos, bos = settings.get("eos_token_id", default), settings.get("bos_token_id")
    given = tuple(eos) if isinstance(eos, list) else after[-1:] if eos is None else (eos,)
    eos_ids = tuple(token for token in given if token != absent)
    endless = not eos_ids and size is not None and (bool(given) or "eos_token_id" in settings)  # the latter: null
    if endless:
        eos_ids = (size,)  # never predicted: outputs end at their maximum length
    if not eos_ids:
        raise UserError("config.json has no eos_token_id, with which outputs end")
    bos = None if bos == absent else bos
    start, first = (_single_id(settings, name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
    if first is None and settings.get("force_bos_token_to_be_generated"):
        first = bos
    pair = settings.get("model_type") in PAIRS
    forced = () if first is None or tagged_language(names.get(first, "")) else (first,)  # which requests name
    if start is None and bos is None and pair:
        raise UserError("config.json has no decoder_start_token_id, with which the inputs of the decoder start")
    start = start if start is not None else bos if bos is not None else eos_ids[0]
    for token in {start, *eos_ids, *forced} - {*names, *(eos_ids if endless else ())}:
        if token < 0 or (size is not None and token >= size):
            raise UserError(f"config.json: the special token {token} is not one of its {size} tokens")
    words = (words[0] for words in settings.get("bad_words_ids") or () if len(words) == 1 and words[0] not in eos_ids)
    return SpecialTokens(
        names=tuple(sorted(names.items())),
        start=start,
        eos=eos_ids,
        bos=bos,
        pad=None if (pad := settings.get("pad_token_id")) is not None and pad < 0 else pad,
        unknown=unknown,
        suppressed=tuple(dict.fromkeys([*words, *(settings.get("suppress_tokens") or ())])),
        forced=forced if pair else (),
        before=before,
        after=after,
        bare_sides=settings.get("model_type") == "t5gemma",
    )


def _single_id(settings: Settings, name: str) -> int | None:
    """Returns the id `name`, for which config.json may have a list of one id.

    Raises:
        UserError: it is neither.
    """
    value = settings.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is not None and not isinstance(value, int):
        raise UserError(f"config.json: {name}={value!r} is not a token id")
    return value
