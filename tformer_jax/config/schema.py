"""The settings of an experiment; the other modules of this package declare its larger sections."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tformer_jax.config import kinds
from tformer_jax.config.data import DataConfig
from tformer_jax.config.decode import DecodeConfig, EmbedConfig
from tformer_jax.config.fields import SAME_TRAINING, Section, coerce, section, setting
from tformer_jax.config.metrics import TAKEN
from tformer_jax.config.model import ModelConfig
from tformer_jax.config.parallel import ParallelConfig
from tformer_jax.config.task import task_of
from tformer_jax.config.training import WITH_AN_END, OptimConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section):
    """Settings of evaluation."""

    path: ClassVar[str] = "eval"
    resumable: ClassVar[str | None] = SAME_TRAINING

    batch_size: int = setting(64, "examples per evaluation batch", low=1)
    examples: int = setting(
        500,
        "validation examples per evaluation during training, evenly spread; with many languages, equally many of each "
        "direction; 0: all",
        low=0,
    )
    samples: int = setting(
        5,
        "outputs to print at each evaluation; language models write at most 128 new tokens unless "
        "decode.max_new_tokens says otherwise",
        low=0,
    )
    bleu_tokenize: str | None = setting(
        None,
        "sacreBLEU's tokenizer; None: zh, ja-mecab or ko-mecab for those target languages (char without MeCab), else "
        "13a; flores200 is downloaded on first use",
        choices=("13a", "intl", "zh", "ja-mecab", "ko-mecab", "flores200", "char", "none"),
    )
    references: str = setting(
        "raw", "references for translation metrics: raw, or normalized by data.normalize", choices=("raw", "normalized")
    )
    metrics: tuple[str, ...] = setting(
        (),
        "further metrics of translations, besides bleu, chrf and exact_match: chrf++, ter (slow), spbleu, off_target, "
        "the percentage of outputs in another language than the target's (extra: languages), command, or "
        "command_error, whose lower values are better",
        choices=kinds.METRICS,
    )
    spbleu_model: str | None = setting(
        None,
        "spbleu: file of its SentencePiece model, such as https://tinyurl.com/flores200sacrebleuspm",
        used_by="metrics",
    )
    command: str | None = setting(
        None,
        "program and arguments, run without a shell, that reads JSONL (source, output, references) and writes a score "
        "per line or a JSON list of scores",
        used_by="metrics",
    )
    command_seconds: int = setting(3600, "seconds after which the command fails", low=1, used_by="metrics")

    def values_of(self, switch: str) -> tuple[Any, ...]:
        """As `Section.values_of`; `metrics` has several."""
        return (switch == "metrics" and self.metrics) or super().values_of(switch)

    def check(self) -> None:
        for name in self.metrics:
            if kinds.is_outside(kinds.METRICS, name) and (name in TAKEN or ":" in name):
                raise self.error("metrics", f"{name!r} is taken, empty, or has a colon; register another name")


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """One experiment."""

    name: str = setting("experiment", "name of the run folder, runs/NAME", resumable=SAME_TRAINING)
    seed: int = setting(
        0, "random seed for parameters, dropout, data order and generated training data", low=0, high=2**32 - 1
    )
    task: str | None = setting(
        None, "what the model is trained for; None: by model.family and data.objective", choices=kinds.TASKS
    )
    imports: tuple[str, ...] = setting(
        (), "modules of other code that register kinds; imported when the run is used", resumable=SAME_TRAINING
    )
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    optim: OptimConfig = section(OptimConfig)
    train: TrainConfig = section(TrainConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    decode: DecodeConfig = section(DecodeConfig)
    eval: EvalConfig = section(EvalConfig)
    embed: EmbedConfig = section(EmbedConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As `Section.from_dict`, after the `imports` of the values.

        Raises:
            UserError: a module cannot be imported.
        """
        imports = coerce(tuple[str, ...], values.get("imports", ()))
        if isinstance(imports, tuple):  # else an error of `Section.from_dict`
            kinds.import_modules(name for name in imports if isinstance(name, str))
        return super().from_dict(values)

    def without_effect(self) -> list[str]:
        """As `Section.without_effect`; also names settings with an unwanted effect."""
        sentences = [*super().without_effect(), *task_of(self).without_effect(self)]
        optim, steps = self.optim, f"train.steps={self.train.steps}"
        if optim.schedule in WITH_AN_END and optim.warmup_steps >= self.train.steps:
            warmup = f"optim.warmup_steps={optim.warmup_steps} is not below {steps}"
            sentences.append(f"optim.schedule={optim.schedule!r} has no effect, because {warmup}")
        elif optim.warmup_steps > self.train.steps:
            peak = "so that the learning rate never reaches its peak"
            sentences.append(f"optim.warmup_steps={optim.warmup_steps} is more than {steps}, {peak}")
        return sentences

    def check(self) -> None:
        if {"", ".", ".."} & {*self.name.split("/")}:
            raise self.error("name", "must name a folder below runs, such as 'baseline'")
        task_of(self).check_fit(self)
        if self.embed.max_length is not None and self.embed.max_length > self.model.max_length:
            raise self.embed.error("max_length", f"must not exceed model.max_length={self.model.max_length}")
        self.decode.check_documents(self.data.documents)
        self.decode.check_lookup(self.model.attentions, continues=self.model.model_class.continues)
        self._check_data()
        self._check_training()
        utility, configured = self.decode.utility, ("chrf", *self.eval.metrics)
        if utility not in configured and hasattr(kinds.load(kinds.METRICS, utility), "settings"):
            raise self.decode.error("utility", "has settings in eval: add it to eval.metrics, and set them")
        if self.eval.references == "normalized" and not self.data.normalize:
            raise self.eval.error("references", "must be 'raw' without data.normalize")

    def _check_data(self) -> None:
        if self.data.longest > self.model.max_length:
            longer = self.data.batching == "packed" and (self.data.source_window or 0) > self.data.window
            name = "bucket_lengths" if self.data.batching == "buckets" else "source_window" if longer else "window"
            raise self.data.error(name, f"must not exceed model.max_length={self.model.max_length}")
        if self.data.batching == "packed" and self.model.prefix_lm:
            raise self.data.error("batching", "must be 'windows' for model.prefix_lm=True")
        if self.model.ties_inputs and not self.data.shared_vocab:
            raise self.data.error(
                "shared_vocab", f"must be True for model.tie_embeddings={self.model.tie_embeddings!r}"
            )

    def _check_training(self) -> None:
        mup = self.model.parameterization == "mup"
        rows = "batch_multiple" if self.data.batching == "buckets" else "batch_size"
        if getattr(self.data, rows) % self.train.accumulate:
            raise self.data.error(rows, f"must be a multiple of train.accumulate={self.train.accumulate}")
        if mup and not hasattr(kinds.load(kinds.OPTIMIZERS, self.optim.optimizer), "width_power"):
            users = [name for name, kind in kinds.loaded(kinds.OPTIMIZERS) if hasattr(kind, "width_power")]
            raise self.optim.error("optimizer", f"must be {', '.join(users)} for model.parameterization='mup'")
        if self.train.teacher and not self.model.model_class.decodes:
            raise self.train.error("teacher", f"teaches no models of the family {self.model.family!r}: write None")
        if mup and self.train.lora_rank:
            raise self.train.error("lora_rank", "must be 0 for model.parameterization='mup', which has no rule for it")
        if self.train.lora_rank and self.model.quantization:
            instead = "train.lora_base='int8' stores frozen kernels as int8"
            raise self.train.error("lora_rank", f"must be 0 with model.quantization; {instead}")
        if self.train.lora_rank and self.train.start_from is None:
            raise self.train.error("lora_rank", "updates the weights of a trained run: name it in train.start_from")
