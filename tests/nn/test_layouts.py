"""Other layouts of the same model give the same logits."""

import pytest

from tests.helpers import apply, assert_close, build, tiny
from tests.models.test_cache import SOURCE, TOKENS
from tformer_jax.models import registry
from tformer_jax.nn import layouts
from tformer_jax.special_tokens import PAD


@pytest.mark.parametrize(
    ("family", "tie"), [("decoder_lm", "output"), ("decoder_lm", "none"), ("seq2seq", "all"), ("seq2seq", "output")]
)
def test_a_head_of_its_own_changes_nothing(family, tie):
    model, params = build(tiny(family, tie_embeddings=tie, output_bias=True, scale_output=True))
    cfg, separate = layouts.untied(model.cfg, params)
    assert cfg.tie_embeddings == {"all": "inputs"}.get(tie, "none")
    inputs = (SOURCE, TOKENS) if family == "seq2seq" else (TOKENS,)
    options = {"source_mask": SOURCE != PAD} if family == "seq2seq" else {}
    expected = apply(model, params, *inputs, **options)
    assert_close(apply(registry.build(cfg), separate, *inputs, **options), expected, 1e-6)
