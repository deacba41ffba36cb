import dataclasses

from tformer_jax.config import kinds
from tformer_jax.data.transforms.texts import TextTransform


@dataclasses.dataclass(frozen=True)
class ReversedWords(TextTransform):
    """Writes the words of texts in reverse order."""

    def change_text(self, text, rng):
        return " ".join(reversed(text.split()))


kinds.TRANSFORMS["reversed_words"] = ReversedWords
