"""Properties of the tokens of a vocabulary that pre-training objectives use."""

import functools

import numpy as np

from tformer_jax.data.columns import TokenIds
from tformer_jax.data.tokenizers import MASK, SENTINEL_TOKENS, Tokenizer

SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "\n")


class Vocabulary:
    """Tables of the tokens of a tokenizer that has the special tokens of an objective."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @property
    def around(self) -> int:
        """Number of special tokens around a source or target."""
        return self._tokenizer.special.added_to_side

    def pair(self, source: np.ndarray, target: np.ndarray) -> TokenIds:
        """Returns `source`, `target_in` and `target_out`, int32, with the special tokens around them."""
        special = self._tokenizer.special
        read, output = (
            np.concatenate([before, ids, after], dtype=np.int32, casting="unsafe")
            for before, ids, after in (
                (special.before, source, special.after_source),
                (special.before_target, target, special.after_side),
            )
        )
        return {"source": read, "target_in": np.append(np.int32(special.start), output[:-1]), "target_out": output}

    @functools.cached_property
    def mask(self) -> int:
        """The mask token."""
        return self._tokenizer.id_of(MASK)

    @functools.cached_property
    def sentinels(self) -> np.ndarray:
        """The sentinel tokens, in the order of the spans that they stand for: int32 [SENTINELS]."""
        return np.array([self._tokenizer.id_of(name) for name in SENTINEL_TOKENS], np.int32)

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """Whether each token is not special: bool [V]."""
        special = self._tokenizer.special
        return ~np.isin(np.arange(self._tokenizer.vocab_size), [*special.name_of, *special.eos])

    @functools.cached_property
    def texts(self) -> list[str]:
        """The text of each token after a word, such as " the" and "ing"; "" for special tokens."""
        ids = np.flatnonzero(self.ordinary).tolist()
        word = next((i for i in ids if self._tokenizer.decode([i])[-1:].isalnum()), ids[0])
        before = len(self._tokenizer.decode([word]))
        texts = [""] * len(self.ordinary)
        for i in ids:
            texts[i] = self._tokenizer.decode([word, i])[before:]
        return texts

    @functools.cached_property
    def begins_within_word(self) -> np.ndarray:
        """Whether the text of each token begins with a character of a word: bool [V]."""
        return np.array([_is_of_word(text[:1]) for text in self.texts])

    @functools.cached_property
    def ends_within_word(self) -> np.ndarray:
        """Whether the text of each token ends with a character of a word: bool [V]."""
        return np.array([_is_of_word(text[-1:]) for text in self.texts])

    @functools.cached_property
    def ends_sentence(self) -> np.ndarray:
        """Whether each token ends a sentence, as special tokens do: bool [V]."""
        ends = [text.rstrip(" ").endswith(SENTENCE_ENDS) for text in self.texts]
        return np.array(ends) | ~self.ordinary


def _is_of_word(character: str) -> bool:
    """Returns whether a character is a letter, digit or underscore, or a part of an incomplete UTF-8 sequence."""
    return character.isalnum() or character in ("_", "\ufffd")
