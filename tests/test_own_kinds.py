"""The example of tformer_jax/README.md: kinds of norm and FFN that are not part of the package."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import apply, assert_close, build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds

ROOT = Path(__file__).resolve().parents[1]
TOKENS = np.array([[5, 6, 7, 8]], np.int32)


def example() -> str:
    """Returns the Python block below the heading."""
    text = (ROOT / "tformer_jax" / "README.md").read_text(encoding="utf-8")
    return text.partition("## Add a kind")[2].partition("```python\n")[2].partition("```")[0]


@functools.cache
def scale_norm():
    """Runs the example and returns its norm."""
    exec(example(), {})
    return kinds.NORMS.pop("scalenorm")


@pytest.fixture
def added(monkeypatch):
    """Registers the example's norm during one test."""
    monkeypatch.setitem(kinds.NORMS, "scalenorm", scale_norm())


def test_the_readme_example_is_short():
    assert 10 < len(example().splitlines()) <= 30


@pytest.mark.usefixtures("added")
def test_a_registered_norm_works_everywhere():
    cfg = tiny("decoder_lm", norm="scalenorm", norm_placement="both", qk_norm=True)
    model, params = build(cfg)
    assert params["decoder"]["norm"]["scale"].shape == (1,)
    assert np.isfinite(apply(model, params, TOKENS)).all()


def test_a_registered_activation_and_ffn(monkeypatch):
    from tformer_jax.nn.ffn import FFN

    class Doubled(FFN):
        def hidden(self, x):
            return 2 * super().hidden(x)

    monkeypatch.setitem(kinds.FFNS, "doubled", Doubled)
    monkeypatch.setitem(kinds.ACTIVATIONS, "identity", lambda x: x)
    plain, params = build(tiny("decoder_lm", activation="identity", ffn_bias=False))
    doubled, _ = build(tiny("decoder_lm", activation="identity", ffn_bias=False, ffn="doubled"))
    halved = dict(params["decoder"]["layers_0"]["ffn"])
    halved["contract"] = {"kernel": jnp.asarray(halved["contract"]["kernel"]) / 2}
    layer = params["decoder"]["layers_0"] | {"ffn": halved}
    changed = params | {"decoder": params["decoder"] | {"layers_0": layer}}
    assert_close(apply(doubled, changed, TOKENS), apply(plain, params, TOKENS), 1e-6)


def test_an_unknown_kind_is_refused_when_the_config_is_built():
    with pytest.raises(UserError, match="model.norm='scalenrm': is not a known value; known: layernorm, rmsnorm"):
        tiny("decoder_lm", norm="scalenrm")


@pytest.mark.usefixtures("added")
def test_a_registered_norm_is_finite_for_zeros():
    """Experts return zeros for padding, which the second norm of a sub-layer must handle."""
    cfg = tiny("decoder_lm", norm="scalenorm", norm_placement="both", ffn="moe", moe={"num_experts": 3})
    model, params = build(cfg)

    def total(params):
        return model.apply({"params": params}, TOKENS, padding_mask=TOKENS < 8).sum()

    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradients)))
