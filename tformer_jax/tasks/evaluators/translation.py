"""Evaluation of translations."""

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.config.metrics import References
from tformer_jax.data.corpora.corpus import PAIRS
from tformer_jax.data.tokenizers import Tokenizers, normalizer, signature
from tformer_jax.data.tokenizers.normalization import MOSES, steps_of
from tformer_jax.data.tokenizers.tokens import unknown_per_word
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.outputs import Output, OutputCounts
from tformer_jax.inference.requests import directed_request
from tformer_jax.inference.text import Translator
from tformer_jax.tasks.evaluators.directions import by_direction, evaluate_directions
from tformer_jax.tasks.evaluators.evaluation import TOKENIZED, Evaluation, Sample, Segment
from tformer_jax.tasks.evaluators.scores import Row, measure_texts, score_rows, target_language, text_metrics


class TranslationEvaluator:
    """Translates each source and compares the output with its references.

    Args:
        trained: the directions of the training examples; () if they have none.
        scored: compute the model's score of each output, also where decoding does not need it, and store all scores.
    """

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        tokenizers: Tokenizers,
        segments: Sequence[Segment],
        trained: Collection[str] = (),
        *,
        scored: bool = False,
    ):
        self._cfg, self._trained, self._scored = cfg, trained, scored
        self._unknown = unknown_per_word(tokenizers.target) > 0
        self._steps = _reference_steps(cfg)
        self._tokenized = MOSES in tokenizers.target.steps and not cfg.decode.detokenize
        directions = by_direction([segment.direction for segment in segments])
        self._languages = [target_language(cfg, segment.direction) for segment in segments]
        languages = dict.fromkeys(self._languages)
        spoken = _languages(cfg, [*trained, *filter(None, directions)])
        self._metrics = {language: text_metrics(cfg, language, spoken) for language in languages}
        normalizers = {language: normalizer(self._steps, language) for language in languages}
        self._segments = [
            segment._replace(references=tuple(map(normalizers[language], segment.references)))
            for segment, language in zip(segments, self._languages, strict=True)
        ]
        self._warn(directions)
        self._translate = Translator(cfg, model, tokenizers)

    def _warn(self, directions: Mapping[str | None, Sequence[int]]) -> None:
        """Warns if outputs are tokens and references are not, or if a metric does not fit the references."""
        if self._tokenized and self._cfg.eval.references == "raw":
            logging.getLogger(__name__).warning(
                "outputs are tokens of Moses, but references are not, which lowers BLEU: set decode.detokenize=True, "
                "or eval.references='normalized' and eval.bleu_tokenize='none' for tokenized BLEU"
            )
        for direction, places in directions.items():
            references = [text for place in places for text in self._segments[place].references]
            for metric in self._metrics[target_language(self._cfg, direction)].values():
                if problem := metric.problem(references):
                    logging.getLogger(__name__).warning(problem)

    def __call__(self, params: Any) -> Evaluation:
        """Returns `bleu`, `chrf`, `exact_match` and the metrics of `eval.metrics`, with all translations.

        If the target's tokenizer has unknown tokens, `unknown_outputs` is the percentage of outputs with one. With
        `data.placeholders`, `placeholders_kept` is the percentage of outputs with exactly the placeholders of their
        source. Signatures name tokenized texts. Segments with directions have the metrics of `evaluate_directions`.
        """
        requests = [directed_request(segment.source, segment.direction) for segment in self._segments]
        long_texts = LongTexts("truncate")
        outputs = self._translate.outputs(params, requests, scores=self._scored, long_texts=long_texts)
        directions = [segment.direction for segment in self._segments]
        rows = self._measure(outputs)
        counts_unknown = self._unknown or any(output.unknown for output in outputs)

        def evaluate(direction: str | None, places: Sequence[int]) -> Evaluation:
            chosen = [outputs[place] for place in places], [rows[place] for place in places]
            references = [self._segments[place].references for place in places]
            language = target_language(self._cfg, direction)
            return self._evaluate(*chosen, references, language, unknown=counts_unknown)

        evaluation = evaluate_directions(directions, self._trained, evaluate)
        samples = [
            Sample(
                segment.source,
                segment.references[0],
                output.text,
                score=output.score,
                finish_reason=output.finish_reason,
                more_references=segment.references[1:],
                direction=segment.direction,
                document=segment.document,
                metrics=self._scores(row, language),
            )
            for segment, language, output, row in zip(self._segments, self._languages, outputs, rows, strict=True)
        ]
        return dataclasses.replace(
            evaluation,
            outputs=samples,
            signatures=evaluation.signatures | {"references": signature(self._steps)},
            remarks=(*self._output_remarks(outputs, long_texts), *self._metric_remarks),
        )

    def _output_remarks(self, outputs: Sequence[Output], long_texts: LongTexts) -> Iterator[str]:
        """Yields what metrics do not say of sources and outputs that are incomplete, or not as requested."""
        yield from long_texts.remarks(len(outputs), "sources", self._cfg.model.max_length)
        counts = OutputCounts.count_outputs(outputs)
        counts.unknown = 0
        if self._translate.tokenizers.placeholders:
            counts.other_placeholders = 0
        yield from counts.describe(self._translate.cfg, len(outputs))

    @functools.cached_property
    def _metric_remarks(self) -> tuple[str, ...]:
        """What the metrics say of the references, which do not change."""
        first = (segment.references[0] for segment in self._segments)
        references = list(zip(self._languages, first, strict=True))
        metrics = next(iter(self._metrics.values()), {})
        return tuple(remark for metric in metrics.values() for remark in metric.remarks(references))

    def _measure(self, outputs: Sequence[Output]) -> list[Row]:
        sources = [segment.source for segment in self._segments]
        texts, references = [output.text for output in outputs], [segment.references for segment in self._segments]
        return measure_texts(self._metrics, self._languages, sources, texts, references)

    def _scores(self, row: Row, language: str) -> dict[str, float]:
        """Returns the scores of one output that are stored."""
        metrics = {name: self._metrics[language][name] for name in row}
        return {
            name: metric.score_alone(row[name]) for name, metric in metrics.items() if metric.stored or self._scored
        }

    def _evaluate(
        self, outputs: Sequence[Output], rows: Sequence[Row], references: References, language: str, *, unknown: bool
    ) -> Evaluation:
        scored = score_rows(rows, self._metrics[language], references)
        metrics, signatures = scored.metrics, scored.signatures
        if self._tokenized:
            signatures = {name: f"{text}|{TOKENIZED}" for name, text in signatures.items()}
        if unknown:
            count = sum(output.unknown > 0 for output in outputs)
            metrics = metrics | {"unknown_outputs": 100 * count / len(outputs)}
        if self._translate.tokenizers.placeholders:
            exact = sum(output.placeholders_kept is not False for output in outputs)
            metrics = metrics | {"placeholders_kept": 100 * exact / len(outputs)}
        return Evaluation(metrics, signatures=signatures)


def _languages(cfg: Config, directions: Collection[str]) -> list[str]:
    """Returns the languages of the directions, or of the settings if there are no directions."""
    if not directions:
        return [cfg.data.source_language, cfg.data.target_language]
    return [language for name in directions for language in Direction.parse(name)]


def _reference_steps(cfg: Config) -> tuple[str, ...]:
    """Returns the steps that normalize references: not `moses` if outputs are detokenized."""
    undone = (MOSES,) if cfg.decode.detokenize else ()
    steps = steps_of(cfg.data, PAIRS) if cfg.eval.references == "normalized" else ()
    return tuple(step for step in steps if step not in undone)
