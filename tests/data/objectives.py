"""Pre-training objectives over a vocabulary of letters, for tests."""

from tformer_jax.config import DataConfig, NoiseConfig
from tformer_jax.data.objectives.denoising import Denoising
from tformer_jax.data.objectives.masked_tokens import MaskedTokens
from tformer_jax.data.objectives.span_corruption import SpanCorruption
from tformer_jax.data.objectives.vocabulary import Vocabulary
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.simple import CharacterTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz .!"
KINDS = {"masked_tokens": MaskedTokens, "span_corruption": SpanCorruption, "denoising": Denoising}
FIRST, MASK = 4, 4 + len(LETTERS)


def extended(objective: str, inner=None) -> Tokenizer:
    return (inner or CharacterTokenizer(LETTERS)).extended(KINDS[objective].added)


def built(objective: str, window: int = 64, inner=None, **noise):
    cfg = DataConfig(objective=objective, window=window, noise=NoiseConfig(**noise), batching="windows")
    return KINDS[objective].build(cfg, Vocabulary(extended(objective, inner)))
