"""Conversations that a chat template refuses: they are located, or left out, before training."""

import logging
from collections.abc import Callable, Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, kinds
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora.corpus import Corpus, Joined, Part
from tformer_jax.data.corpora.example import DataError, Example
from tformer_jax.data.corpora.splits import NAMES
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.chats import NOTHING, template_of

REFUSED = "the chat template refuses it"


def leave_out_refused(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> Corpus:
    """Returns a corpus of conversations without those that the template of its tokenizer refuses, which are counted.

    Raises:
        DataError: a conversation is refused and `data.on_bad_line` is "stop", or a split has no other.
    """
    template, skips = template_of(tokenizers.target), cfg.data.on_bad_line == "skip"
    skippable = "on_bad_line" in kinds.load(kinds.CORPORA, cfg.data.source).settings
    known: dict[int, Sequence[Example]] = {}
    left_out = {split: dict(counts) for split, counts in corpus.left_out.items()}
    for split in NAMES:
        examples = getattr(corpus, split)
        if id(examples) in known:  # of validation and test
            continue
        reasons: list[str] = []

        def fits(number: int, example: Example, split: str = split, reasons: list[str] = reasons) -> bool:
            try:
                template.render(Chat.from_json(example["messages"]), NOTHING)
            except UserError as error:
                text = f"conversation {number:,} of {split}: {error}; it is {example['messages'][:120]}"
                if not skips:
                    advice = ", or set data.on_bad_line='skip'" if skippable else ""
                    raise DataError(f"{text}; leave it out{advice}") from None
                reasons.append(text)
                return False
            return True

        known[id(examples)] = _select(examples, fits)
        if reasons:
            left_out.setdefault(split, {})[REFUSED] = len(reasons)
            logging.getLogger(__name__).warning("%s conversations are left out; %s", f"{len(reasons):,}", reasons[0])
        if not known[id(examples)]:
            raise DataError(f"split {split} has no other conversation; {reasons[0]}")
    train, validation, test = (known[id(getattr(corpus, split))] for split in NAMES)
    return Corpus(train, validation, test, left_out=left_out, root=corpus.root)


def _select(examples: Sequence[Example], fits: Callable[[int, Example], bool], before: int = 0) -> Sequence[Example]:
    """Returns the examples that fit, which are numbered after `before` others; the parts of a mixture stay apart."""
    if isinstance(examples, Joined):
        before = 0
        parts = []
        for part in examples.parts:
            parts.append(_select(part, fits, before))
            before += len(part)
        return Joined(parts)
    chosen = [index for index, example in enumerate(examples) if fits(before + index + 1, example)]
    return examples if len(chosen) == len(examples) else Part(examples, chosen)
