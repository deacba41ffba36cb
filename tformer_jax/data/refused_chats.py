"""Conversations that a chat template refuses: they stop a run before training, or are left out and counted."""

import dataclasses
import itertools
import logging
from collections.abc import Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.config import Config, kinds
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora.corpus import Corpus, Joined, Part
from tformer_jax.data.corpora.example import DataError, Example
from tformer_jax.data.corpora.splits import NAMES
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.chats import locate_answers

REFUSED = "the chat template refuses it"


def _accepted(
    tokenizer: Tokenizer, split: str, examples: Sequence[Example], advice: str | None, refused: list[str], before: int
) -> Sequence[Example]:
    """Returns the conversations of a split that its template writes; the parts of a mixture stay apart.

    Args:
        advice: what the error about a refused conversation recommends; None: it is described in `refused` instead.
        before: number of conversations of the split before these.

    Raises:
        DataError: a conversation is refused, and there is advice.
    """
    if isinstance(examples, Joined):
        parts = zip(examples.parts, itertools.accumulate(examples.sizes, initial=before), strict=False)
        return Joined([_accepted(tokenizer, split, part, advice, refused, start) for part, start in parts])
    chosen = []
    for index, example in enumerate(examples):
        try:
            locate_answers(tokenizer, Chat.from_json(example["messages"]))
            chosen.append(index)
        except UserError as error:
            text = f"conversation {before + index + 1:,} of {split}: {error}; it is {example['messages'][:120]}"
            if advice is not None:
                raise DataError(f"{text}; {advice}") from None
            refused.append(text)
    return examples if len(chosen) == len(examples) else Part(examples, chosen)


def leave_out_refused(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> Corpus:
    """Returns a corpus without the conversations that the chat template of its tokenizer refuses, and counts these.

    Raises:
        DataError: a conversation is refused and `data.on_bad_line` is "stop", or a split has no other.
    """
    advice = None if cfg.data.on_bad_line == "skip" else "leave it out"
    if advice and "on_bad_line" in kinds.load(kinds.CORPORA, cfg.data.source).settings:
        advice += ", or set data.on_bad_line='skip'"
    selected: dict[int, Sequence[Example]] = {}
    left_out = {split: dict(counts) for split, counts in corpus.left_out.items()}
    for split in NAMES:
        examples = getattr(corpus, split)
        if id(examples) in selected:  # the test split may be the validation split
            continue
        refused: list[str] = []
        selected[id(examples)] = _accepted(tokenizers.target, split, examples, advice, refused, 0)
        if refused:
            left_out.setdefault(split, {})[REFUSED] = len(refused)
            conversations = counted(len(refused), "conversation is", "conversations are")
            logging.getLogger(__name__).warning("%s left out; %s", conversations, refused[0])
        if not selected[id(examples)]:
            raise DataError(f"split {split} has no other conversation; {refused[0]}")
    train, validation, test = (selected[id(getattr(corpus, split))] for split in NAMES)
    return dataclasses.replace(corpus, train=train, validation=validation, test=test, left_out=left_out)
