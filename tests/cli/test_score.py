"""The fields that `score.py` reads, and the perplexity that it prints."""

import math

import pytest

from tformer_jax.cli import score
from tformer_jax.config import ConfigError


@pytest.mark.parametrize(("nats", "shown"), [(2 * math.log(5), "5"), (1418.0, "8.218e+307"), (1420.0, "inf")])
def test_perplexities_beyond_the_largest_number_are_infinite(nats, shown):
    assert str(score.Totals(nats, tokens=2, texts=1)) == f"perplexity {shown} (tokens: 2, texts: 1)"


@pytest.mark.parametrize(
    ("family", "flag", "read"),
    [
        ("seq2seq", "--field", "--source-field and --target-field"),
        ("decoder_lm", "--source-field", "--field"),
        ("decoder_lm", "--target-field", "--field"),
    ],
)
def test_fields_that_are_not_read_are_rejected(family, flag, read):
    options = score.parser().parse_args(["--run", "run", flag, "x"])
    with pytest.raises(ConfigError, match=f"^{flag} has no effect for model.family='{family}'; write {read}$"):
        score.fields_of(options, family)
