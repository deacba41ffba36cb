"""Attention weights and residual streams equal those that transformers returns with `output_attentions`."""

import numpy as np
import pytest
import torch

from tests.helpers import assert_close, rest_slow
from tests.parity.test_huggingface import REAL, SOURCE, SOURCE_REAL, TOKENS, their_model
from tformer_jax.inference.watch import watch
from tformer_jax.interop import hf
from tformer_jax.models import registry
from tformer_jax.special_tokens import PAD

PAIRS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


@pytest.mark.parametrize("name", rest_slow(["gpt2", "bart", "llama", "bert", "gemma2", "t5 1.0"], 2))
def test_weights_are_those_of_transformers(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    cfg, params = hf.load(tmp_path)
    tokens, real = torch.tensor(TOKENS, dtype=torch.long), torch.tensor(REAL, dtype=torch.long)
    source, source_real = torch.tensor(SOURCE, dtype=torch.long), torch.tensor(SOURCE_REAL, dtype=torch.long)
    inputs = {"input_ids": tokens, "attention_mask": real}
    batch = {"tokens": np.where(REAL, TOKENS, PAD)}
    if cfg.family == "seq2seq":
        inputs = {"input_ids": source, "attention_mask": source_real}
        inputs |= {"decoder_input_ids": tokens, "decoder_attention_mask": real}
        batch = {"source": np.where(SOURCE_REAL, SOURCE, PAD), "target_in": np.where(REAL, TOKENS, PAD)}
    with torch.no_grad():
        expected = theirs(**inputs, output_attentions=True, output_hidden_states=True)
    actual = watch(registry.build(cfg), params, batch)
    for kind, weights in actual.weights.items():
        wanted = expected[PAIRS[kind] if cfg.family == "seq2seq" else "attentions"]
        rows = SOURCE_REAL if kind == "encoder" and cfg.family == "seq2seq" else REAL
        assert len(wanted) == weights.shape[1]
        for layer, theirs_layer in enumerate(wanted):
            ours, other = (np.moveaxis(np.asarray(x), 2, 1)[rows] for x in (weights[:, layer], theirs_layer))
            assert_close(ours, other, proves=(f"attention weights: {kind} of {name}", "transformers output_attentions"))
    if name == "gpt2":
        streams = np.stack([np.linalg.norm(x, axis=-1) for x in expected.hidden_states[:-1]], axis=1)
        ours = np.asarray(actual.norms["decoder"][:, :-1:2])
        assert_close(np.moveaxis(ours, 2, 1)[REAL], np.moveaxis(streams, 2, 1)[REAL])
