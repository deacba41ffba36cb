from collections.abc import Iterable, Sequence

import numpy as np

from tformer_jax.config import kinds
from tformer_jax.data.corpora import DataError
from tformer_jax.special_tokens import PAD
from tformer_jax.tasks.token_prediction import TokenPrediction


class Tagging(TokenPrediction):
    """Predicts a tag for each word, from pairs of a text and its tags, with one vocabulary of words and tags."""

    family = "masked_lm"
    keys = ("source", "target")
    batchings = ("buckets",)
    verb = "tag"

    def check_fit(self, cfg):
        super().check_fit(cfg)
        if cfg.data.tokenizer_kinds != ("words", "words") or not cfg.data.shared_vocab:
            raise cfg.data.error("tokenizer", "must be 'words' for tagging, with data.shared_vocab=True")

    def features(self, block):
        words, tags = block["source"], block["target_out"]
        if (words.lengths != tags.lengths).any():
            raise DataError("a text has another number of words than tags")
        return {"tokens": words, "targets": tags}

    def tag(self, run, texts: Iterable[str]) -> list[Sequence[str]]:
        """Returns the tags of the words of each text."""
        tokenizer = run.tokenizers.source
        rows = [tokenizer.special.wrap_side(tokenizer.encode(text)) for text in texts]
        tokens = np.array([row + [PAD] * (run.config.model.max_length - len(row)) for row in rows], np.int32)
        logits = run.model.apply({"params": run.params}, **run.model.arguments({"tokens": tokens}))
        best = np.asarray(logits).argmax(axis=-1)
        return [tokenizer.decode(ids[: len(row)]).split() for ids, row in zip(best, rows, strict=True)]


kinds.TASKS["tagging"] = Tagging()
