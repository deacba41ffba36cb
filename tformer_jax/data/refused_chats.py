"""Conversations that a chat template refuses: they stop a run before training, or are left out and counted."""

import dataclasses
import logging
from collections.abc import Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, kinds
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora.corpus import Corpus, Joined, Part
from tformer_jax.data.corpora.example import DataError, Example
from tformer_jax.data.corpora.splits import NAMES
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.chats import locate_answers

REFUSED = "the chat template refuses it"


@dataclasses.dataclass
class TemplateCheck:
    """Tells whether a template writes the conversations of a split, and remembers those that it refuses."""

    tokenizer: Tokenizer
    split: str
    advice: str | None
    """What the error about a refused conversation recommends; None: no error."""
    refused: list[str] = dataclasses.field(default_factory=list)
    """Descriptions of the refused conversations so far."""

    def accepts(self, number: int, example: Example) -> bool:
        """Returns whether the template writes the conversation with this number in the split.

        Raises:
            DataError: it does not, and there is advice.
        """
        try:
            locate_answers(self.tokenizer, Chat.from_json(example["messages"]))
        except UserError as error:
            text = f"conversation {number:,} of {self.split}: {error}; it is {example['messages'][:120]}"
            if self.advice is not None:
                raise DataError(f"{text}; {self.advice}") from None
            self.refused.append(text)
            return False
        return True

    def select(self, examples: Sequence[Example], before: int = 0) -> Sequence[Example]:
        """Returns the accepted examples, whose numbers start after `before`; the parts of a mixture stay apart."""
        if isinstance(examples, Joined):
            starts = [before + sum(examples.sizes[:number]) for number in range(len(examples.parts))]
            return Joined([self.select(part, start) for part, start in zip(examples.parts, starts, strict=True)])
        chosen = [i for i, example in enumerate(examples) if self.accepts(before + i + 1, example)]
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
        check = TemplateCheck(tokenizers.target, split, advice)
        selected[id(examples)] = check.select(examples)
        if check.refused:
            left_out.setdefault(split, {})[REFUSED] = count = len(check.refused)
            logging.getLogger(__name__).warning("%s conversations are left out; %s", f"{count:,}", check.refused[0])
        if not selected[id(examples)]:
            raise DataError(f"split {split} has no other conversation; {check.refused[0]}")
    train, validation, test = (selected[id(getattr(corpus, split))] for split in NAMES)
    return dataclasses.replace(corpus, train=train, validation=validation, test=test, left_out=left_out)
