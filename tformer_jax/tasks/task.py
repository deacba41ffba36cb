"""What a task states of itself; `kinds.TASKS` names the tasks, and `config.task` finds them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from tformer_jax.config import kinds
from tformer_jax.config.fields import ConfigError

Config = Any
"""A `config.schema.Config`, whose module imports this one for type checkers."""

TUPLES = ("objectives", "keys", "batchings", "metrics", "verbs", "label_settings")
"""Attributes of a task that are tuples of texts."""
NO_MOSES = "needs outputs in tokens of Moses, which translation with data.normalize=('moses',) writes"
"""What is wrong with `decode.detokenize` where outputs are no such tokens."""


class Task:
    """What a model is trained for: its data, metrics, evaluators and the verb that uses the trained model.

    Configs are validated without JAX, so the module of a task imports it only within methods.
    """

    family: ClassVar[str]
    """Model family, a key of `kinds.FAMILIES`."""
    objectives: ClassVar[tuple[str | None, ...]] = (None,)
    """Values of `data.objective`."""
    keys: ClassVar[tuple[str, ...]] = ("text",)
    """Keys of an example: ("text",) for documents, ("source", "target") for pairs, ("text", "label"), or ("messages",)
    for conversations."""
    batchings: ClassVar[tuple[str, ...]] = ("windows",)
    """Values of `data.batching`."""
    metrics: ClassVar[tuple[str, ...]]
    """Values of `train.metric`."""
    verb: ClassVar[str | None] = None
    """Method of `Run` and command that use a trained model."""
    verbs: ClassVar[tuple[str, ...]] = ()
    """Methods of `Run` that the task supports, besides the methods that every model has."""
    route: ClassVar[str] = "/v1/embeddings"
    """Main route of the server."""
    generates: ClassVar[bool] = False
    """Whether `decode` settings have an effect on training's evaluations and on the verb."""
    references: ClassVar[str | None] = None
    """What outputs are compared with: "texts", "labels" or None."""
    label_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that determine which of the held-out tokens are labels; see `comparable`."""

    @property
    def documents(self) -> bool:
        """Whether examples are texts that rows may split and join."""
        return self.keys == ("text",)

    @property
    def pairs(self) -> bool:
        """Whether examples are pairs of a source and a target."""
        return "source" in self.keys

    @property
    def sources(self) -> tuple[str, ...]:
        """Values of `data.source` that may have examples with these keys."""
        return tuple(filter(self.reads, kinds.CORPORA))

    def reads(self, source: str) -> bool:
        """Returns whether a value of `data.source` may have examples with these keys."""
        kind = kinds.load(kinds.CORPORA, source)
        if self.keys == ("messages",):
            return bool(kind.reads_chats)
        return kind.examples is None or self.keys in kind.examples

    @classmethod
    def trains(cls, family: str) -> bool:
        """Returns whether models of this family are trained for the task."""
        return getattr(cls, "family", None) == family

    def check_declared(self, name: str) -> None:
        """Raises `ConfigError` if a task, registered by this name, lacks an attribute or has one of another type."""
        own = type(self)
        for attribute in ("family", "metrics"):
            if not hasattr(self, attribute):
                raise ConfigError(f"task={name!r}: {own.__name__} has no {attribute}: set it in the class")
        for attribute in TUPLES:
            value = getattr(self, attribute)
            if not isinstance(value, tuple):
                instead = f"write a tuple, such as {attribute} = {_as_tuple(value)}"
                raise ConfigError(f"task={name!r}: {own.__name__} has {attribute} = {value!r}: {instead}")
        if own.evaluators is Task.evaluators:
            instead = "write it, or derive the class from TokenPrediction"
            raise ConfigError(f"task={name!r}: {own.__name__} has no method evaluators(parts): {instead}")

    def named_by(self, cfg: Config) -> str:
        """Returns the setting that selects the task, for messages."""
        if cfg.task:
            return f"task={cfg.task!r}"
        return f"data.objective={cfg.data.objective!r}" if cfg.data.objective else f"model.family={cfg.model.family!r}"

    def check_fit(self, cfg: Config) -> None:
        """Raises `ConfigError` for settings that do not fit the task."""
        by = self.named_by(cfg)
        if not self.trains(cfg.model.family):
            raise cfg.model.error("family", f"must be {self.family!r} for {by}")
        if cfg.data.objective not in self.objectives:
            raise cfg.data.error("objective", f"must be one of {self.objectives} for {by}")
        if cfg.data.batching not in self.batchings:
            raise cfg.data.error("batching", f"must be one of {self.batchings} for {by}")
        if not self.reads(cfg.data.source):
            raise cfg.data.error("source", f"does not fit {by}; write one of {self.sources}")
        if cfg.data.multilingual and not self.pairs:
            raise cfg.data.error("directions", f"and language_fields must be () for {by}, which has no pairs")
        for transform in cfg.data.transforms:
            if self.keys not in transform.examples:
                raise transform.error("kind", f"cannot change examples of {', '.join(self.keys)}, which {by} has")
        self.check_metric(cfg)
        if cfg.decode.unknown == "copy" and not self.pairs:
            raise cfg.decode.error("unknown", f"must be 'show' or 'omit' for {by}, which has no source")
        for name, default in (("alignments", False), ("markup", "keep"), ("casing", "keep")):
            if getattr(cfg.decode, name) != default and not self.pairs:
                raise cfg.decode.error(name, f"must be {default!r} for {by}, which has no source")
        self.check_translation_settings(cfg)

    def check_metric(self, cfg: Config) -> None:
        """Raises `ConfigError` if evaluations do not have `train.metric`."""
        if cfg.train.metric not in self.metrics:
            own = "; functions of metrics= are only recorded: compare them in run.history" if self.references else ""
            raise cfg.train.error("metric", f"must be one of {self.metrics} for {self.named_by(cfg)}{own}")

    def check_translation_settings(self, cfg: Config) -> None:
        """Raises `ConfigError` for settings that only translation uses."""
        by = self.named_by(cfg)
        for name in () if self.pairs else ("source_tokenizer", "target_tokenizer"):
            if getattr(cfg.data, name) is not None:
                raise cfg.data.error(name, f"must be None for {by}: set data.tokenizer")
        if cfg.data.batching == "packed" and cfg.data.source_window is not None:
            raise cfg.data.error("source_window", f"must be None for {by}: set data.window")
        if cfg.data.chat_template is not None and self.keys != ("messages",):
            raise cfg.data.error("chat_template", f"must be None for {by}: only task='chat' reads conversations")
        if cfg.data.placeholders:
            raise cfg.data.error("placeholders", f"must be () for {by}: only translations copy from a source")
        if cfg.train.guided_alignment:
            raise cfg.train.error("guided_alignment", f"must be 0.0 for {by}, which has no source")
        if cfg.eval.bleu_tokenize is not None:
            raise cfg.eval.error("bleu_tokenize", f"must be None for {by}, which has no BLEU")
        if cfg.eval.metrics:
            raise cfg.eval.error("metrics", f"must be () for {by}, which has no translation metrics")
        if cfg.eval.references != "raw":
            raise cfg.eval.error("references", f"must be 'raw' for {by}, which has no translation metrics")
        if cfg.decode.split_sentences:
            raise cfg.decode.error("split_sentences", f"must be False for {by}: only texts to translate are split")
        if cfg.decode.detokenize:
            raise cfg.decode.error("detokenize", NO_MOSES)

    def without_effect(self, cfg: Config) -> Iterator[str]:
        """Yields a sentence for each setting of data and generation that has no effect, or an unwanted one."""
        if not self.pairs:
            used = {"long_pairs"} if self.keys == ("messages",) else set()
            used |= {"source_language"} if cfg.data.normalize else set()
            for name in ("long_pairs", "shared_vocab", "source_language", "target_language"):
                if name in cfg.data.changed_settings() and name not in used:
                    yield f"data.{name}={getattr(cfg.data, name)!r} has no effect without translation"
            filters = cfg.data.filters
            for name in ("identical_sides", "max_length_ratio"):
                if name in filters.changed_settings():
                    yield f"data.filters.{name}={getattr(filters, name)!r} has no effect without translation"
        if not self.generates:
            by = self.named_by(cfg)
            for name in cfg.decode.changed_settings():
                yield f"decode.{name}={getattr(cfg.decode, name)!r} has no effect with {by}"
            if cfg.data.objective and "samples" in cfg.eval.changed_settings():
                yield f"eval.samples={cfg.eval.samples} has no effect with {by}"

    def features(self, block: Any) -> Any:
        """Returns the batch keys and columns of this task.

        See `data.features.FeatureConverter`; loader processes call it.

        Args:
            block: the batch keys and columns of pairs, documents or labeled texts.
        """
        return block

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns the evaluators of a split; `parts` is a `tasks.evaluators.split.Parts`."""
        raise NotImplementedError

    def check_installed(self, cfg: Config) -> None:
        """Raises `UserError` if a metric needs a package that is not installed."""


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
