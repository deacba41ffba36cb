"""Evaluation of translations."""

import collections
import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.data.tokenizers import Tokenizers, normalizer, signature
from tformer_jax.data.tokenizers.normalization import MOSES
from tformer_jax.data.tokenizers.tokens import unknown_per_word
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.inference.outputs import Output, count_limits, describe_limits
from tformer_jax.inference.requests import directed_request
from tformer_jax.inference.text import Translator
from tformer_jax.tasks.evaluators.bleu import unsplit
from tformer_jax.tasks.evaluators.directions import by_direction, evaluate_directions
from tformer_jax.tasks.evaluators.evaluation import TOKENIZED, Evaluation, Sample, Segment
from tformer_jax.tasks.evaluators.off_target import LanguageIdentifier, off_target_percentage
from tformer_jax.tasks.evaluators.scores import score_texts, target_language, text_metrics


class TranslationEvaluator:
    """Translates each source and compares the output with its references.

    Args:
        trained: the directions of the training examples; () if they have none.
        scored: compute the model's score of each output, also where decoding does not need it.
    """

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        tokenizers: Tokenizers,
        segments: Sequence[Segment],
        *,
        trained: Collection[str] = (),
        scored: bool = False,
    ):
        self._cfg, self._trained, self._scored = cfg, trained, scored
        self._unknown = unknown_per_word(tokenizers.target) > 0
        self._steps = _reference_steps(cfg)
        self._tokenized = MOSES in tokenizers.target.steps and not cfg.decode.detokenize
        directions = by_direction([segment.direction for segment in segments])
        languages = dict.fromkeys(target_language(cfg, direction) for direction in directions)
        self._metrics = {language: text_metrics(cfg, language) for language in languages}
        normalizers = {language: normalizer(self._steps, language) for language in languages}
        self._segments = [
            segment._replace(references=tuple(map(normalizers[language], segment.references)))
            for segment in segments
            for language in [target_language(cfg, segment.direction)]
        ]
        self._warn(directions)
        self._identifier = None
        if "off_target" in cfg.eval.metrics:
            self._identifier = LanguageIdentifier(_languages(cfg, [*trained, *filter(None, directions)]))
        self._translate = Translator(cfg, model, tokenizers)

    def _warn(self, directions: Mapping[str | None, Sequence[int]]) -> None:
        """Warns if BLEU compares tokens with texts, or texts whose words its tokenizer does not split."""
        if self._tokenized and self._cfg.eval.references == "raw":
            logging.getLogger(__name__).warning(
                "outputs are tokens of Moses, but references are not, which lowers BLEU: set decode.detokenize=True, "
                "or eval.references='normalized' and eval.bleu_tokenize='none' for tokenized BLEU"
            )
        for direction, places in directions.items():
            references = [text for place in places for text in self._segments[place].references]
            language = target_language(self._cfg, direction)
            used = self._metrics[language]["bleu"].tokenizer.signature()
            if better := unsplit(references, used):
                logging.getLogger(__name__).warning(
                    "BLEU's tokenizer %s does not split the words of most references; set eval.bleu_tokenize=%r, or "
                    "data.target_language (now %r)",
                    *(used, better, language),
                )

    def __call__(self, params: Any) -> Evaluation:
        """Returns `bleu`, `chrf`, `exact_match` and those of `eval.metrics`, with all translations.

        Also `unknown_outputs`, the share of outputs with an unknown token, if the target's tokenizer has such tokens,
        and `placeholders_kept` with `data.placeholders`: the share of outputs with exactly those of their source.
        Signatures name tokenized texts. Segments with directions have the metrics of `evaluate_directions`.
        """
        requests = [directed_request(segment.source, segment.direction) for segment in self._segments]
        outputs = self._translate.outputs(params, requests, scores=self._scored, long_texts=LongTexts("truncate"))
        directions = [segment.direction for segment in self._segments]
        counts_unknown = self._unknown or any(output.unknown for output in outputs)

        def evaluate(direction: str | None, places: Sequence[int]) -> Evaluation:
            chosen = [self._segments[place] for place in places], [outputs[place] for place in places]
            return self._evaluate(*chosen, target_language(self._cfg, direction), counts_unknown=counts_unknown)

        found = evaluate_directions(directions, self._trained, evaluate)
        limits = describe_limits(count_limits(outputs), self._translate.cfg, len(outputs))
        samples = [
            Sample(
                segment.source,
                segment.references[0],
                output.text,
                output.score,
                output.finish_reason,
                segment.references[1:],
                segment.direction,
                segment.document,
            )
            for segment, output in zip(self._segments, outputs, strict=True)
        ]
        return dataclasses.replace(
            found,
            outputs=samples,
            signatures=found.signatures | {"references": signature(self._steps)},
            remarks=(*limits, *self._identifier_remarks),
        )

    @functools.cached_property
    def _identifier_remarks(self) -> tuple[str, ...]:
        """Sentences about the languages and the errors of the identifier of languages."""
        if self._identifier is None:
            return ()
        left_out, by_language = self._identifier.unknown, collections.defaultdict(list)
        remarks = [f"off_target leaves out languages that lingua does not know: {left_out}"] if left_out else []
        for segment in self._segments:
            by_language[target_language(self._cfg, segment.direction)].append(segment.references[0])
        known = {language: texts for language, texts in by_language.items() if self._identifier.knows(language)}
        if total := sum(map(len, known.values())):
            wrong = sum(
                len(texts) * off_target_percentage(self._identifier.identify(texts), language)
                for language, texts in known.items()
            )
            remarks.append(f"of the references themselves, {wrong / total:.3g} % are off-target for lingua")
        return tuple(remarks)

    def _evaluate(
        self, segments: Sequence[Segment], outputs: Sequence[Output], language: str, *, counts_unknown: bool
    ) -> Evaluation:
        """Returns the metrics of outputs in one language."""
        texts = [output.text for output in outputs]
        found = score_texts(texts, [segment.references for segment in segments], self._metrics[language])
        metrics, signatures = found.metrics, found.signatures
        if self._tokenized:
            signatures = {name: f"{text}|{TOKENIZED}" for name, text in signatures.items()}
        if counts_unknown:
            unknown = sum(output.unknown > 0 for output in outputs)
            metrics = metrics | {"unknown_outputs": 100 * unknown / len(outputs)}
        if self._translate.tokenizers.placeholders:
            exact = sum(output.placeholders_kept is not False for output in outputs)
            metrics = metrics | {"placeholders_kept": 100 * exact / len(outputs)}
        if self._identifier and self._identifier.knows(language):
            identified = self._identifier.identify(texts)
            metrics = metrics | {"off_target": off_target_percentage(identified, language)}
            signatures = signatures | {"off_target": self._identifier.signature}
        return Evaluation(metrics, signatures=signatures)


def _languages(cfg: Config, directions: Collection[str]) -> list[str]:
    """Returns the languages of the directions; those of the settings if there are no directions."""
    if not directions:
        return [cfg.data.source_language, cfg.data.target_language]
    return [language for name in directions for language in Direction.parse(name)]


def _reference_steps(cfg: Config) -> tuple[str, ...]:
    """Returns the steps that normalize references: not `moses` if outputs are detokenized."""
    undone = (MOSES,) if cfg.decode.detokenize else ()
    steps = cfg.data.normalize if cfg.eval.references == "normalized" else ()
    return tuple(step for step in steps if step not in undone)
