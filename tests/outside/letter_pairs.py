from tformer_jax.config import kinds
from tformer_jax.data.tokenizers.simple import PieceTokenizer


class LetterPairs(PieceTokenizer):
    """One token per two characters."""

    @staticmethod
    def split(text):
        return [text[start : start + 2] for start in range(0, len(text), 2)]


kinds.TOKENIZERS["letter_pairs"] = LetterPairs
