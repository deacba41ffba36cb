"""Translation: pairs of a source and a target."""

from collections.abc import Iterator, Sequence
from typing import Any

from tformer_jax.config import Config, DataConfig
from tformer_jax.tasks.task import NO_MOSES
from tformer_jax.tasks.token_prediction import TokenPrediction


class Translation(TokenPrediction):
    """Predicts a target from its source."""

    family = "seq2seq"
    keys = ("source", "target")
    batchings = ("buckets", "packed")
    metrics = (*TokenPrediction.metrics, "bleu", "chrf", "exact_match")
    verb = "translate"
    verbs = ("translate", "outputs", "score")
    route = "/translate"
    generates = True
    references = "texts"
    label_settings = ("model.max_length",)

    def check_metric(self, cfg: Config) -> None:
        """As `Task.check_metric`; with many languages, a metric may also name a direction or a group of directions."""
        metric, _, group = cfg.train.metric.partition(":")
        if group and not cfg.data.multilingual:
            raise cfg.train.error("metric", f"names a direction, but the data have only one; write {metric!r}")
        allowed = (*self.metrics, *cfg.eval.metrics)
        if group:
            allowed = tuple(f"{name}:{group}" for name in allowed if name not in ("perplexity", "token_accuracy"))
        if cfg.train.metric not in allowed:
            register = "a function of metrics= is only recorded: register it as tformer_jax.config.kinds.METRICS[NAME]"
            raise cfg.train.error("metric", f"must be one of {allowed}; eval.metrics adds others ({register})")

    def check_translation_settings(self, cfg: Config) -> None:
        """Raises `ConfigError` for settings of pairs that do not fit each other."""
        if cfg.data.batching == "packed" and cfg.data.long_documents != "split":
            problem = f"is used only by language models, not {self.named_by(cfg)}; write 'split'"
            raise cfg.data.error("long_documents", problem)
        if cfg.decode.detokenize and "moses" not in cfg.data.normalize and "file" not in cfg.data.tokenizer_kinds:
            raise cfg.decode.error("detokenize", NO_MOSES)
        cfg.decode.check_alignment(cfg.model.decoder_layers, cfg.model.num_heads)
        if bool(cfg.train.guided_alignment) != (cfg.data.links is not None):
            raise cfg.train.error("guided_alignment", "and data.links are used only together: set both, or neither")
        if cfg.data.links is not None:
            self._check_links(cfg.data)

    def _check_links(self, data: DataConfig) -> None:
        unfit = {
            "batching": data.batching != "buckets",
            "long_pairs": data.long_pairs != "drop",
            "transforms": bool(data.transforms),
            "directions": data.multilingual,
        }
        for name, problem in unfit.items():
            if problem:
                raise data.error(name, "does not keep the words of data.links in their places: leave it out")

    def without_effect(self, cfg: Config) -> Iterator[str]:
        """Says which language decides where the data does not name one, and the setting has its default."""
        unnamed = cfg.data.source in ("tsv", "jsonl", "parquet") and not cfg.data.multilingual
        users = ["BLEU"] if cfg.eval.bleu_tokenize is None else []
        users += ["Moses' rules"] if {"moses", "punctuation"} & {*cfg.data.normalize} else []
        if unnamed and users and "target_language" not in cfg.data.changed_settings():
            yield (
                f"data.target_language={cfg.data.target_language!r} decides for {' and '.join(users)}: "
                "change it if the targets are in another language"
            )

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns evaluators of the likelihood of references, and of translations."""
        from tformer_jax.tasks.evaluators.evaluation import Segment
        from tformer_jax.tasks.evaluators.perplexity import PerplexityEvaluator
        from tformer_jax.tasks.evaluators.translation import TranslationEvaluator

        segments = [Segment.from_example(example) for example in parts.examples[:]]  # texts are read once
        trained = tuple(parts.corpus.directions or ())
        return [
            PerplexityEvaluator(parts.likelihood, [segment.direction for segment in segments], trained),
            TranslationEvaluator(parts.cfg, parts.model, parts.tokenizers, segments, trained, scored=parts.scored),
        ]

    def check_installed(self, cfg: Config) -> None:
        """Raises `UserError` if a metric needs a package or file that is missing."""
        from tformer_jax.tasks.evaluators.scores import text_metrics

        text_metrics(cfg, cfg.data.target_language)


TRANSLATION = Translation()
