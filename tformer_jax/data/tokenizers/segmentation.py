"""How algorithms of subwords segment a word, written as a vocabulary writes it: "▁the", "Ġthe" or "##s".

The libraries segment texts; this module serves changes of a vocabulary, which need the pieces that each piece is made
of.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping

Merge = tuple[str, str]
UNKNOWN_PENALTY = 10.0
"""How much less an unknown character scores than the rarest piece (SentencePiece, kUnkPenalty)."""


class Pieces:
    """The pieces of a vocabulary of whole words or characters, and the base class of the others."""

    def __init__(self, pieces: Iterable[str]):
        self.present = dict.fromkeys(pieces, True)

    def segment(self, word: str) -> list[str]:
        """Returns the pieces of a word; what the vocabulary does not have is a piece of its own."""
        return [word]

    def needed(self, piece: str) -> set[str]:
        """Returns the pieces without which a piece, or another text with its characters, is segmented otherwise."""
        return set()

    @property
    def always_needed(self) -> set[str]:
        """Pieces without which other pieces have another meaning."""
        return set()

    def add(self, word: str) -> list[str]:
        """Makes a word one piece; returns the new pieces, the word last."""
        if word in self.present:
            return []
        self.present[word] = True
        return [word]


class MergedPieces(Pieces):
    """Byte-pair encoding: the merge with the lowest rank first, from the left.

    Within a final piece, a word is merged exactly as that piece would be alone.

    Args:
        rank: returns the rank of a merge; None: it is not allowed.
        suffix: what the vocabulary writes after the last character of a word.
    """

    def __init__(self, pieces: Iterable[str], rank: Callable[[Merge], float | None], suffix: str = ""):
        super().__init__(pieces)
        self._rank, self._suffix = rank, suffix
        self.merges: dict[Merge, int] = {}
        """Merges that `add` appended, which come last, with their order."""

    def segment(self, word: str) -> list[str]:
        return self._merge(word)[0]

    def needed(self, piece: str) -> set[str]:
        """Returns the pieces that merging a piece passes through."""
        pieces, steps = self._merge(piece)
        return steps & self.present.keys() if pieces == [piece] else set()

    def add(self, word: str) -> list[str]:
        new = [piece for piece in self._characters(word) if super(MergedPieces, self).add(piece)]
        while len(pieces := self.segment(word)) > 1:
            self.merges[pieces[0], pieces[1]] = len(self.merges)
            new += super().add(pieces[0] + pieces[1])
        return new

    def _characters(self, word: str) -> list[str]:
        stem = word.removesuffix(self._suffix) if self._suffix else word
        return [*stem[:-1], stem[-1:] + word[len(stem) :]]

    def _merge(self, word: str) -> tuple[list[str], set[str]]:
        """Returns the pieces of a word, and all pieces that its merges pass through."""
        pieces = self._characters(word)
        steps = {*pieces}
        while True:
            ranks = ((self._order(pair), place) for place, pair in enumerate(itertools.pairwise(pieces)))
            allowed = [(order, place) for order, place in ranks if order is not None]
            if not allowed:
                return pieces, steps
            _, place = min(allowed)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
            steps.add(pieces[place])

    def _order(self, pair: Merge) -> tuple[int, float] | None:
        rank = self._rank(pair)
        if rank is not None:
            return 0, rank
        return (1, self.merges[pair]) if pair in self.merges else None


class JoinedPieces(MergedPieces):
    """SentencePiece's BPE: two neighbors merge if the vocabulary has both together, the highest score first."""

    def __init__(self, scores: Mapping[str, float]):
        super().__init__(scores, lambda pair: -scores[text] if (text := "".join(pair)) in scores else None)
        self._added: dict[str, int] = {}

    def add(self, word: str) -> list[str]:
        new = super().add(word)
        self._added |= {piece: number for number, piece in enumerate(new, start=len(self._added))}
        return new

    def _order(self, pair: Merge) -> tuple[int, float] | None:
        text = "".join(pair)
        return (1, self._added[text]) if text in self._added else super()._order(pair)


class ScoredPieces(Pieces):
    """Unigram: the pieces with the highest sum of scores ("Subword Regularization", 2018, section 3.2).

    Args:
        scores: log-probabilities by piece.
    """

    def __init__(self, scores: Mapping[str, float]):
        super().__init__(scores)
        self.scores = dict(scores)
        self._lowest = min(self.scores.values(), default=0.0)
        self._longest = max(map(len, self.scores), default=1)

    def segment(self, word: str) -> list[str]:
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(word) + 1):
            starts = range(max(0, end - self._longest), end)
            best.append(max((best[start][0] + self._score(word[start:end]), start) for start in starts))
        pieces, end = [], len(word)
        while end:
            start = best[end][1]
            pieces.append(word[start:end])
            end = start
        return pieces[::-1]

    def needed(self, piece: str) -> set[str]:
        return {*piece} & self.present.keys()

    @property
    def always_needed(self) -> set[str]:
        """The piece with the lowest score, on which the score of unknown characters depends."""
        return {min(self.scores, key=self.scores.__getitem__)} if self.scores else set()

    def add(self, word: str) -> list[str]:
        """Makes a word one piece, which is as probable as the rarest of the pieces that it replaces."""
        if word in self.present:
            return []
        self.scores[word] = max(self._lowest, min(map(self._score, self.segment(word))))
        self._longest = max(self._longest, len(word))
        return super().add(word)

    def _score(self, piece: str) -> float:
        unknown = self._lowest - UNKNOWN_PENALTY if len(piece) == 1 else float("-inf")
        return self.scores.get(piece, unknown)


class LongestPieces(Pieces):
    """WordPiece: the longest piece from the left ("Google's Neural Machine Translation System", 2016).

    Args:
        prefix: what the vocabulary writes before pieces that do not start a word.
    """

    def __init__(self, pieces: Iterable[str], prefix: str):
        super().__init__(pieces)
        self._prefix = prefix

    def segment(self, word: str) -> list[str]:
        before, rest = (self._prefix, word[len(self._prefix) :]) if word.startswith(self._prefix) else ("", word)
        pieces = []
        while rest:
            ends = range(len(rest), 0, -1)
            end = next((end for end in ends if before + rest[:end] in self.present), None)
            if end is None:
                return [word]
            pieces.append(before + rest[:end])
            before, rest = self._prefix, rest[end:]
        return pieces

    def needed(self, piece: str) -> set[str]:
        characters = piece.removeprefix(self._prefix)
        return {*characters, *(self._prefix + character for character in characters)} & self.present.keys()
