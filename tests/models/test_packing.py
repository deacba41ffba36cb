"""Documents packed into one row give the results of separate documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import apply, assert_close, build, rest_slow, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.nn.positions import token_positions
from tformer_jax.special_tokens import PAD

FIRST, SECOND = np.array([[5, 6, 7]], np.int32), np.array([[8, 9, 4, 10]], np.int32)
PACKED, SEGMENTS = np.concatenate([FIRST, SECOND], axis=1), np.array([[1, 1, 1, 2, 2, 2, 2]])
SOURCES = np.array([[9, 8]], np.int32), np.array([[7, 4, 3]], np.int32)
PACKED_SOURCE, SOURCE_SEGMENTS = np.concatenate(SOURCES, axis=1), np.array([[1, 1, 2, 2, 2]])
ROWS, SOURCE_ROWS = np.array([[5, 6, 7, 9], SECOND[0]], np.int32), np.array([[9, 8, PAD], SOURCES[1][0]], np.int32)
"""The documents as rows of one batch; no token of the first one sees the 9 after it."""

KINDS = {
    "sinusoidal": {},
    "ALiBi": {"position": "alibi"},
    "rotary, blockwise": {"position": "rotary", "head_dim": 4, "attention_backend": "blockwise"},
    "relative": {"position": "relative", "relative": {"buckets": 8, "distance": 9}},
    "latents": {"attention": "mla", "position": "rotary", "mla": {"latent_dim": 6, "rotary_dim": 2}},
    "gated delta rule": {"attention": "gated_delta"},
    "learned": {"position": "learned"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow(reversed(KINDS), 3))
def test_language_models(name):
    model, params = build(tiny("decoder_lm", **KINDS[name]))
    packed = apply(model, params, PACKED, segments=SEGMENTS)
    first, second = apply(model, params, ROWS)
    assert_close(packed[0], np.concatenate([first[:3], second]), proves=("packed segments", "separate documents"))


@pytest.mark.long
def test_windows_end_at_a_document():
    settings = {"layer_pattern": ("window", "full"), "window": 2, "position": "rotary", "head_dim": 4}
    model, params = build(tiny("decoder_lm", decoder_layers=2, **settings))
    packed = apply(model, params, PACKED, segments=SEGMENTS)
    assert_close(packed[:, 3:], apply(model, params, SECOND))


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow([name for name in reversed(KINDS) if "delta" not in name], 1))
def test_translation(name):
    model, params = build(tiny("seq2seq", **KINDS[name]))
    segments = {"source_segments": SOURCE_SEGMENTS, "target_segments": SEGMENTS}
    packed = apply(model, params, PACKED_SOURCE, PACKED, **segments)
    first, second = apply(model, params, SOURCE_ROWS, ROWS, source_padding_mask=SOURCE_ROWS != PAD)
    assert_close(packed[0], np.concatenate([first[:3], second]), proves=("packed segments", "separate documents"))


def test_no_gradient_crosses_a_document():
    model, params = build(tiny("decoder_lm"))

    def second(table):
        changed = {"params": params | {"embedding": {"embedding": table}}}
        return model.apply(changed, PACKED, segments=SEGMENTS)[0, 3:, 0].sum()

    gradient = jax.jit(jax.grad(second))(params["embedding"]["embedding"])
    np.testing.assert_array_equal(gradient[FIRST[0]], 0)


def test_positions_restart_in_each_document():
    segments = jnp.array([[3, 3, 5, 5, 5, 0], [1, 2, 3, 3, 3, 3]])
    np.testing.assert_array_equal(token_positions(6, segments), [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]])
    np.testing.assert_array_equal(token_positions(3, None), [[0, 1, 2]])


@pytest.mark.parametrize("missing", ["source_segments", "target_segments"])
def test_segments_of_only_one_side_are_refused(missing):
    model, params = build(tiny("seq2seq"))
    segments = {"source_segments": SOURCE_SEGMENTS, "target_segments": SEGMENTS, missing: None}
    with pytest.raises(UserError, match="packed rows need segments of both source and target"):
        apply(model, params, PACKED_SOURCE, PACKED, **segments)
