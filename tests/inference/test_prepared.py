"""Weights are converted for decoding once, and released with the parameters."""

import gc

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import build, tiny
from tformer_jax.inference import prepared as module
from tformer_jax.inference.prepared import prepared


def built():
    model, params = build(tiny("decoder_lm", tie_embeddings="output"))
    return model, jax.tree.map(jnp.asarray, params)


def test_the_same_arrays_are_converted_once():
    model, params = built()
    _, first = prepared(model, params)
    _, again = prepared(model, jax.tree.map(lambda leaf: leaf, params))
    assert all(a is b for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))
    _, other = prepared(model, jax.tree.map(lambda leaf: leaf + 1, params))
    assert not np.array_equal(other["head"]["kernel"], first["head"]["kernel"])


def test_what_was_converted_goes_with_the_weights():
    gc.collect()
    before = len(module._converted)
    model, params = built()
    prepared(model, params)
    assert len(module._converted) == before + 1
    del params
    gc.collect()
    assert len(module._converted) == before


def test_weights_that_stay_as_they_are_are_not_kept():
    model, params = build(tiny("decoder_lm", attention="basic", num_heads=1, head_dim=None, tie_embeddings="none"))
    before = len(module._converted)
    assert jax.tree.leaves(prepared(model, params)[1])[0] is jax.tree.leaves(params)[0]
    assert len(module._converted) == before
