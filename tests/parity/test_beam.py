"""Beam search finds the hypotheses of Hugging Face's, with their scores, on a Marian and a T5 model."""

import jax
import numpy as np
import pytest
import torch

from tests.helpers import assert_close
from tests.parity.test_huggingface import MODELS, SOURCE, SOURCE_REAL, their_model
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import generate
from tformer_jax.interop import hf
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD

LENGTH = 9
EARLY = {"first": True, "heuristic": False, "never": "never"}


@pytest.fixture(scope="module", params=["marian", "t5 1.1"])
def models(request, tmp_path_factory):
    """Theirs, ours and our parameters; small enough weights that outputs are of different length."""
    theirs = their_model(request.param)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.9)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    cfg, params = hf.load(folder)
    return MODELS[request.param][0], theirs, registry.build(cfg), params


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(("beams", "alpha"), [(2, 1.0), (4, 0.6), (5, 2.0), (3, 0.0)])
def test_hypotheses_and_scores(models, beams, alpha, early):
    name, theirs, ours, params = models
    expected = theirs.generate(
        input_ids=torch.tensor(SOURCE, dtype=torch.long),
        attention_mask=torch.tensor(SOURCE_REAL, dtype=torch.long),
        decoder_start_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        bad_words_ids=[[PAD], [BOS]],
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=alpha,
        early_stopping=EARLY[early],
        max_new_tokens=LENGTH,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    cfg = DecodeConfig(strategy="beam", beams=beams, length_alpha=alpha, early_stopping=early)
    found = jax.device_get(generate.best_translations(ours, params, SOURCE, length=LENGTH, cfg=cfg))
    wanted = expected.sequences.numpy()[:, 1:].reshape(len(SOURCE), beams, -1)
    np.testing.assert_array_equal(found.tokens[..., : wanted.shape[-1]], wanted)
    assert (found.tokens[..., wanted.shape[-1] :] == PAD).all()
    scores = expected.sequences_scores.numpy().reshape(len(SOURCE), beams)
    proves = (f"decode.strategy=beam, early_stopping={early}", f"transformers {name}.generate")
    assert_close(found.scores, scores, 1e-5, proves=proves)
