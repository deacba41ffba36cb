"""Beam search finds the same hypotheses and scores as Hugging Face's, on a Marian and a T5 model."""

import jax
import numpy as np
import pytest
import torch

from tests.helpers import assert_close
from tests.inference.beam_search import best_continuations, best_translations
from tests.parity.test_huggingface import MODELS, V, their_model
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.constraints import Constraints
from tformer_jax.interop import hf
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD, PAD_TOKEN

LENGTH = 9
DRAW = np.random.default_rng(0)
REAL = np.arange(6) < DRAW.integers(1, 7, (16, 1))
SOURCE = np.where(REAL, DRAW.integers(3, V, (16, 6)), PAD).astype(np.int32)
EARLY = {"first": True, "heuristic": False, "never": "never"}


@pytest.fixture(scope="module", params=["marian", "t5 1.1"])
def models(request, tmp_path_factory):
    """Returns their model, ours and our parameters; outputs depend strongly on the source and differ in length."""
    theirs = their_model(request.param)
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
            if "EncDecAttention.o" in parameter_name:
                parameter.mul_(3)
        theirs.get_output_embeddings().weight.mul_(2)
        if hasattr(theirs, "final_logits_bias"):
            theirs.final_logits_bias.zero_()[0, EOS] = 1.5
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    cfg, params = hf.load(folder)
    return MODELS[request.param][0], theirs, registry.build(cfg), params


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(("beams", "alpha"), [(2, 1.0), (4, 0.6), (5, 2.0), (3, 0.0)])
def test_hypotheses_and_scores(models, beams, alpha, early):
    name, theirs, ours, params = models
    expected = theirs.generate(
        input_ids=torch.tensor(SOURCE, dtype=torch.long).clamp(min=0),
        attention_mask=torch.tensor(REAL, dtype=torch.long),
        decoder_start_token_id=BOS,
        pad_token_id=PAD_TOKEN,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        bad_words_ids=[[PAD_TOKEN], [BOS]],
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=alpha,
        early_stopping=EARLY[early],
        max_new_tokens=LENGTH,
        use_cache=False,  # their cache has as many decoder layers as the encoder
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    cfg = DecodeConfig(strategy="beam", beams=beams, length_alpha=alpha, early_stopping=early)
    actual = jax.device_get(best_translations(ours, params, SOURCE, length=LENGTH, cfg=cfg))
    wanted = expected.sequences.numpy()[:, 1:].reshape(len(SOURCE), beams, -1)
    ended = np.cumsum(wanted == EOS, axis=-1) - (wanted == EOS) > 0
    wanted = np.where(ended | (wanted == PAD_TOKEN), PAD, wanted)  # theirs repeats EOS, then has PAD_TOKEN
    lengths = (wanted != PAD).sum(axis=-1)
    assert alpha > 1 or len(np.unique(lengths)) > 1  # a strong penalty makes all outputs as long as possible
    assert (actual.tokens[..., wanted.shape[-1] :] == PAD).all()
    places = same_hypotheses(wanted, actual.tokens[..., : wanted.shape[-1]])
    assert (np.diff(actual.scores, axis=-1) <= 0).all()
    scores = expected.sequences_scores.numpy().reshape(len(SOURCE), beams)
    proves = (f"decode.strategy=beam, early_stopping={early}", f"transformers {name}.generate")
    assert_close(np.take_along_axis(actual.scores, places, axis=-1), scores, 1e-5, proves=proves)


def test_renormalized_probabilities(models):
    """Published configs of Marian have `renormalize_logits`: what suppressed tokens lose, the others get."""
    _, theirs, ours, params = models
    suppressed, beams = (PAD_TOKEN, BOS, 7, 9, 11, 13), 3
    expected = theirs.generate(
        input_ids=torch.tensor(SOURCE, dtype=torch.long).clamp(min=0),
        attention_mask=torch.tensor(REAL, dtype=torch.long),
        decoder_start_token_id=BOS,
        pad_token_id=PAD_TOKEN,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        bad_words_ids=[[token] for token in suppressed],
        renormalize_logits=True,
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=LENGTH,
        use_cache=False,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    cfg = DecodeConfig(strategy="beam", beams=beams, renormalize=True)
    constraints = Constraints(suppressed=suppressed)
    actual = best_translations(ours, params, SOURCE, length=LENGTH, cfg=cfg, constraints=constraints)
    wanted = expected.sequences.numpy()[:, 1:].reshape(len(SOURCE), beams, -1)
    wanted = np.where((np.cumsum(wanted == EOS, axis=-1) - (wanted == EOS) > 0) | (wanted == PAD_TOKEN), PAD, wanted)
    places = same_hypotheses(wanted, np.asarray(actual.tokens)[..., : wanted.shape[-1]])
    scores = expected.sequences_scores.numpy().reshape(len(SOURCE), beams)
    assert_close(np.take_along_axis(np.asarray(actual.scores), places, axis=-1), scores, 1e-5)


def test_rules_see_the_prompt(tmp_path):
    """Prompts of a language model contain the n-grams that must not repeat, and the tokens that are penalized."""
    theirs = their_model("gpt2")
    theirs.save_pretrained(tmp_path)
    cfg, params = hf.load(tmp_path)
    prompts, beams = np.random.default_rng(1).integers(3, V, (8, 7)).astype(np.int32), 3
    expected = theirs.generate(
        input_ids=torch.tensor(prompts, dtype=torch.long),
        attention_mask=torch.ones(prompts.shape, dtype=torch.long),
        pad_token_id=PAD_TOKEN,
        eos_token_id=EOS,
        bad_words_ids=[[PAD_TOKEN], [BOS]],
        num_beams=beams,
        num_return_sequences=beams,
        no_repeat_ngram_size=2,
        repetition_penalty=1.3,
        max_new_tokens=LENGTH,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    decode = DecodeConfig(strategy="beam", beams=beams, repetition_penalty=1.3)
    constraints = Constraints(repetition=True, no_repeat_ngram=2)
    model = registry.build(cfg)
    actual = best_continuations(model, params, prompts, length=LENGTH, cfg=decode, constraints=constraints)
    wanted = expected.sequences.numpy()[:, prompts.shape[1] :].reshape(len(prompts), beams, -1)
    wanted = np.where(np.cumsum(wanted == EOS, axis=-1) - (wanted == EOS) > 0, PAD, wanted)
    places = same_hypotheses(wanted, np.asarray(actual.tokens)[..., : wanted.shape[-1]])
    scores = expected.sequences_scores.numpy().reshape(len(prompts), beams)
    assert_close(np.take_along_axis(np.asarray(actual.scores), places, axis=-1), scores, 1e-5)


def same_hypotheses(wanted, actual):
    """Returns the place in `found` of each hypothesis of `wanted`: int [B, N, T] each -> [B, N].

    Rounding orders hypotheses with almost equal scores: on some CPUs two differ by less than 1e-6.
    """
    equal = (wanted[:, :, None] == actual[:, None]).all(axis=-1)
    assert (equal.sum(axis=-1) == 1).all() and (equal.sum(axis=-2) == 1).all()
    return equal.argmax(axis=-1)
