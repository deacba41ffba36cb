"""Masked language models: pre-training of an encoder by masked tokens (BERT, 2019)."""

from tformer_jax.tasks.token_prediction import TokenPrediction


class MaskedLM(TokenPrediction):
    """Predicts the masked tokens of a text."""

    family = "masked_lm"
    objectives = ("masked_tokens",)
    verb = "fill_mask"
    verbs = ("fill_mask",)


MASKED_LM = MaskedLM()
