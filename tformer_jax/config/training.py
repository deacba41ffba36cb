"""Settings of the optimizer and the training loop."""

import dataclasses
import math
from typing import Any, ClassVar

from tformer_jax.config import kinds
from tformer_jax.config.fields import INT32_MAX, OTHER_TRAINING, SAME_TRAINING, Section, setting

WITH_AN_END = ("cosine", "linear", "warmup_stable_decay")
"""Schedules that decay from the peak to `final_fraction` of it."""

PREFIXES = {"start_from": "start_from_", "lora_rank": "lora_", "teacher": "teacher_"}
"""Settings of `train`, and the prefix of the names of all settings that need them."""


@dataclasses.dataclass(frozen=True)
class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    path: ClassVar[str] = "optim"

    optimizer: str = setting(
        "adamw",
        "muon: adamw for embeddings and non-matrix parameters; schedule_free_adamw: averaged parameters are evaluated; "
        "python: what tformer_jax.train was given",
        choices=kinds.OPTIMIZERS,
    )
    schedule: str = setting(
        "inverse_sqrt",
        "learning-rate schedule after warm-up",
        choices=("inverse_sqrt", "constant", *WITH_AN_END),
        resumable=OTHER_TRAINING,
    )
    learning_rate: float | None = setting(
        None,
        "peak learning rate; None (inverse_sqrt only): D^-0.5 * warmup^-0.5, as in the 2017 paper; "
        "D is base_dim with muP",
        low=0.0,
        resumable=OTHER_TRAINING,
    )
    learning_rate_factors: tuple[str, ...] = setting(
        (),
        "learning-rate factors 'GLOB=FACTOR' by parameter; the first match counts, 0 freezes",
        resumable=OTHER_TRAINING,
    )
    warmup_steps: int = setting(4000, "steps of linear warm-up", low=1, high=INT32_MAX, resumable=OTHER_TRAINING)
    final_fraction: float = setting(
        0.1,
        "final learning rate as a fraction of the peak",
        low=0,
        high=1,
        used_by={"schedule": WITH_AN_END},
        resumable=OTHER_TRAINING,
    )
    decay_fraction: float = setting(
        0.2,
        "fraction of the steps after warm-up in which the learning rate decays",
        low=0,
        high=1,
        used_by={"schedule": ("warmup_stable_decay",)},
        resumable=OTHER_TRAINING,
    )
    cycles: int = setting(
        1, "number of cycles of a schedule with an end; each restarts at the peak", low=1, resumable=OTHER_TRAINING
    )
    beta1: float = setting(0.9, "decay of the first moment; sgd: momentum", low=0.0, below=1.0, used_by="optimizer")
    beta2: float = setting(0.98, "decay of the second moment", low=0.0, below=1.0, used_by="optimizer")
    muon_beta: float = setting(0.95, "momentum coefficient of Muon", low=0.0, below=1.0, used_by="optimizer")
    eps: float = setting(1e-9, "added to the square root of the second moment", above=0.0, used_by="optimizer")
    weight_decay: float = setting(
        0.0,
        "decoupled weight decay, multiplied by the learning rate; sgd: L2 penalty",
        low=0.0,
        resumable=OTHER_TRAINING,
    )
    decayed: tuple[str, ...] = setting(
        ("*kernel", "*embedding", "*types", "*router", "*shared_gate"),
        "globs of the parameters with weight decay, such as 'encoder/*/kernel'; "
        "factors of LoRA have the names of their kernels",
        resumable=OTHER_TRAINING,
    )
    clip_norm: float = setting(1.0, "maximum global gradient norm; 0: no clipping", low=0.0, resumable=OTHER_TRAINING)
    adaptive_clip: float = setting(
        0.0,
        "maximum ratio of gradient norm to parameter norm, per output unit (NFNets, 2021); 0: no clipping",
        low=0.0,
        resumable=OTHER_TRAINING,
    )

    def without_effect(self) -> list[str]:
        unused = super().without_effect()
        if "decayed" in self.changed_settings() and not self.weight_decay:
            unused.append(f"optim.decayed={self.decayed} has no effect with optim.weight_decay=0.0")
        return unused

    def check(self) -> None:
        if self.learning_rate is None and self.schedule != "inverse_sqrt":
            raise self.error("learning_rate", f"must be a number for optim.schedule={self.schedule!r}, such as 1e-3")
        if self.cycles > 1 and self.schedule not in WITH_AN_END:
            raise self.error("cycles", f"needs a schedule with an end: one of {WITH_AN_END}")
        for entry in self.learning_rate_factors:
            glob, _, factor = entry.rpartition("=")
            if not glob or not _is_factor(factor):
                raise self.error("learning_rate_factors", f"{entry!r} must be GLOB=FACTOR, such as '*embedding=0.1'")


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """The training loop."""

    path: ClassVar[str] = "train"

    steps: int = setting(10_000, "optimizer steps", low=1, high=INT32_MAX, resumable=OTHER_TRAINING)
    accumulate: int = setting(
        1, "micro-batches per step, computed one after another to save memory", low=1, resumable=OTHER_TRAINING
    )
    start_from: str | None = setting(
        None, "run folder whose parameters initialize the model where name and shape match"
    )
    start_from_step: int | None = setting(
        None, "start_from: step of the checkpoint to take; None: the final weights, or the newest checkpoint", low=0
    )
    lora_rank: int = setting(0, "rank of LoRA updates (2022); only they are trained; 0: train all parameters", low=0)
    lora_alpha: float = setting(16.0, "LoRA: updates are multiplied by alpha / rank", low=0.0)
    lora_kernels: tuple[str, ...] = setting(
        ("*",), "LoRA: globs of the kernels of layers that are updated, such as '*attention/*'"
    )
    lora_base: str | None = setting(
        None, "LoRA: dtype in which the kernels of layers are stored and stay frozen (QLoRA, 2023)", choices=("int8",)
    )
    lora_whole: tuple[str, ...] = setting((), "LoRA: globs of parameters to train in full, such as 'head/*'")

    teacher: str | None = setting(
        None,
        "run folder of a model with the same vocabulary whose distributions are learned beside the labels, or the "
        "folder of its stored distributions",
    )
    teacher_step: int | None = setting(
        None, "teacher: step of the checkpoint to take; None: the final weights, or the newest checkpoint", low=0
    )
    teacher_weight: float = setting(
        0.5, "teacher: weight w of the loss (1 - w) * cross-entropy + w * divergence", above=0.0, high=1.0
    )
    teacher_temperature: float = setting(
        1.0, "teacher: temperature T of the divergence T^2 KL(teacher || model) (2015)", above=0.0
    )

    guided_alignment: float = setting(
        0.0,
        "weight of the cross-entropy between data.links and the cross-attention of decode.alignment_layer and _head "
        '("Guided Alignment Training for Topic-Aware Neural Machine Translation", 2016)',
        low=0.0,
    )
    label_smoothing: float = setting(
        0.0, "probability mass spread evenly over the tokenizer's tokens, or classes", low=0.0, high=1.0
    )
    z_loss: float = setting(0.0, "weight of log(sum of exp(logits))^2 (PaLM, 2022: 1e-4)", low=0.0)
    loss_chunk: int | None = setting(
        None, "positions per row whose logits are in memory at once; None: all", low=1, resumable=SAME_TRAINING
    )

    ema_decay: float | None = setting(
        None, "decay per step of the exponential moving average of the parameters; None: no average", low=0, below=1
    )
    weights: str = setting(
        "last",
        "weights to evaluate on the test split and to save: the weights of the last step, the exponential moving "
        "average, the best checkpoint, or the mean of the last or best checkpoints",
        choices=("last", "ema", "best", "average_last", "average_best"),
        resumable=SAME_TRAINING,
    )
    average: int = setting(5, "average_*: number of checkpoints to average", low=1, resumable=SAME_TRAINING)
    metric: str = setting(
        "loss",
        "validation metric that selects the best checkpoints; many languages: also as chrf:en-de, chrf:to-en, "
        "chrf:from-en or chrf:zero-shot",
    )
    patience: int = setting(
        0, "early stopping: evaluations without improvement; 0 disables it", low=0, resumable=SAME_TRAINING
    )

    log_every: int = setting(50, "steps between two metric records", low=1, resumable=SAME_TRAINING)
    eval_every: int = setting(1000, "steps between two evaluations", low=1, resumable=SAME_TRAINING)
    checkpoint_every: int = setting(1000, "steps between two checkpoints", low=1, resumable=SAME_TRAINING)
    checkpoint_seconds: int = setting(
        0,
        "also save when the newest checkpoint is older than this or missing (checked every log_every steps); 0: never",
        low=0,
        resumable=SAME_TRAINING,
    )
    permanent_every: int = setting(
        0, "checkpoints at multiples of this many steps are never deleted; 0: none", low=0, resumable=SAME_TRAINING
    )
    keep_checkpoints: int = setting(2, "number of newest scheduled checkpoints to keep", low=1, resumable=SAME_TRAINING)
    keep_best: int = setting(
        0, "number of best checkpoints to keep as well, saved at evaluations", low=0, resumable=SAME_TRAINING
    )

    max_skipped_steps: int = setting(
        5, "consecutive non-finite steps to skip before the run stops", low=1, resumable=SAME_TRAINING
    )
    hang_seconds: int = setting(
        1800,
        "seconds after which a hung step ends the run with stack traces, not counting compilation; 0 disables it",
        low=0,
        resumable=SAME_TRAINING,
    )
    log_norms: bool = setting(False, "log the norms of each layer's gradients and parameters", resumable=SAME_TRAINING)
    noise_scale: bool = setting(
        False,
        'log the gradient noise scale ("An Empirical Model of Large-Batch Training", 2018); needs accumulate',
        resumable=SAME_TRAINING,
    )
    report: bool = setting(False, "write the report of the run, report.html, at the end", resumable=SAME_TRAINING)
    wandb: str | None = setting(
        None, "Weights & Biases project that also receives the metrics", resumable=SAME_TRAINING
    )

    def without_lora(self) -> "TrainConfig":
        """Returns the settings of a run whose updates are merged into its kernels."""
        settings = [field for field in dataclasses.fields(self) if field.name.startswith(PREFIXES["lora_rank"])]
        defaults: dict[str, Any] = {field.name: field.default for field in settings}
        return dataclasses.replace(self, **defaults)

    def without_effect(self) -> list[str]:
        unused = super().without_effect()
        if self.ema_decay is not None and self.weights != "ema":
            unused.append(f"train.ema_decay={self.ema_decay} has no effect with train.weights={self.weights!r}")
        if "average" in self.changed_settings() and not self.weights.startswith("average"):
            unused.append(f"train.average={self.average} has no effect with train.weights={self.weights!r}")
        if self.patience and self.patience * self.eval_every >= self.steps:
            evaluations = f"train.eval_every={self.eval_every} and train.steps={self.steps}"
            unused.append(f"train.patience={self.patience} has no effect with {evaluations}")
        if self.label_smoothing and self.teacher and self.teacher_weight == 1:
            unused.append(f"train.label_smoothing={self.label_smoothing} has no effect with train.teacher_weight=1.0")
        return unused

    def check(self) -> None:
        if self.weights == "ema" and self.ema_decay is None:
            raise self.error("weights", "needs train.ema_decay, such as 0.999")
        if self.noise_scale and self.accumulate == 1:
            raise self.error("noise_scale", "compares micro-batches: set train.accumulate to 2 or more")
        if self.weights == "average_last" and self.keep_checkpoints < self.average:
            raise self.error("keep_checkpoints", f"must be at least train.average={self.average}")
        for name in self.changed_settings():
            for switch, prefix in PREFIXES.items():
                if name.startswith(prefix) and not getattr(self, switch):
                    raise self.error(name, f"is used only with train.{switch}; leave it out")
        if self.lora_rank and not (self.lora_kernels or self.lora_whole):
            raise self.error("lora_kernels", "must name parameters to train, such as '*', or train.lora_whole must")
        needed = {"best": 1, "average_best": self.average}.get(self.weights, 0)
        if self.keep_best < needed:
            raise self.error("keep_best", f"must be at least {needed} for train.weights={self.weights!r}")
        every = {"average_last": "checkpoint_every", "average_best": "eval_every"}.get(self.weights)
        if every and (made := -(-self.steps // getattr(self, every))) < self.average:
            raise self.error(
                "average", f"only {made} checkpoints in train.steps={self.steps}: decrease it or train.{every}"
            )


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
