"""The settings of an experiment. This file and `model.py` are their only declaration."""

import dataclasses
from typing import ClassVar

from tformer_jax.config.fields import Section, setting
from tformer_jax.config.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Where text comes from, how it becomes tokens, and how tokens become batches."""

    path: ClassVar[str] = "data"

    source: str = setting(
        "cldr_translation",
        "cldr_* and stdlib_text are made on the spot; the others read files below the data folder",
        choices=(
            "cldr_translation",
            "cldr_language",
            "stdlib_text",
            "parallel_lines",
            "tsv_pairs",
            "text",
            "labelled_tsv",
        ),
    )
    source_language: str = setting("en", "CLDR locale, and the `{lang}` of source files")
    target_language: str = setting("de", "CLDR locale, and the `{lang}` of target files")
    languages: tuple[str, ...] = setting(
        ("en", "de", "fr", "es", "it", "nl", "sv", "pl"), "CLDR locales of cldr_language"
    )
    train_file: str | None = setting(None, "path below the data folder; parallel_lines writes `{lang}` in it")
    validation_file: str | None = setting(None, "like train_file; None: the last part of the training file")
    test_file: str | None = setting(None, "like train_file; None: the validation examples")
    validation_fraction: float = setting(0.1, "share of the training file when validation_file is None", low=0, high=1)
    heldout_examples: int = setting(2000, "size of each held-out split of the made corpora", low=1)

    tokenizer: str = setting("bpe", "kind of token", choices=("bytes", "characters", "bpe", "unigram"))
    vocab_size: int = setting(8000, "tokens of a bpe or unigram vocabulary, special tokens included", low=8)
    split_digits: bool = setting(False, "bpe and unigram: every digit is a token of its own")
    shared_vocab: bool = setting(True, "one vocabulary for source and target")
    tokenizer_examples: int = setting(100_000, "training examples the tokenizer is trained on, at most", low=1)

    batching: str = setting("buckets", "buckets: whole examples; windows: one stream", choices=("buckets", "windows"))
    bucket_lengths: tuple[int, ...] = setting((16, 32, 64), "buckets: lengths examples are padded to", low=1)
    batch_tokens: int = setting(4096, "buckets: tokens of one batch on the longer side, padding included", low=1)
    batch_size: int = setting(32, "windows: examples in a batch", low=1)
    window: int = setting(256, "windows: tokens in one example", low=1)
    workers: int = setting(0, "loader processes; 0: threads of the training process", low=0)

    def check(self) -> None:
        if list(self.bucket_lengths) != sorted(set(self.bucket_lengths)) or not self.bucket_lengths:
            raise self.error("bucket_lengths", "must be lengths in rising order, such as (16, 32, 64)")
        if self.batch_tokens < self.bucket_lengths[-1]:
            raise self.error("batch_tokens", f"must hold one example of the longest bucket, {self.bucket_lengths[-1]}")
        made = self.source.startswith("cldr") or self.source == "stdlib_text"
        if not made and self.train_file is None:
            raise self.error("train_file", f"must name the training file of data.source={self.source!r}")
        if self.source == "parallel_lines" and "{lang}" not in (self.train_file or ""):
            raise self.error("train_file", "must contain {lang}, for example 'multi30k/train.{lang}.gz'")


@dataclasses.dataclass(frozen=True)
class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    path: ClassVar[str] = "optim"

    schedule: str = setting(
        "inverse_sqrt", "course of the learning rate after warm-up", choices=("inverse_sqrt", "cosine", "constant")
    )
    learning_rate: float | None = setting(
        None, "peak; None (inverse_sqrt only): D^-0.5 * warmup^-0.5, the 2017 paper's", low=0.0
    )
    warmup_steps: int = setting(4000, "steps of linear warm-up", low=1)
    final_fraction: float = setting(0.1, "cosine: last learning rate as a share of the peak", low=0.0, high=1.0)
    beta1: float = setting(0.9, "decay of the first moment", low=0.0, high=1.0)
    beta2: float = setting(0.98, "decay of the second moment", low=0.0, high=1.0)
    eps: float = setting(1e-9, "added to the root of the second moment", low=0.0)
    weight_decay: float = setting(0.0, "decoupled decay of kernels and embeddings", low=0.0)
    clip_norm: float = setting(1.0, "largest global gradient norm; 0: no clipping", low=0.0)

    def check(self) -> None:
        if self.learning_rate is None and self.schedule != "inverse_sqrt":
            raise self.error("learning_rate", f"must be a number for optim.schedule={self.schedule!r}, such as 1e-3")


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """The training loop."""

    path: ClassVar[str] = "train"

    steps: int = setting(10_000, "optimizer steps", low=1)
    label_smoothing: float = setting(0.0, "probability mass spread over the vocabulary", low=0.0, high=1.0)
    log_every: int = setting(50, "steps between two metric records", low=1)
    eval_every: int = setting(1000, "steps between two evaluations", low=1)
    checkpoint_every: int = setting(1000, "steps between two checkpoints", low=1)
    keep_checkpoints: int = setting(2, "newest checkpoints kept", low=1)


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Section):
    """Sizes of the mesh axes."""

    path: ClassVar[str] = "parallel"

    data: int = setting(-1, "devices that share a batch; -1: all local devices", low=-1)

    def check(self) -> None:
        if self.data == 0:
            raise self.error("data", "must be -1 or at least 1")


@dataclasses.dataclass(frozen=True)
class DecodeConfig(Section):
    """How text is generated."""

    path: ClassVar[str] = "decode"

    strategy: str = setting("greedy", "how the next token is chosen", choices=("greedy", "sample"))
    temperature: float = setting(1.0, "sample: logits are divided by it", low=1e-4)
    top_k: int | None = setting(None, "sample: only the k most probable tokens", low=1)
    top_p: float | None = setting(None, "sample: only the most probable tokens that hold this mass", low=0.0, high=1.0)
    max_new_tokens: int = setting(128, "longest output, in tokens", low=1)


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section):
    """What is measured, on how many examples."""

    path: ClassVar[str] = "eval"

    batch_size: int = setting(64, "examples in an evaluation batch", low=1)
    examples: int = setting(500, "validation examples used during training; 0: all", low=0)
    samples: int = setting(5, "outputs shown at each evaluation", low=0)
    bleu_tokenize: str = setting("13a", "sacreBLEU's tokenizer", choices=("13a", "intl", "zh", "char", "none"))


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """One experiment."""

    name: str = setting("experiment", "names the run folder, runs/NAME")
    seed: int = setting(0, "of parameters, dropout, data order and made corpora", low=0)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)

    def check(self) -> None:
        longest = self.data.window if self.data.batching == "windows" else self.data.bucket_lengths[-1]
        if longest > self.model.max_length:
            name = "window" if self.data.batching == "windows" else "bucket_lengths"
            raise self.data.error(name, f"must not exceed model.max_length={self.model.max_length}")
        tasks = {
            "seq2seq": ("cldr_translation", "parallel_lines", "tsv_pairs"),
            "decoder_lm": ("stdlib_text", "text"),
            "classifier": ("cldr_language", "labelled_tsv"),
        }[self.model.family]
        if self.data.source not in tasks:
            raise self.data.error("source", f"does not fit model.family={self.model.family!r}; write one of {tasks}")
        if (self.model.family == "decoder_lm") != (self.data.batching == "windows"):
            fitting = "windows" if self.model.family == "decoder_lm" else "buckets"
            raise self.data.error("batching", f"must be {fitting!r} for model.family={self.model.family!r}")
        if self.model.tie_embeddings in ("inputs", "all") and not self.data.shared_vocab:
            raise self.data.error(
                "shared_vocab", f"must be True for model.tie_embeddings={self.model.tie_embeddings!r}"
            )
