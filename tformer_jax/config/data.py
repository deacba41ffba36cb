"""The settings of data: where text comes from, how it is tokenized, and how tokens are batched."""

import dataclasses
from typing import Any, ClassVar

from tformer_jax.config import kinds
from tformer_jax.config.directions import Direction, check_directions, check_mixture, with_reverses
from tformer_jax.config.examples import FilterConfig, NoiseConfig
from tformer_jax.config.fields import SAME_TRAINING, Section, section, setting
from tformer_jax.config.transforms import Transform
from tformer_jax.special_tokens import symbol_problem

NORMALIZATIONS = ("nfkc", "lowercase", "punctuation", "moses", "simplified")
PLACEHOLDERS = ("percent", "braces", "tags", "urls")
BUCKETS = {"batching": ("buckets",)}
ROWS = {"batching": ("windows", "packed")}
PACKED = {"batching": ("packed",)}
TAGS = ("source", "target")
NEEDED = {
    "split_digits": "data.tokenizer='bpe' or 'unigram'",
    "byte_fallback": "data.tokenizer='bpe' or 'unigram'",
    "character_coverage": "data.tokenizer='bpe', 'unigram' or 'characters'",
}
"""What uses a setting of tokenizers."""


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Where text comes from, how it is tokenized, and how tokens are batched."""

    path: ClassVar[str] = "data"
    selectable: ClassVar[tuple[str, ...]] = ("batching", "tokenizer")

    source: str = setting(
        "cldr_translation",
        "cldr_* and stdlib_text are generated; gettext reads the catalogues of software; tfds is a dataset of TFDS; "
        "prepared is the output of prepare_data.py; python is data that tformer_jax.train was "
        "given; the others are files below the data folder",
        choices=kinds.CORPORA,
    )
    source_language: str = setting(
        "en", "CLDR locale or code of ISO 639; also `{lang}` of source files, and their TFDS feature"
    )
    target_language: str = setting(
        "de", "CLDR locale or code of ISO 639; also `{lang}` of target files, and their TFDS feature"
    )
    directions: tuple[str, ...] = setting(
        (),
        "translation between many languages: pairs such as ('en-de', 'en-pt_BR'), each read in this order. {src} and "
        "{tgt} in entries and fields are their codes, {lang} in entries the code of either side; (): source_language "
        "and target_language, or all directions that language_fields name",
        used_by="source",
    )
    both_directions: bool = setting(False, "many languages: read each pair the other way round, too", used_by="source")
    zero_shot: tuple[str, ...] = setting(
        (), "as directions: pairs of the held-out splits that training leaves out", used_by="source"
    )
    language_fields: tuple[str, ...] = setting(
        (), "as fields: the fields that hold the languages of source and target", used_by="source"
    )
    source_tags: tuple[str, ...] = setting(
        ("target",),
        "many languages: the languages whose tags each source starts with; target: which to translate into (Google's "
        "multilingual system, 2017), source: which it is in",
        choices=TAGS,
    )
    target_tags: tuple[str, ...] = setting(
        (),
        "many languages: the languages whose tags each target starts with; the decoder is given them, and does not "
        "learn to predict them (M2M-100, 2020)",
        choices=TAGS,
    )
    temperature: float = setting(
        1.0,
        "many languages: draw each direction with a probability proportional to n^(1/temperature), for n examples; 1: "
        "as often as it occurs",
        low=1.0,
        high=1e6,
    )
    upsampling: float | None = setting(
        None,
        "many languages: repeat the examples of a direction at most this many times as often as on average",
        low=1.0,
    )
    languages: tuple[str, ...] = setting(
        ("en", "de", "fr", "es", "it", "nl", "sv", "pl"), "CLDR locales of cldr_language", used_by="source"
    )
    dataset: str | None = setting(None, "tfds: NAME, NAME/CONFIG or NAME/CONFIG:VERSION", used_by="source")
    train: tuple[str, ...] = setting(
        (),
        "files or globs below the data folder (parallel_lines writes `{lang}` in them); gettext: also folders and "
        "Python packages; tfds: splits such as 'train[:90%]'; prepared: folders",
        used_by="source",
    )
    validation: tuple[str, ...] = setting(
        (), "as train, not used by prepared; (): the last part of train", used_by="source"
    )
    test: tuple[str, ...] = setting((), "as train, not used by prepared; (): the validation examples", used_by="source")
    links: str | None = setting(
        None,
        "parallel_lines: what stands for {lang} in the names of files of train's word links (0-0 1-2), such as links",
        used_by="source",
    )
    weights: tuple[float, ...] = setting(
        (),
        "mixture weights of the entries of train, or of the directions, by weight_by; drawn in proportions exact to "
        "2^-20; (): concatenate them",
        above=0,
        used_by="source",
    )
    weight_by: str = setting(
        "examples",
        "unit of weights: examples, whatever their lengths, or the tokens of batches; windows are weighted as windows, "
        "and thereby by tokens",
        choices=("examples", "tokens"),
        used_by={"source": kinds.Users(kinds.CORPORA, "weight_by"), "batching": ("buckets", "packed")},
    )
    stages: tuple[str, ...] = setting(
        (),
        "mixtures in turn, in place of weights: 'general until step 2000', 'general 4 to 1, domain 0 to 3 for 2 epochs "
        "of domain', 'linearly to domain for 1000000 tokens', 'temperature 5 with typos' of transforms; a source is a "
        "direction, or an entry of train or its file name up to the first dot",
        used_by="source",
    )
    fields: tuple[str, ...] = setting(
        (),
        "tsv, jsonl, parquet, tfds: names (tsv: numbers from 1, as in ('2', '1')) of the fields: source and target, or "
        "text, or text and label; for conversations, messages, or prompt and response; (): the default names (tsv: the "
        "first two columns, label before text)",
        used_by="source",
    )
    chat_template: str | None = setting(
        None,
        "conversations: file of a Jinja template, or the folder or tokenizer_config.json of a checkpoint that has one, "
        "below the data folder; None: the tokenizer's template, or a plain one",
    )
    validation_fraction: float = setting(
        0.1,
        "fraction of train held out if validation is (); gettext: of the messages, for validation and test each",
        above=0,
        below=1,
        used_by="source",
    )
    heldout_examples: int = setting(
        2000,
        "size of each held-out split of a generated corpus, which is the same for all seeds",
        low=1,
        used_by="source",
    )
    on_bad_line: str = setting(
        "stop", "malformed lines: stop, or skip, count and report them", choices=("stop", "skip"), used_by="source"
    )
    header: bool = setting(
        False,
        "the first line of each file is a header and no example; the names in a TSV file's may stand in fields",
        used_by="source",
    )
    filters: FilterConfig = section(FilterConfig, used_by="source")
    objective: str | None = setting(
        None,
        "pre-training on texts: masked_tokens (BERT, 2019), span_corruption (T5, 2020) or denoising (BART, 2020); "
        "None: learn targets, labels or next tokens",
        choices=kinds.OBJECTIVES,
    )
    noise: NoiseConfig = section(NoiseConfig)

    normalize: tuple[str, ...] = setting(
        (),
        "steps that change texts before tokenization, in order: Unicode NFKC, lowercase, punctuation and moses (Moses' "
        "scripts, by language), simplified (Chinese characters); models then write normalized text",
        choices=NORMALIZATIONS,
    )
    clean_whitespace: bool | None = setting(
        None,
        "before data.normalize, make a text one line of words with single spaces, without control characters and "
        "zero-width spaces; None: False for language models and pre-training, whose texts are documents; tokenizers of "
        "runs and checkpoints keep their own setting; else True",
    )
    tokenizer: str = setting(
        "bpe",
        "kind of tokenizer; file: load tokenizer_file; ids: texts are numbers, token ids of your own; training unigram "
        "again gives slightly different scores",
        choices=kinds.TOKENIZERS,
    )
    source_tokenizer: str | None = setting(
        None, "kind of the source's tokenizer; None: tokenizer", choices=kinds.TOKENIZERS
    )
    target_tokenizer: str | None = setting(
        None, "kind of the target's tokenizer; None: tokenizer", choices=kinds.TOKENIZERS
    )
    tokenizer_file: str | None = setting(
        None,
        "file: tokenizer.json, SentencePiece .model, .tiktoken ranks (texts are split as for GPT-2), a run's "
        "tokenizers/target.json, or the folder of a Hugging Face checkpoint or of a run, below the data folder",
    )
    vocab_size: int = setting(
        8000,
        "maximum size of a trained vocabulary, special tokens included (characters: all that occur); symbols are added",
        low=8,
        used_by="tokenizer",
    )
    split_digits: bool = setting(False, "bpe and unigram: one token per digit (characters and bytes: always)")
    character_coverage: float | None = setting(
        None,
        "bpe, unigram, characters: fraction of the examples' characters that the vocabulary covers; rarer ones become "
        "unknown, or bytes with byte_fallback; None: bpe and unigram are byte-level, characters covers all",
        above=0,
        high=1,
    )
    byte_fallback: bool = setting(
        False, "bpe and unigram with character_coverage: characters outside of the vocabulary are bytes, not unknown"
    )
    symbols: tuple[str, ...] = setting(
        (),
        "trained tokenizers: texts that are one token each wherever they stand, whatever data.normalize does; the "
        "longest of several that begin at the same place",
    )
    placeholders: tuple[str, ...] = setting(
        (),
        "translation: texts that outputs copy from their source: percent (%s, %(name)d), braces ({0}, {name}), tags "
        "(<b>, </a>), urls; each is one of 32 numbered symbols for the model",
        choices=PLACEHOLDERS,
    )
    transforms: tuple[Transform, ...] = setting(
        (),
        "random changes of training examples, in order: names, or dictionaries such as {'kind': 'case', "
        "'probability': 0.05}; what is drawn depends on the seed, the example and the epoch alone",
    )
    shared_vocab: bool = setting(True, "one vocabulary for source and target")
    tokenizer_examples: int = setting(
        100_000,
        "maximum number of training examples for the tokenizer, spread over all; alphabets (characters, wordpiece) are "
        "read from all examples, except for generated data",
        low=1,
        used_by="tokenizer",
    )
    tokenizer_temperature: float = setting(
        5.0,
        "many languages: draw the tokenizer's examples of each direction in proportion to n^(1/tokenizer_temperature) "
        "for n examples (NLLB, 2022); 1: as they occur",
        low=1,
        used_by={"tokenizer": kinds.Users(kinds.TOKENIZERS, "tokenizer_examples")},
    )

    batching: str = setting(
        "buckets",
        "buckets: whole examples, padded; packed: whole examples, several in a row; windows: fixed-length pieces of "
        "all texts, concatenated",
        choices=("buckets", "packed", "windows"),
    )
    bucket_lengths: tuple[int, ...] = setting((16, 32, 64), "lengths to pad examples to", low=1, used_by=BUCKETS)
    batch_tokens: int = setting(
        4096,
        "maximum number of tokens per batch, padding included; for pairs, of the longer side",
        low=1,
        used_by=BUCKETS,
    )
    batch_multiple: int = setting(8, "the number of examples in a batch is a multiple of this", low=1, used_by=BUCKETS)
    batch_size: int = setting(32, "rows in a batch", low=1, used_by=ROWS)
    window: int = setting(
        256,
        "tokens per row; for pairs, of the target; with data.objective, maximum of either side",
        low=1,
        used_by=ROWS,
    )
    source_window: int | None = setting(None, "tokens in a row of sources; None: window", low=1, used_by=PACKED)
    long_documents: str = setting(
        "split",
        "language models: split a document that is longer than a row into several rows, or truncate it",
        choices=("split", "truncate"),
        used_by=PACKED,
    )
    long_pairs: str = setting(
        "drop",
        "pairs with a side, and conversations, that are longer than a row: drop them in training, or truncate each "
        "side, a target without an end, and conversations at the end; evaluation scores whole targets and answers",
        choices=("drop", "truncate"),
        used_by={"batching": ("buckets", "packed")},
    )
    workers: int = setting(
        0, "loader processes that tokenize text or read windows; 0: a thread does it", low=0, resumable=SAME_TRAINING
    )

    def check(self) -> None:
        self._check_source()
        check_directions(self)
        check_mixture(self)
        self._check_tokenizer()
        self._check_batching()

    def values_of(self, switch: str) -> tuple[Any, ...]:
        """As `Section.values_of`; `tokenizer` has a value for each side."""
        if switch in ("source_tokenizer", "target_tokenizer"):
            return ()
        return self.tokenizer_kinds if switch == "tokenizer" else super().values_of(switch)

    def _check_source(self) -> None:
        entry = kinds.load(kinds.CORPORA, self.source).entry
        if entry and not self.train:
            raise self.error("train", f"must say what data.source={self.source!r} reads, such as {entry}")
        if self.validation and "validation_fraction" in self.changed_settings():
            raise self.error("validation_fraction", "is used only if data.validation is (); write 0.1")

    def _check_tokenizer(self) -> None:
        sides = self.tokenizer_kinds
        if "file" in sides and self.tokenizer_file is None:
            raise self.error("tokenizer_file", "must name the file for data.tokenizer='file'")
        if "file" not in sides and self.tokenizer_file is not None:
            raise self.error("tokenizer_file", f"is used only by data.tokenizer='file', not {sides[0]!r}; write None")
        for name, needed in NEEDED.items():
            is_used = any(kind in kinds.Users(kinds.TOKENIZERS, name) for kind in sides)
            if name in self.changed_settings() and not is_used:
                default = type(self).__dataclass_fields__[name].default
                raise self.error(name, f"needs {needed}, not {sides[0]!r}; write {default!r}")
        if self.byte_fallback and self.character_coverage is None:
            raise self.error("byte_fallback", "needs data.character_coverage, such as 0.9995; write False")
        self._check_symbols()
        if self.shared_vocab and len(set(sides)) > 1:
            raise self.error("shared_vocab", "must be False for tokenizers of different kinds")

    def _check_symbols(self) -> None:
        for name in ("symbols", "placeholders"):
            values = getattr(self, name)
            if values and "file" in self.tokenizer_kinds:
                raise self.error(
                    name, "is not used by data.tokenizer='file', whose tokenizers have their own; write ()"
                )
            if len(set(values)) < len(values):
                raise self.error(name, "has a value twice")
        for symbol in self.symbols:
            if problem := symbol_problem(symbol):
                raise self.error("symbols", f"{symbol!r} {problem}")

    def _check_batching(self) -> None:
        if self.transforms and self.batching == "windows":
            raise self.error("transforms", "must be () for data.batching='windows', which tokenizes texts only once")
        for transform in self.transforms:
            transform.check_fit(self)
        if list(self.bucket_lengths) != sorted(set(self.bucket_lengths)) or not self.bucket_lengths:
            raise self.error("bucket_lengths", "must be lengths in ascending order, such as (16, 32, 64)")
        needed = self.bucket_lengths[-1] * self.batch_multiple
        if self.batching == "buckets" and self.batch_tokens < needed:
            rows = f"{self.batch_multiple} (data.batch_multiple) rows"
            raise self.error("batch_tokens", f"must be at least {needed}: {rows} of the longest bucket")

    @property
    def generated(self) -> bool:
        """Whether examples are generated instead of read from what `train` names."""
        return not self.train and self.source != "python"

    @property
    def mixed(self) -> str:
        """The setting that mixes the entries of `train`, `weights` or `stages`; "": they are concatenated."""
        return "stages" if self.stages else "weights" if self.weights else ""

    @property
    def multilingual(self) -> bool:
        """Whether examples have directions."""
        return bool(self.directions or self.language_fields) or kinds.load(kinds.CORPORA, self.source).multilingual

    @property
    def wanted_directions(self) -> tuple[Direction, ...]:
        """The directions to read, in the order of the training split; (): all that the data has."""
        listed = list(map(Direction.parse, self.directions))
        return tuple(with_reverses(listed) if self.both_directions else listed)

    @property
    def documents(self) -> tuple[int, str] | None:
        """As in `Transform`: of the transforms, the one that joins most sentences."""
        return max(filter(None, (each.documents for each in self.transforms)), default=None)

    @property
    def tokenizer_kinds(self) -> tuple[str, str]:
        """The kinds of the source's and the target's tokenizer."""
        return self.source_tokenizer or self.tokenizer, self.target_tokenizer or self.tokenizer

    @property
    def longest(self) -> int:
        """Maximum number of tokens per row, source or target."""
        window = max(self.window, (self.batching == "packed" and self.source_window) or 0)
        return self.bucket_lengths[-1] if self.batching == "buckets" else window

    @property
    def tokens_per_batch(self) -> int:
        """Maximum number of tokens in a batch, of either side."""
        return self.batch_tokens if self.batching == "buckets" else self.batch_size * self.window
