"""The kinds that a config can name, and where they are implemented, one line each.

An entry is `module:attribute`, imported when a config names it, or the object itself. A module outside this package
adds a kind by assignment, and `imports` of the config names the module. The class or function of a kind may declare

- `settings`: the names of the settings with `used_by="SWITCH"` that it uses, where SWITCH is the setting that names it;
- `limits`: a tuple of `Limit`;
- `check(section)`: a function that raises `section.error(...)` if other settings of its section do not fit.
"""

import functools
import importlib
import os
import pkgutil
import sys
from collections import ChainMap, UserDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from tformer_jax.base.errors import UserError, one_line

Declared = TypeVar("Declared", bound=Callable[..., Any])


class Kinds(UserDict[str, Any]):
    """Kinds by name."""

    def __setitem__(self, name: str, kind: Any) -> None:
        """Registers a kind; the same class or function may be defined again, as in a notebook's cell.

        Raises:
            UserError: the name stands for another kind, or the kind declares something else than tuples.
        """
        for attribute, member, written in (
            ("settings", str, "names of settings"),
            ("limits", Limit, "kinds.Limit"),
            ("examples", tuple, "tuples of keys"),
        ):
            declared = getattr(kind, attribute, None) or ()
            if not isinstance(declared, tuple) or not all(isinstance(each, member) for each in declared):
                raise UserError(f"kind {name!r} has {attribute} = {declared!r}: write a tuple of {written}")
        if name in self and _definition(self[name]) != _definition(kind):
            before = ":".join(_definition(self[name]))
            raise UserError(f"kind {name!r} is registered already, as {before}: register yours under another name")
        super().__setitem__(name, kind)


def _definition(kind: Any) -> tuple[str, str]:
    """Returns where a kind is defined: the file, or the module if it has none, and the name in it."""
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
    else:
        while isinstance(kind, functools.partial):
            kind = kind.func
        named = kind if hasattr(kind, "__qualname__") else type(kind)
        module, name = named.__module__, named.__qualname__
    return getattr(sys.modules.get(module), "__file__", None) or module, name


class Limit(NamedTuple):
    """Values of a setting that a kind supports; a config with others is rejected."""

    setting: str
    """Full name, such as `model.window`."""
    allowed: tuple[Any, ...]
    reason: str
    lifted: bool = False
    """Whether other values are allowed if only some layers are of this kind."""


def declares(**facts: Any) -> Callable[[Declared], Declared]:
    """Decorates a kind that is a function with what it declares, such as `settings` and `limits`."""

    def attach_facts(kind: Declared) -> Declared:
        vars(kind).update(facts)
        return kind

    return attach_facts


FAMILIES = Kinds(
    seq2seq="tformer_jax.models.seq2seq:Seq2Seq",
    decoder_lm="tformer_jax.models.decoder_lm:DecoderLM",
    classifier="tformer_jax.models.classifier:Classifier",
    masked_lm="tformer_jax.models.masked_lm:MaskedLM",
)
"""Models, which state what they read and predict; see `models.family.Family`."""
TASKS = Kinds(
    translation="tformer_jax.tasks.translation:TRANSLATION",
    language_model="tformer_jax.tasks.language_model:LANGUAGE_MODEL",
    classification="tformer_jax.tasks.classification:CLASSIFICATION",
    masked_lm="tformer_jax.tasks.masked_lm:MASKED_LM",
    pretraining="tformer_jax.tasks.pretraining:PRETRAINING",
    chat="tformer_jax.tasks.chat:CHAT",
)
"""Tasks; see `tasks.task.Task`."""
ATTENTIONS = Kinds(
    multi_head="tformer_jax.nn.attention:Attention",
    basic="tformer_jax.nn.attention:BasicAttention",
    mla="tformer_jax.nn.latent_attention:LatentAttention",
    gated_delta="tformer_jax.nn.gated_delta:GatedDelta",
)
LAYERS = ChainMap(dict.fromkeys(("full", "window", "nope"), ""), ATTENTIONS)
"""Kinds of layers: with the attention of `model.attention`, and the kinds of attention that are recurrences."""
BACKENDS = Kinds(
    auto="tformer_jax.nn.attention_ops.select:AUTO",
    reference="tformer_jax.nn.attention_ops.reference:REFERENCE",
    xla="tformer_jax.nn.attention_ops.dot_product:XLA",
    cudnn="tformer_jax.nn.attention_ops.dot_product:CUDNN",
    blockwise="tformer_jax.nn.attention_ops.blockwise:BLOCKWISE",
    tokamax="tformer_jax.nn.attention_ops.tokamax:TOKAMAX",
    splash="tformer_jax.nn.attention_ops.splash:SPLASH",
    ring="tformer_jax.nn.attention_ops.ring:RING",
)
POSITIONS = Kinds(
    none="tformer_jax.nn.positions:NoPositions",
    sinusoidal="tformer_jax.nn.positions:Sinusoidal",
    sinusoidal_halves="tformer_jax.nn.positions:SinusoidalHalves",
    sinusoidal_fairseq="tformer_jax.nn.positions:SinusoidalFairseq",
    learned="tformer_jax.nn.positions:Learned",
    rotary="tformer_jax.nn.attention_positions:Rotary",
    alibi="tformer_jax.nn.attention_positions:Alibi",
    relative="tformer_jax.nn.attention_positions:RelativeBuckets",
)
NORMS = Kinds(
    layernorm="tformer_jax.nn.norms:LayerNorm",
    rmsnorm="tformer_jax.nn.norms:RMSNorm",
)
FFNS = Kinds(
    mlp="tformer_jax.nn.ffn:FFN",
    gated="tformer_jax.nn.ffn:GatedFFN",
    moe="tformer_jax.nn.moe:MixtureOfExperts",
)
ACTIVATIONS = Kinds(
    relu="tformer_jax.nn.activations:relu",
    relu_squared="tformer_jax.nn.activations:relu_squared",
    gelu="tformer_jax.nn.activations:gelu",
    gelu_tanh="tformer_jax.nn.activations:gelu_tanh",
    gelu_sigmoid="tformer_jax.nn.activations:gelu_sigmoid",
    silu="tformer_jax.nn.activations:silu",
    sigmoid="tformer_jax.nn.activations:sigmoid",
)
OPTIMIZERS = Kinds(
    adamw="tformer_jax.train.optimizer_kinds:adamw",
    adafactor="tformer_jax.train.optimizer_kinds:adafactor",
    lion="tformer_jax.train.optimizer_kinds:lion",
    lamb="tformer_jax.train.optimizer_kinds:lamb",
    sgd="tformer_jax.train.optimizer_kinds:sgd",
    muon="tformer_jax.train.muon:muon",
    schedule_free_adamw="tformer_jax.train.optimizer_kinds:schedule_free_adamw",
    python="tformer_jax.train.optimizer_kinds:python",
)
TOKENIZERS = Kinds(
    bytes="tformer_jax.data.tokenizers.simple:ByteTokenizer",
    characters="tformer_jax.data.tokenizers.simple:CharacterTokenizer",
    words="tformer_jax.data.tokenizers.simple:WordTokenizer",
    ids="tformer_jax.data.tokenizers.simple:IdTokenizer",
    bpe="tformer_jax.data.tokenizers.huggingface:BPE",
    unigram="tformer_jax.data.tokenizers.huggingface:Unigram",
    wordpiece="tformer_jax.data.tokenizers.huggingface:WordPiece",
    file="tformer_jax.data.tokenizers.huggingface:HFTokenizer",
)
"""Kinds of tokenizers; a `file` that is no `tokenizer.json` has one of `files.FORMATS`."""
CORPORA = Kinds(
    cldr_translation="tformer_jax.data.corpora.cldr:CldrTranslation",
    cldr_language="tformer_jax.data.corpora.cldr:CldrLanguage",
    stdlib_text="tformer_jax.data.corpora.stdlib:StdlibText",
    parallel_lines="tformer_jax.data.corpora.files:ParallelLines",
    text="tformer_jax.data.corpora.files:Text",
    lines="tformer_jax.data.corpora.files:Lines",
    tsv="tformer_jax.data.corpora.records:Tsv",
    jsonl="tformer_jax.data.corpora.records:Jsonl",
    parquet="tformer_jax.data.corpora.parquet:Parquet",
    gettext="tformer_jax.data.corpora.gettext:Gettext",
    tfds="tformer_jax.data.corpora.tfds_source:Tfds",
    prepared="tformer_jax.data.corpora.prepared:Prepared",
    python="tformer_jax.data.corpora.python:PythonData",
)
"""Sources of corpora; see `data.corpora.corpus.Source`."""
TRANSFORMS = Kinds(
    case="tformer_jax.data.transforms.case:Case",
    spacing="tformer_jax.data.transforms.noise:Spacing",
    punctuation="tformer_jax.data.transforms.noise:Punctuation",
    typos="tformer_jax.data.transforms.noise:Typos",
    word_dropout="tformer_jax.data.transforms.noise:WordDropout",
    word_swap="tformer_jax.data.transforms.noise:WordSwap",
    terminology="tformer_jax.data.transforms.terminology:Terminology",
    fuzzy_matches="tformer_jax.data.transforms.fuzzy_matches:FuzzyMatches",
    concatenation="tformer_jax.data.transforms.concatenation:Concatenation",
    entry_tags="tformer_jax.data.transforms.tags:EntryTags",
    bpe_dropout="tformer_jax.data.transforms.bpe_dropout:BpeDropout",
)
"""Random changes of training examples; see `config.transforms.Transform`."""
BATCHINGS = Kinds(
    buckets="tformer_jax.data.bucketing:Buckets",
    packed="tformer_jax.data.packing:Packed",
    windows="tformer_jax.data.windows:WindowBatches",
    corrupted_windows="tformer_jax.data.objectives.windows:CorruptedBatches",
)
"""Values of `data.batching`, and the batches of objectives: `train_batches` and `evaluation_batches`."""
OBJECTIVES = Kinds(
    masked_tokens="tformer_jax.data.objectives.masked_tokens:MaskedTokens",
    span_corruption="tformer_jax.data.objectives.span_corruption:SpanCorruption",
    denoising="tformer_jax.data.objectives.denoising:Denoising",
)
"""Pre-training objectives; see `data.objectives.Objective`."""
METRICS = Kinds(
    **{
        "bleu": "tformer_jax.tasks.metrics.bleu:Bleu",
        "chrf": "tformer_jax.tasks.metrics.sacre:Chrf",
        "chrf++": "tformer_jax.tasks.metrics.sacre:ChrfPlusPlus",
        "ter": "tformer_jax.tasks.metrics.sacre:Ter",
        "spbleu": "tformer_jax.tasks.metrics.bleu:SpBleu",
        "exact_match": "tformer_jax.tasks.metrics.exact_match:ExactMatch",
        "off_target": "tformer_jax.tasks.metrics.off_target:OffTarget",
        "command": "tformer_jax.tasks.metrics.command:Command",
        "command_error": "tformer_jax.tasks.metrics.command:CommandError",
    }
)
"""Metrics of texts; see `config.metrics.Metric`."""
POOLINGS = ("mean", "first", "last")
"""Poolings over the tokens of a text."""
EMBEDDING_POOLINGS = (*POOLINGS, "max", "mean_sqrt", "weighted_mean")
"""Poolings of embeddings: also the maximum, the sum divided by the square root of the number of tokens, and the mean
with the position of a token as its weight, 1 for the first one."""


def load(kinds: Kinds, name: str) -> Any:
    """Returns the object that `name` stands for in `kinds`.

    Raises:
        KeyError: `kinds` has no such name.
        UserError: another package has registered a name of an object that cannot be imported.
    """
    entry = kinds[name]
    if not isinstance(entry, str):
        return entry
    try:
        return _resolve(entry)
    except (ImportError, AttributeError, ValueError) as error:
        if not is_outside(kinds, name):
            raise
        raise UserError(f"{entry!r}, registered as {name!r}, cannot be imported: {one_line(error)}") from error


_resolve = functools.cache(pkgutil.resolve_name)
"""Asked for each request of the decoding engine, by the properties of a config."""


def loaded(kinds: Kinds) -> Iterator[tuple[str, Any]]:
    """Yields the names and objects of all kinds."""
    return ((name, load(kinds, name)) for name in kinds)


class Users(Collection[str]):
    """The kinds that declare a setting; a kind is loaded only when it is asked for."""

    def __init__(self, kinds: Kinds, setting: str):
        self._kinds, self._setting = kinds, setting

    def __contains__(self, name: object) -> bool:
        return name in self._kinds and self._setting in getattr(load(self._kinds, str(name)), "settings", ())

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._kinds if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_recurrent(attention: str) -> bool:
    """Returns whether a kind of attention has a recurrent state instead of entries for tokens."""
    cache = getattr(load(ATTENTIONS, attention), "cache", None)
    return cache is not None and not cache.keeps_tokens


def is_outside(kinds: Kinds, name: str) -> bool:
    """Returns whether a kind is registered by code outside of this package."""
    entry = kinds[name]
    return not (isinstance(entry, str) and entry.startswith(f"{__name__.partition('.')[0]}."))


def import_modules(names: Iterable[str]) -> None:
    """Imports modules that register kinds, from Python's path or the current folder.

    Raises:
        UserError: there is no such module, or it fails.
    """
    for name in names:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(name)
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
                raise UserError(
                    f"module {name!r}, which registers kinds, is not in the current folder or on Python's path: "
                    f"run the command in the folder of {name.partition('.')[0]}, or set PYTHONPATH to it"
                ) from None
            raise UserError(f"module {name!r} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
