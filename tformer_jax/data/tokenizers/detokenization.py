"""Undoes the tokenization by Moses' rules that a normalization applies."""

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import Tokenizer, import_library
from tformer_jax.data.tokenizers.extended import unextended
from tformer_jax.data.tokenizers.normalization import NormalizedTokenizer, Step, moses_code

MOSES = "moses"
"""The step that outputs can be freed of."""


def detokenizer(tokenizer: Tokenizer) -> Step:
    """Returns Moses' detokenizer.perl for the language of a tokenizer that applies the step `moses`.

    Raises:
        UserError: it does not apply that step, or sacremoses is not installed.
    """
    inner = unextended(tokenizer)
    if not isinstance(inner, NormalizedTokenizer) or MOSES not in inner.steps:
        raise UserError(
            "decode.detokenize=True: outputs are not tokens of Moses (data.normalize has no 'moses'); write False"
        )
    moses = import_library("sacremoses", "decode.detokenize=True").MosesDetokenizer(moses_code(inner.language))
    return lambda text: moses.detokenize(text.split())
