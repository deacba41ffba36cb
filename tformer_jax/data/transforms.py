"""From examples of text to examples of token ids, one function a family."""

import dataclasses
import logging

from tformer_jax.data.bucketing import Tokens
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.special_tokens import BOS, EOS


@dataclasses.dataclass
class Encoder:
    """Turns an example into token ids of at most `max_length`; the first example that must be cut is reported."""

    tokenizers: Tokenizers
    max_length: int
    labels: tuple[str, ...] | None = None
    reported: bool = dataclasses.field(default=False, init=False)

    def __call__(self, example: Example) -> Tokens:
        """{"source", "target_in", "target_out"} of a translation pair, {"tokens", "label"} of a classified text."""
        if self.labels is not None:
            tokens = self._cut(self.tokenizers.target.encode(example["text"]), self.max_length)
            return {"tokens": tokens, "label": [self.labels.index(example["label"])]}
        source = self._cut(self.tokenizers.source.encode(example["source"]), self.max_length - 1)
        target = self._cut(self.tokenizers.target.encode(example["target"]), self.max_length - 1)
        return {"source": [*source, EOS], "target_in": [BOS, *target], "target_out": [*target, EOS]}

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        if len(ids) > limit and not self.reported:
            logging.getLogger(__name__).warning(
                "cutting texts of more than %d tokens, the first of %d; a longer last bucket in data.bucket_lengths "
                "keeps them whole",
                limit,
                len(ids),
            )
            self.reported = True
        return ids[:limit]
