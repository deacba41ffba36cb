"""Warnings about a corpus: what a reader would want to know before an hour of training."""

from collections.abc import Callable, Iterator, Mapping

from tformer_jax.base.numbers import counted, two_digits
from tformer_jax.config import Config, kinds
from tformer_jax.config.directions import Direction
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.summary import LARGE_RATIO, SplitSummary

FEW_EXAMPLES = 100
"""A held-out split with fewer examples cannot tell models apart."""
NAMES_OF_COLUMNS = {"source", "target", "text", "label", "sentence"}


def warnings(cfg: Config, corpus: Corpus, summaries: Mapping[str, SplitSummary]) -> Iterator[str]:
    """Yields one sentence for each fact that may spoil a run, with its number and the setting that changes it."""
    for split, summary in summaries.items():
        for rule in RULES:
            yield from rule(cfg, split, summary)
    if corpus.test is corpus.validation:
        yield (
            "data.test=(): the final evaluation is of the validation examples, by which the run was chosen; name other "
            "examples to report a test result"
        )
    yield from _languages(cfg, corpus)
    first = corpus.train[0]
    if cfg.data.source in ("tsv", "parallel_lines", "lines") and not cfg.data.header and _is_header(first):
        yield f"the first training example is {dict(first)}, which looks like a header: set data.header=True"


def _languages(cfg: Config, corpus: Corpus) -> Iterator[str]:
    if not corpus.directions:
        return
    from tformer_jax.data.languages import describe_unknown

    directions = list(map(Direction.parse, corpus.directions))
    codes = dict.fromkeys(code for direction in directions for code in direction)
    if unknown := describe_unknown(codes):
        yield f"{unknown}: if they are none, correct data.language_fields or the data"
    if len({direction.target for direction in directions}) > 1 and not (cfg.data.source_tags or cfg.data.target_tags):
        yield "no tag tells the model into which language to translate: set data.source_tags=('target',)"
    yield from _held_out(cfg, corpus)


def _held_out(cfg: Config, corpus: Corpus) -> Iterator[str]:
    """Yields the directions that metrics lack, of all examples and of those that a run evaluates while it trains."""
    validation = {example["direction"] for example in corpus.validation}
    held_out = validation | {example["direction"] for example in corpus.test}
    if missing := [name for name in cfg.data.zero_shot if name not in held_out]:
        yield (
            f"no held-out example is of {', '.join(missing)} in data.zero_shot, so that no metric is: correct it, or "
            "add such examples to the held-out data"
        )
    if 0 < cfg.eval.examples < len(validation):
        yield (
            f"eval.examples={cfg.eval.examples} is less than the {len(validation)} directions of validation, so that "
            "evaluations during training leave out some: write at least as many, or 0 for all examples"
        )


def _share(count: int, total: int) -> float:
    return 100 * count / max(total, 1)


def _long(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    share = _share(summary.long, summary.read)
    chats = "messages" in summary.sides
    if not summary.long:
        return
    beyond = sum(side.tokens_beyond for side in summary.sides.values())
    if split != "train":
        of_split = f"of {split} ({two_digits(share)} %)"
        examples = counted(summary.long, f"example {of_split} is", f"examples {of_split} are")
        yield f"{examples} truncated to model.max_length; increase it"
        return
    drops = cfg.data.long_pairs == "drop" and (chats or "target" in summary.sides)
    what = "dropped" if drops else f"truncated, by {counted(beyond, 'token')}"
    examples = f"{two_digits(share)} % of the training examples"
    remedy = ", or set data.long_pairs='truncate'" if drops else ""
    yield f"{examples} are too long for their row and {what}; increase {_row_setting(cfg)}{remedy}"


def _never_fits(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    for part in summary.parts:
        if part["examples"] and not part["tokens"]:
            yield (
                f"{part['name']} is drawn but not trained, because no example that was read fits its row (examples: "
                f"{part['size']:,}); increase {_row_setting(cfg)}, or leave it out"
            )


def _row_setting(cfg: Config) -> str:
    return "data.bucket_lengths" if cfg.data.batching == "buckets" else "data.window"


def _unknown(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    for key, side in summary.sides.items():
        share = _share(side.unknown, side.tokens)
        if share >= 0.1:
            yield (
                f"{two_digits(share)} % of the {key} tokens of {split} are unknown, so that no model can read or write "
                "them; increase data.vocab_size, or set data.tokenizer to 'bpe', 'unigram' or 'bytes'"
            )


def _repeated(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    share = _share(summary.duplicates, summary.compared)
    if split == "train" and share >= 10:
        remedy = "; entries share them" if cfg.data.filters.duplicates else _filter_hint(cfg, "duplicates")
        yield f"{two_digits(share)} % of the training examples occurred before{remedy}"
    least = summary.share_of_training  # percent of the held-out examples: 1, if all are compared
    among = f" ({two_digits(100 * least)} % of it was compared)" if least < 1 else ""
    if _share(summary.in_training, summary.compared) >= least:
        turned = ", in the same direction or the other," if cfg.data.multilingual else ","
        yield (
            f"{summary.in_training:,} of {_of_split(summary, 'example', split)} in the training split{among}{turned} "
            "too: their scores say nothing about new texts; remove them from one of the two"
        )
    if _share(summary.known_sources, summary.compared) >= least:
        yield (
            f"{summary.known_sources:,} of {_of_split(summary, 'source', split)} in the training split{among} "
            "with another target: their scores say little about new texts; remove them from one of the two"
        )


def _of_split(summary: SplitSummary, noun: str, split: str) -> str:
    return counted(summary.compared, f"{noun} of {split} is", f"{noun}s of {split} are")


def _filter_hint(cfg: Config, name: str, value: str = "True", dropped: str = "training examples") -> str:
    """Returns a clause about a filter; "" if the source has none."""
    used = cfg.data.source in kinds.Users(kinds.CORPORA, "filters")
    return f"; data.filters.{name}={value} drops such {dropped}" if used else ""


def _contradictory(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    if _share(summary.contradictory, summary.compared) >= 1:
        yield (
            f"{summary.contradictory:,} of {summary.compared:,} examples of {split} have the text of another one"
            f"{'' if split == 'train' else ', or of a training example,'} with another label: no model is right on both"
        )


def _misaligned(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    share = _share(summary.large_ratio, summary.compared)
    if share >= 5:
        yield (
            f"{two_digits(share)} % of the pairs of {split} have a side of more than {LARGE_RATIO:.0f} times the "
            "characters of the other: look for misaligned lines"
            f"{_filter_hint(cfg, 'max_length_ratio', f'{LARGE_RATIO:.0f}')}"
        )
    share = _share(summary.identical_sides, summary.compared)
    if share >= 10:
        yield (
            f"{two_digits(share)} % of the pairs of {split} have identical sides{_filter_hint(cfg, 'identical_sides')}"
        )


def _quoted(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    share = _share(summary.quoted, summary.compared)
    if cfg.data.source == "tsv" and share >= 5:
        yield (
            f"{two_digits(share)} % of the examples of {split} have quoted texts; the quotes are kept, because TSV has "
            "no quoting: write the file without them, or as .jsonl"
        )


def _blank(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    for key, side in summary.sides.items():
        if side.blank and not (split == "train" and cfg.data.filters.blank_sides):
            text = {"text": "text", "messages": "conversation"}.get(key, f"{key} text")
            texts = counted(side.blank, f"{text} of {split} is", f"{text}s of {split} are")
            remedy = "" if cfg.data.filters.blank_sides else _filter_hint(cfg, "blank_sides", dropped="examples")
            yield f"{texts} blank, so that a model that answers nothing is right there{remedy}"
    left_out = summary.left_out.get("blank texts", 0)
    if _share(left_out, left_out + (summary.examples or 0)) >= 1:
        cause = "messages without a text" if "messages" in summary.sides else "misaligned columns"
        examples = counted(left_out, f"example of {split} was", f"examples of {split} were")
        yield f"{examples} left out for a blank text: look for {cause}"


def _small(cfg: Config, split: str, summary: SplitSummary) -> Iterator[str]:
    if split != "train" and not task_of(cfg).documents and (summary.examples or 0) < FEW_EXAMPLES:
        yield f"{split} has only {counted(summary.examples or 0, 'example')}, too few to compare models"


RULES: tuple[Callable[[Config, str, SplitSummary], Iterator[str]], ...] = (
    *(_long, _never_fits, _unknown, _repeated, _contradictory, _misaligned, _quoted, _blank, _small),
)


def _is_header(example: Example) -> bool:
    from tformer_jax.data.languages import SIDES, read_language

    texts = [text.strip().lower() for text in example.values()]
    codes = [text in NAMES_OF_COLUMNS | SIDES or (len(text) > 1 and read_language(text) is not None) for text in texts]
    return bool(texts) and all(codes)
