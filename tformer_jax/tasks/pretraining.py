"""Pre-training of an encoder-decoder by corrupted texts (T5 and BART, 2020)."""

from tformer_jax.tasks.token_prediction import TokenPrediction


class Pretraining(TokenPrediction):
    """Restores corrupted texts."""

    family = "seq2seq"
    objectives = ("span_corruption", "denoising")
    verb = "translate"
    verbs = ("translate", "outputs", "score")
    route = "/translate"


PRETRAINING = Pretraining()
