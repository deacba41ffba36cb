"""Decoding of models whose layers keep latents or recurrent states, by the engine: outputs are those of full passes."""

import numpy as np
import pytest

from tests.helpers import apply, rest_slow
from tests.inference.engines import LETTERS, LONG, engine, models, submit
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.engine import lane as lanes
from tformer_jax.special_tokens import PAD

MODELS = {
    "latents": {"attention": "mla", "position": "rotary", "mla": {"latent_dim": 6, "rotary_dim": 2}},
    "latents and states": {"layer_pattern": ("gated_delta", "full"), "attention": "mla", "mla": {"latent_dim": 6}},
    "keys and states": {"layer_pattern": ("full", "gated_delta"), "position": "alibi"},
    "states": {"attention": "gated_delta"},
}
DECODES = {
    "greedy": DecodeConfig(max_new_tokens=3),
    "samples": DecodeConfig(max_new_tokens=3, strategy="sample", temperature=2.0),
    "beams": DecodeConfig(max_new_tokens=3, strategy="beam", beams=3, length_alpha=0.0),
}
TEXTS = ["abc", "abcdefg", "a", "gfedcba", "abcdefb"]


CASES = [
    ("latents and states", "beams"),
    *((name, decode) for name in MODELS for decode in DECODES if (name, decode) != ("latents and states", "beams")),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_slow({", ".join(case): case for case in CASES}, 1))
def test_outputs_and_scores_are_those_of_full_passes(case, monkeypatch):
    """Rows are reused, prompts are read in chunks, and two samples continue one prompt."""
    name, decode = case
    monkeypatch.setattr(lanes, "PROMPT_CHUNK", 4)
    trained = models("decoder_lm", decoder_layers=2, **MODELS[name])
    _, model, params = trained
    served, settings = engine(trained, max_rows=2), DECODES[decode]
    samples = 2 if decode == "samples" else 1
    numbers = [submit(served, text, settings, num_outputs=samples, scored=True) for text in TEXTS]
    ids: dict[tuple[int, int], list[int]] = {}
    scores: dict[tuple[int, int], float] = {}
    while not served.idle:
        for event in served.step():
            ids.setdefault((event.request, event.sample), []).extend(event.ids)
            if event.finish:
                scores[event.request, event.sample] = event.score
    rows = np.full((len(ids), LONG), PAD, np.int32)
    starts = {key: len(LETTERS.encode(TEXTS[numbers.index(key[0])])) for key in ids}
    for row, (number, sample) in zip(rows, ids, strict=True):
        whole = LETTERS.encode(TEXTS[numbers.index(number)]) + ids[number, sample]
        row[: len(whole)] = whole
    logits = np.asarray(apply(model, params, rows), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    forbidden = list(Constraints.from_config(settings, LETTERS).suppressed)
    for row, (key, tokens) in enumerate(ids.items()):
        at = np.arange(len(tokens)) + starts[key] - 1
        np.testing.assert_allclose(scores[key], log_p[row, at, tokens].sum(), rtol=1e-4)
        if decode == "greedy":
            allowed = log_p[row, at]
            allowed[:, forbidden] = -np.inf
            np.testing.assert_array_equal(allowed.argmax(axis=-1), tokens)
