"""What a corpus holds by split: examples, tokens, lengths, unknown tokens, duplicates and examples of other splits."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_jax.base.numbers import counted, two_digits
from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.corpora.corpus import Endless, affordable, spread
from tformer_jax.data.corpora.example import NO_TEXT, cleaned, is_blank_side, length_ratio
from tformer_jax.data.features import IdReader, evaluation_converter, feature_converter
from tformer_jax.data.rows import id_reader
from tformer_jax.data.tokenizers import Tokenizers, normalizer
from tformer_jax.data.transforms import build_formats, build_transforms

if TYPE_CHECKING:
    from tformer_jax.data.mixtures import Shares
    from tformer_jax.data.transforms.base import Transforms

TOKENIZED_BY_LANGUAGE = 300
"""Maximum number of examples of a direction whose tokens are counted, evenly spread."""


@dataclasses.dataclass
class LanguageSummary:
    """The training texts in one language, as sources and as targets; all fields but `texts` count only texts read."""

    texts: int = 0
    read: int = 0
    characters: int = 0
    tokens: int = 0
    tokens_per_character: float = 0.0
    unknown: int = 0
    """Number of unknown tokens."""


def summarize_languages(corpus: Corpus, tokenizers: Tokenizers) -> dict[str, LanguageSummary]:
    """Summarizes the training texts of each language; {} if examples have no directions."""
    summaries: dict[str, LanguageSummary] = {}
    sizes = corpus.directions or {}
    reader = id_reader(corpus.train, tokenizers, corpus.labels)
    for first, (direction, size) in zip(itertools.accumulate(sizes.values(), initial=0), sizes.items(), strict=False):
        chosen = [first + index for index in spread(size, TOKENIZED_BY_LANGUAGE)]
        block, examples = reader.read(chosen), [corpus.train[index] for index in chosen]
        for key, language in zip(("source", "target"), Direction.parse(direction), strict=True):
            special = (tokenizers.source if key == "source" else tokenizers.target).special
            summary = summaries.setdefault(language, LanguageSummary())
            summary.texts += size
            summary.read += len(chosen)
            summary.characters += sum(len(example[key]) for example in examples)
            summary.tokens += len(block[key].ids)
            summary.unknown += special.count_unknown(block[key].ids.tolist())
    for summary in summaries.values():
        summary.tokens_per_character = summary.tokens / max(summary.characters, 1)
    return dict(sorted(summaries.items()))


def language_lines(summaries: dict[str, LanguageSummary]) -> Iterator[str]:
    """Yields a table of the languages."""
    if summaries:
        yield f"  {'language':8}{'texts':>12}{'tokens/text':>13}{'tokens/character':>18}{'unknown':>10}"
    for language, summary in summaries.items():
        yield (
            f"  {language:8}{summary.texts:12,}{summary.tokens / max(summary.read, 1):13.1f}"
            f"{summary.tokens_per_character:18.2f}{100 * summary.unknown / max(summary.tokens, 1):8.2g} %"
        )


SPLITS = ("train", "validation", "test")
TOKENIZED = 10_000
"""Maximum number of examples of a split whose tokens are counted."""
COMPARED_AFTER = ("nfkc", "lowercase")
"""Steps of `data.normalize` after which texts of two splits are compared: those that take little time."""
COMPARED = 200_000
"""Maximum number of training examples among which duplicates and held-out examples are looked for."""
GENERATED = 1_000
"""Number of examples of an endless split that are read."""
TRACED = 1_000
"""Maximum number of examples on which transforms are tried."""
BLOCK = 1024
LARGE_RATIO = 9.0
"""Sides whose numbers of characters differ by more than this factor are probably misaligned."""


@dataclasses.dataclass
class Side:
    """The texts of one side of the examples that were read."""

    tokens: int = 0
    longest: int = 0
    """Number of tokens of the longest text."""
    too_long: int = 0
    """Number of texts that do not fit their row."""
    tokens_beyond: int = 0
    """Number of their tokens that do not fit."""
    limit: int | None = None
    """Maximum number of tokens of a text in a row; None: texts are split, not truncated."""
    unknown: int = 0
    """Number of unknown tokens."""
    blank: int = 0
    """Number of texts without a visible character."""


@dataclasses.dataclass
class SplitSummary:
    """Statistics of one split; all but `examples` are of the examples that were read."""

    examples: int | None
    """None: endless."""
    read: int
    """Number of examples whose tokens were counted, evenly spread."""
    sides: dict[str, Side]
    long: int = 0
    """Number of examples with a side that is too long."""
    compared: int = 0
    """Number of examples that were compared with each other and with training examples."""
    share_of_training: float = 1.0
    """Share of the training examples that held-out ones were compared with."""
    duplicates: int = 0
    """Number of examples that occurred before."""
    in_training: int = 0
    """Number of held-out examples that are among these training examples, too, pairs of languages in any direction."""
    known_sources: int = 0
    """Number of other held-out pairs whose source is among them."""
    contradictory: int = 0
    """Number of examples whose text occurred before, or in the training split, with another label."""
    identical_sides: int = 0
    large_ratio: int = 0
    """Number of pairs with a side of more than `LARGE_RATIO` times the characters of the other."""
    quoted: int = 0
    """Number of examples with texts in double quotes, as files of CSV have them."""
    length_ratio: float | None = None
    """Mean number of target tokens for a source token."""
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of malformed lines and of examples that filters dropped, by reason."""
    parts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each entry of a mixture, or direction: its size, shares of the training examples and tokens, and epochs."""
    stages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each stage: its text, the steps after which it probably begins and ends, and the shares of each source there.

    The end is None for a stage after the end of training.
    """
    languages: dict[str, LanguageSummary] = dataclasses.field(default_factory=dict)
    """Training texts by language, of examples with directions."""
    answer_tokens: int = 0
    """Number of tokens of conversations that the assistant writes."""
    unanswered: int = 0
    """Number of conversations without such a token in their row."""
    transforms: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    """Name of each transform, and the share of the examples that it changes in the first epoch."""
    unmatched_placeholders: int = 0
    """Number of placeholders of targets that stay text, because their sources lack them."""


def summarize(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> dict[str, SplitSummary]:
    """Summarizes each split; a test split that is the validation split has no summary of its own."""
    summaries: dict[str, SplitSummary] = {}
    trained = SeenExamples()
    transforms = build_transforms(cfg, corpus, tokenizers)
    for split in SPLITS:
        examples = getattr(corpus, split)
        if split == "test" and examples is corpus.validation:
            continue
        training = split == "train"
        changes = transforms if training else build_formats(cfg)
        reader = id_reader(examples, tokenizers, corpus.labels, changes)
        summary = summaries[split] = _of_tokens(cfg, examples, reader, tokenizers, training=training)
        _compare(cfg, summary, examples, trained, training=training)
        summary.left_out = dict(corpus.left_out.get(split, {}))
    if cfg.data.stages:
        from tformer_jax.data.stages import summarize_stages

        summaries["train"].stages, measured = summarize_stages(cfg, corpus, tokenizers)
        summaries["train"].parts = _parts(cfg, corpus, measured)
    elif corpus.directions or len(corpus.sizes) > 1:
        from tformer_jax.data.mixtures import shares

        summaries["train"].parts = _parts(cfg, corpus, shares(cfg, corpus, tokenizers))
    if transforms is not None:
        summaries["train"].transforms = _changed_shares(cfg, corpus.train, transforms)
    summaries["train"].languages = summarize_languages(corpus, tokenizers)
    return summaries


def _parts(cfg: Config, corpus: Corpus, measured: "Shares") -> list[dict[str, Any]]:
    names = list(corpus.directions or cfg.data.train)
    return [
        {"name": name, "size": size, "examples": float(row[0]), "tokens": float(row[1]), "epochs": float(row[2])}
        for name, size, row in zip(names, corpus.sizes, np.transpose(measured), strict=False)
    ]


def _of_tokens(
    cfg: Config, examples: Sequence[Example], reader: IdReader, tokenizers: Tokenizers, *, training: bool
) -> SplitSummary:
    chosen = range(GENERATED) if isinstance(examples, Endless) else affordable(examples, TOKENIZED)
    converter = None
    if cfg.data.batching != "windows":
        converter = (feature_converter if training else evaluation_converter)(cfg, tokenizers)
    summary = SplitSummary(None if isinstance(examples, Endless) else len(examples), len(chosen), {})
    for start in range(0, len(chosen), BLOCK):
        block = reader.read(chosen[start : start + BLOCK])
        lengths = {key: column.lengths for key, column in block.items() if key not in NO_TEXT}
        if "answers" in block:
            summary.answer_tokens += int(block["answers"].ids.sum())
        limits = converter.limits(block) if converter else {}
        if "messages" in limits:
            summary.unanswered += sum(not row.any() for row in block["answers"].truncate(limits["messages"]).rows())
        for key, sizes in lengths.items():
            side = summary.sides.setdefault(key, Side(limit=limits.get(key)))
            tokenizer = tokenizers.source if key == "source" else tokenizers.target
            side.tokens += int(sizes.sum())
            side.longest = max(side.longest, int(sizes.max(initial=0)))
            beyond = np.maximum(sizes - limits[key], 0) if key in limits else np.zeros_like(sizes)
            side.too_long += int((beyond > 0).sum())
            side.tokens_beyond += int(beyond.sum())
            if tokenizer.special.unknown is not None:
                side.unknown += int((block[key].ids == tokenizer.special.unknown).sum())
        if (placeholders := tokenizers.placeholders) and "source" in block:
            from tformer_jax.data.placeholders import count_unmatched

            pairs = (examples[index] for index in chosen[start : start + BLOCK])
            summary.unmatched_placeholders += sum(
                count_unmatched(placeholders, pair["source"], pair["target"]) for pair in pairs
            )
        long = [lengths[key] > limit for key, limit in limits.items()]
        summary.long += int(np.any(long, axis=0).sum()) if long else 0
    if "source" in summary.sides:
        summary.length_ratio = summary.sides["target"].tokens / max(summary.sides["source"].tokens, 1)
    return summary


@dataclasses.dataclass
class SeenExamples:
    """The examples of a split that were compared."""

    examples: set[int] = dataclasses.field(default_factory=set)
    """Their hashes."""
    share: float = 1.0
    """Share of the examples of the split."""
    inputs: dict[int, str] = dataclasses.field(default_factory=dict)
    """By the hash of the input: the first label of a text; "" for a source of a direction."""


def _compare(
    cfg: Config, summary: SplitSummary, examples: Sequence[Example], trained: SeenExamples, *, training: bool
) -> None:
    """Counts duplicates, held-out examples of the training split, blank texts and what looks misaligned.

    What `data.filters` would drop is compared as these filters do, other texts also after `COMPARED_AFTER`.
    """
    if isinstance(examples, Endless):
        return
    seen = trained if training else SeenExamples()
    chosen = spread(len(examples), COMPARED)
    summary.compared, seen.share = len(chosen), len(chosen) / max(len(examples), 1)
    summary.share_of_training = trained.share
    steps = [step for step in cfg.data.normalize if step in COMPARED_AFTER]
    normalize = normalizer(steps, "") if steps else None
    earlier: set[int] = set()
    for index in chosen:
        example = examples[index]
        filtered = cleaned(cfg.data, example)
        repeated, read = _hash_of(filtered), filtered
        if normalize is not None:
            read = {key: text if key in NO_TEXT else normalize(text) for key, text in filtered.items()}
        whole = _hash_by_language(read) if "direction" in read else _hash_of(read)
        summary.duplicates += repeated in earlier
        earlier.add(repeated)
        summary.in_training += not training and whole in trained.examples
        seen.examples.add(whole)
        summary.quoted += _is_quoted([text for key, text in example.items() if key not in NO_TEXT])
        for key, side in summary.sides.items():
            side.blank += is_blank_side(key, example[key])
        if "label" in example:
            text, label = hash(read["text"]), example["label"]
            others = {seen.inputs.setdefault(text, label), trained.inputs.get(text, label)} - {label}
            summary.contradictory += bool(others)
        if "source" in example:
            text = hash((read["source"], read.get("direction")))
            known = not training and text in trained.inputs
            summary.known_sources += known and whole not in trained.examples
            seen.inputs[text] = ""
            summary.identical_sides += filtered["source"] == filtered["target"]
            summary.large_ratio += length_ratio(filtered) > LARGE_RATIO


def _hash_of(example: Example) -> int:
    return hash(tuple(item for item in example.items() if item[0] != "links"))


def _hash_by_language(pair: Example) -> int:
    """Returns a hash that a pair has in either direction."""
    return hash(frozenset(zip(Direction.parse(pair["direction"]), (pair["source"], pair["target"]), strict=True)))


def _changed_shares(cfg: Config, examples: Sequence[Example], transforms: "Transforms") -> list[tuple[str, float]]:
    """Returns the name of each transform and the share of examples it changes; for ids, its probability."""
    chosen = range(TRACED) if isinstance(examples, Endless) else spread(len(examples), TRACED)
    traces = [transforms.trace(examples[index], index) for index in chosen]
    names = [transform.kind for transform in cfg.data.transforms if not transform.on_ids]
    changes = ([before != after for before, after in itertools.pairwise(trace)] for trace in traces)
    on_ids = [(transform.kind, transform.probability) for transform in cfg.data.transforms if transform.on_ids]
    return [*zip(names, np.mean(list(changes), axis=0).tolist(), strict=True), *on_ids]


def _is_quoted(texts: Sequence[str]) -> bool:
    """Returns whether all texts stand in double quotes, or one of them with doubled quotes inside."""
    insides = [text[1:-1] for text in texts if text[:1] == '"' and len(text) > 1 and text[-1] == '"']
    return bool(insides) and (len(insides) == len(texts) or any('""' in inside for inside in insides))


def lines(summaries: Mapping[str, SplitSummary]) -> Iterator[str]:
    """Yields one line about each split."""
    for split, summary in summaries.items():
        size = "endless" if summary.examples is None else counted(summary.examples, "example")
        if summary.read != summary.examples:
            size += f" ({summary.read:,} read)"
        parts = [f"{split}: {size}"]
        for key, side in summary.sides.items():
            mean = side.tokens / max(summary.read, 1)
            unknown = f", {two_digits(100 * side.unknown / side.tokens)} % unknown" if side.unknown else ""
            parts.append(f"{key} {mean:,.1f} tokens on average, at most {side.longest:,}{unknown}")
        if summary.answer_tokens:
            parts.append(f"{summary.answer_tokens / max(summary.read, 1):,.1f} of them the assistant's")
        if summary.long:
            parts.append(f"{summary.long:,} too long")
        if summary.unanswered:
            parts.append(f"{summary.unanswered:,} without an answer in their row")
        names = {
            "duplicates": summary.duplicates,
            "in the training split": summary.in_training,
            "with a source of the training split": summary.known_sources,
        }
        parts += [f"{count:,} {name}" for name, count in names.items() if count]
        if summary.unmatched_placeholders:
            singular, plural = "placeholder of a target is", "placeholders of targets are"
            parts.append(f"{counted(summary.unmatched_placeholders, singular, plural)} not in their source")
        parts += [f"{count:,} left out ({reason})" for reason, count in summary.left_out.items()]
        yield "  ".join(parts)
        if summary.transforms:
            changed = (f"{name} {two_digits(100 * share)} % of the examples" for name, share in summary.transforms)
            yield f"  transforms: {', '.join(changed)}"
        for part in summary.parts:
            size, epochs = counted(part["size"], "example"), two_digits(part["epochs"])
            yield (
                f"  {part['name']}: {size}, {two_digits(100 * part['examples'])} % of those drawn, "
                f"{two_digits(100 * part['tokens'])} % of the tokens, {epochs} epoch{'' if epochs == '1' else 's'}"
            )
        if summary.stages:
            from tformer_jax.config.stages import step_range
        for stage in summary.stages:
            yield f"  stage {stage['stage']!r}: {step_range(stage['from_step'], stage['to_step'])}"
        yield from language_lines(summary.languages)
