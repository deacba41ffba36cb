from pathlib import Path

from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.corpora.corpus import PAIRS, Source


class Sums(Source):
    """Sums of two numbers, such as `12+7`, and their values."""

    settings = ("heldout_examples",)
    examples = (PAIRS,)

    @staticmethod
    def check(data: DataConfig) -> None:
        if data.heldout_examples > 1000:
            raise data.error("heldout_examples", "must be at most 1000 for data.source='sums'")

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        pairs = [{"source": f"{a}+{b}", "target": str(a + b)} for a in range(100) for b in range(100)]
        count = cfg.data.heldout_examples
        held_out, train = pairs[:: len(pairs) // (2 * count)], pairs[1 :: len(pairs) // 100]
        return Corpus(train, held_out[:count], held_out[count : 2 * count])


kinds.CORPORA["sums"] = Sums
